"""When the module `release` takes a release that is there for the one asked for (plugins/modules/release.py)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from tests.ansible.modules import ROOT


@pytest.fixture(scope="module")
def difference() -> Callable[[dict[str, Any], dict[str, Any]], str | None]:
    """The function alone: its module imports Ansible, which tests' venv does not have."""
    source = ast.parse((ROOT / "ansible/plugins/modules/release.py").read_text())
    wanted: list[ast.stmt] = [
        node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "difference"
    ]
    space: dict[str, Any] = {"Any": Any}
    exec(compile(ast.Module(wanted, []), "release.py", "exec"), space)
    function: Callable[[dict[str, Any], dict[str, Any]], str | None] = space["difference"]
    return function


# As `appliance release list --json` shows it.
THERE = {
    "name": "v1", "model": "tiny", "model_name": "tiny", "problem": None,
    "options": {"max_model_len": 512, "max_batch_seqs": None, "arguments": ["--threads=1"]},
}  # fmt: skip
ASKED = {"model": "tiny", "model_name": None, "options": {"max_model_len": "512"}, "arguments": ["--threads=1"]}


@pytest.mark.parametrize(
    ("change", "there", "found"),
    [
        ({}, {}, None),
        ({"model_name": "tiny"}, {}, None),
        ({"model": None, "model_name": None}, {"model_name": "other"}, None),  # only its name was given
        ({"model": "big"}, {}, "with model 'tiny' instead of 'big'"),
        ({"model_name": "chat"}, {}, "with model_name 'tiny' instead of 'chat'"),
        (
            {"options": {"max_model_len": 1024}},
            {},
            "with options {'max_model_len': 512} instead of {'max_model_len': 1024}",
        ),
        ({"options": {}}, {}, "with options {'max_model_len': 512} instead of {}"),
        ({"arguments": []}, {}, "with arguments ['--threads=1'] instead of []"),
        ({}, {"problem": "release.json is damaged"}, "but damaged (release.json is damaged)"),
    ],
)
def test_difference(
    difference: Callable[..., str | None], change: dict[str, Any], there: dict[str, Any], found: str | None
) -> None:
    assert difference(THERE | there, ASKED | change) == found
