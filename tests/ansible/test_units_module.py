"""What the module `units` does about what systemd says (plugins/modules/units.py)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import pytest

from tests.ansible.modules import ROOT

# systemd 252: `systemctl show --property=Id,LoadState,UnitFileState,ActiveState UNIT...`
SHOWN = """\
Id=appliance.target
LoadState=loaded
ActiveState=active
UnitFileState=enabled

Id=appliance-gateway@stable.service
LoadState=loaded
ActiveState=inactive
UnitFileState=enabled

Id=appliance-gpu@1.service
LoadState=loaded
ActiveState=activating
UnitFileState=disabled

Id=nothing.service
LoadState=not-found
ActiveState=inactive
UnitFileState=
"""
THERE = ["appliance.target", "appliance-gateway@stable.service", "appliance-gpu@1.service"]


@pytest.fixture(scope="module")
def planned() -> Callable[[list[str], str], tuple[list[str], list[str], list[str]]]:
    """`plan(names, parse(text))`; its module imports Ansible, which tests' venv does not have."""
    source = ast.parse((ROOT / "ansible/plugins/modules/units.py").read_text())
    wanted: list[ast.stmt] = [
        node for node in source.body
        if (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_RUNS")
        or (isinstance(node, ast.FunctionDef) and node.name in ("parse", "plan"))
    ]  # fmt: skip
    space: dict[str, Any] = {}
    exec(compile(ast.Module(wanted, []), "units.py", "exec"), space)
    return lambda names, text: space["plan"](names, space["parse"](text))


def test_what_lacks_is_enabled_and_started(planned: Callable[..., Any]) -> None:
    missing, enable, start = planned(THERE, SHOWN)
    assert (missing, enable, start) == ([], ["appliance-gpu@1.service"], ["appliance-gateway@stable.service"])


def test_a_unit_that_systemd_does_not_know_is_named(planned: Callable[..., Any]) -> None:
    assert planned([*THERE, "nothing.service", "unheard.service"], SHOWN)[0] == ["nothing.service", "unheard.service"]


def test_nothing_to_do(planned: Callable[..., Any]) -> None:
    well = SHOWN.replace("inactive", "active").replace("disabled", "enabled")
    assert planned(THERE, well) == ([], [], [])
