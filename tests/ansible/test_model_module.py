"""What the module `model` asks the host's command to do, asked of that very command."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from appliance.cli import main
from tests.ansible.modules import ROOT
from tests.tiny import make_tiny_model


def test_list_names_where_a_model_is_from_and_not_where_it_was_staged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ast.parse((ROOT / "ansible/plugins/modules/model.py").read_text())
    wanted: list[ast.stmt] = [
        node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "add_command"
    ]  # alone: its module imports Ansible, which tests' venv does not have
    space: dict[str, Any] = {"Path": Path, "APPLIANCE": "/usr/bin/appliance"}
    exec(compile(ast.Module(wanted, []), "model.py", "exec"), space)
    staged = make_tiny_model(tmp_path / ".incoming-0123456789abcdef")
    store = tmp_path / "store"
    assert main(space["add_command"](str(staged), "tiny", store, "/data/models/Tiny")[1:]) == 0
    capsys.readouterr()
    assert main(["model", "list", "--root", str(store)]) == 0
    shown = capsys.readouterr().out
    assert "copy of /data/models/Tiny on the Ansible controller" in shown and ".incoming" not in shown
    assert main(["model", "add", str(staged), "--link", "--origin", "x", "--root", str(store)]) == 2
