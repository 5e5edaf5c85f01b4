# Copyright: the LLM appliance maintainers
# SPDX-License-Identifier: Apache-2.0
"""The controller's half of appliance.host.model: compares digests, and copies files where there is no such model."""

from __future__ import annotations

import hashlib
import posixpath
import shlex
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken")


class ActionModule(ActionBase):  # type: ignore[misc]
    TRANSFERS_FILES = True

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        args = dict(self._task.args)
        source = Path(str(args.pop("src", None) or "")).expanduser()
        if not (source / "config.json").is_file():
            raise AnsibleActionFail(f"{source} holds no config.json; src is the model's directory on the controller")
        if not source.is_absolute():
            raise AnsibleActionFail(f"src must be an absolute path, not {source}")
        there = self._ask(args, task_vars)
        if there.get("failed"):
            return there
        names = sorted(path.name for path in source.iterdir() if path.suffix in SUFFIXES and path.is_file())
        stored: dict[str, str] | None = there["model"]
        local = {name: _sha256(source / name) for name in (names if stored is None else sorted(stored))}
        if stored is not None:
            different = sorted(name for name, digest in stored.items() if local[name] != digest)
            if different:
                raise AnsibleActionFail(
                    f"the host has a model {args['name']} with other content ({', '.join(different[:3])}); releases "
                    "rely on it: bring yours under another name, or remove that one (appliance model remove)"
                )
            return there
        diff = {"before": "", "after": "".join(f"{digest}  {args['name']}/{name}\n" for name, digest in local.items())}
        if self._task.check_mode:
            return {"changed": True, "model": None, "diff": diff}
        return self._copy(source, local, args, task_vars) | {"diff": diff}

    def _copy(
        self, source: Path, files: dict[str, str | None], args: dict[str, Any], task_vars: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Through a directory on the file system of the store, which has room for models; /tmp and /root often have
        not. It belongs to the user who logs in: files are transferred without become."""
        parent = posixpath.dirname(str(args.get("store", "/srv/appliance/models")))
        staged = posixpath.join(parent, f".incoming-{hashlib.sha256(str(args['name']).encode()).hexdigest()[:16]}")
        quoted = shlex.quote(staged)
        user = self._low_level_execute_command("id -u", sudoable=False)["stdout"].strip()
        if not user.isdecimal():
            raise AnsibleActionFail(f"`id -u` said {user!r} on the host")
        made = self._low_level_execute_command(
            f"umask 077; rm -rf {quoted} && mkdir -p {quoted} && chown {user} {quoted}"
        )
        if made["rc"] != 0:
            raise AnsibleActionFail(f"cannot make {staged}: {made['stderr']}")
        for name in files:
            self._transfer_file(str(source / name), posixpath.join(staged, name))
        return self._ask({**args, "src": str(source), "staged": staged, "files": files}, task_vars)

    def _ask(self, args: dict[str, Any], task_vars: dict[str, Any] | None) -> dict[str, Any]:
        answer: dict[str, Any] = self._execute_module("appliance.host.model", args, task_vars=task_vars)
        return answer


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
