#!/usr/bin/python
# Copyright: the LLM appliance maintainers
# SPDX-License-Identifier: Apache-2.0
"""A model in the host's store; DOCUMENTATION below."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model
short_description: Bring a model into the model store of a host
description:
  - Copies a Hugging Face style directory of the controller into the model store, each file checked by its SHA-256.
  - A model of that name with the same files is left alone. With other files the task fails, since releases rely on it.
version_added: 0.1.0
author: LLM appliance maintainers (@appliance)
options:
  name:
    description: Its name in the store.
    type: str
    required: true
  src:
    description: The directory on the controller (C(config.json), C(*.safetensors), C(tokenizer.json)).
    type: path
  store:
    description: The model store on the host.
    type: path
    default: /srv/appliance/models
  staged:
    description: Set by the action plugin, where the files lie on the host.
    type: path
  files:
    description: Set by the action plugin, name to SHA-256.
    type: dict
attributes:
  check_mode:
    description: Says what it would copy.
    support: full
  diff_mode:
    description: Shows the files.
    support: full
"""

EXAMPLES = r"""
- name: Bring the model
  appliance.host.model:
    name: llama-3.1-8b
    src: /data/models/Llama-3.1-8B-Instruct
"""

RETURN = r"""
model: {description: The files in the store; none where there is no such model., type: dict, returned: always}
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

APPLIANCE = "/usr/bin/appliance"


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "src": {"type": "path"},
            "store": {"type": "path", "default": "/srv/appliance/models"},
            "staged": {"type": "path"},
            "files": {"type": "dict"},
        },
        supports_check_mode=True,
    )
    store, staged = Path(module.params["store"]), module.params["staged"]
    found = stored_files(store / module.params["name"])
    if staged is None or module.check_mode:
        module.exit_json(changed=False, model=found)
    try:
        _check(Path(staged), module.params["files"])
        command = add_command(staged, module.params["name"], store, module.params["src"])
        status, out, error = module.run_command(command)
        if status != 0:
            module.fail_json(msg=f"appliance model add: {error.strip() or out.strip()}")
    except ValueError as error:
        module.fail_json(msg=str(error))
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    module.exit_json(changed=True, model=stored_files(store / module.params["name"]))


def add_command(staged: str, name: str, store: Path, src: str | None) -> list[str]:
    """`appliance model list` is to show where the model is from, not the directory it was sent to."""
    origin = [f"--origin={src} on the Ansible controller"] if src else []
    return [APPLIANCE, "model", "add", staged, "--name", name, "--root", str(store), "--quiet", *origin]


def stored_files(directory: Path) -> dict[str, str] | None:
    """Name -> SHA-256 of a model's files, from its manifest; None where there is no such model."""
    try:
        files = json.loads((directory / "manifest.json").read_bytes())["files"]
        return {name: entry["sha256"] for name, entry in files.items()}
    except FileNotFoundError:
        return None


def _check(staged: Path, files: dict[str, Any]) -> None:
    for name, expected in files.items():
        digest = hashlib.sha256()
        with (staged / name).open("rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != expected:
            raise ValueError(f"{name} was damaged on its way (SHA-256); run this again")


if __name__ == "__main__":
    main()
