"""The collection as ansible-lint, yamllint, ansible-doc, ansible-galaxy and ansible-playbook see it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.ansible.modules import ROOT

COLLECTION = ROOT / "ansible"
PLAYBOOKS = sorted(path.stem for path in (COLLECTION / "playbooks").glob("*.yml"))
MODULES = sorted(path.stem for path in (COLLECTION / "plugins/modules").glob("*.py"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("ansible")]


def run(binaries: Path, *command: str, cwd: Path = COLLECTION) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("ANSIBLE_", "PYTHON"))}
    environment |= {"PATH": f"{binaries}:{os.environ['PATH']}", "NO_COLOR": "1", "ANSIBLE_NOCOLOR": "1"}
    environment |= {"ANSIBLE_DEVEL_WARNING": "0", "ANSIBLE_LOCALHOST_WARNING": "0"}
    program = binaries / command[0]
    return subprocess.run(
        [program, *command[1:]], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def load_yaml(binaries: Path, path: Path) -> Any:
    script = "import json, sys, yaml; print(json.dumps(yaml.safe_load(open(sys.argv[1]))))"
    return json.loads(run(binaries, "python", "-c", script, str(path)).stdout)


def test_ansible_lint_production_profile(ansible_bin: Path) -> None:
    done = run(ansible_bin, "ansible-lint", "--offline", "--nocolor", "-q", "--parseable")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_profile_is_production_and_nothing_is_skipped(ansible_bin: Path) -> None:
    settings = load_yaml(ansible_bin, COLLECTION / ".config/ansible-lint.yml")
    assert settings["profile"] == "production" and settings["strict"] is True
    assert not settings.keys() & {"skip_list", "warn_list", "mock_modules"}
    noqa = [path for path in COLLECTION.rglob("*.yml") if re.search(r"#\s*(noqa|nosec)", path.read_text())]
    assert not noqa


def test_yamllint(ansible_bin: Path) -> None:
    done = run(ansible_bin, "yamllint", "--strict", ".")
    assert done.returncode == 0, done.stdout


def test_no_folder_of_ours_is_a_python_package() -> None:
    """ansible/__init__.py would shadow the installed ansible for everything that runs in the checkout."""
    assert not list(COLLECTION.rglob("__init__.py"))


@pytest.mark.parametrize("playbook", PLAYBOOKS)
def test_syntax(ansible_bin: Path, playbook: str, tmp_path: Path) -> None:
    inventory = COLLECTION / "inventory.example" / "hosts.yml"
    done = run(
        ansible_bin,
        "ansible-playbook",
        "--syntax-check",
        "-i",
        str(inventory),
        f"appliance.host.{playbook}",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr


def test_the_playbooks_that_the_design_names() -> None:
    assert {"install", "upgrade", "drain", "uninstall", "verify"} <= set(PLAYBOOKS)


@pytest.mark.parametrize("module", MODULES)
def test_every_module_documents_its_options(ansible_bin: Path, module: str, tmp_path: Path) -> None:
    done = run(ansible_bin, "ansible-doc", "--json", f"appliance.host.{module}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    doc = json.loads(done.stdout)[f"appliance.host.{module}"]
    spec = (COLLECTION / "plugins/modules" / f"{module}.py").read_text()
    declared = set(re.findall(r'^            "(\w+)": \{"type"', spec, re.M))
    assert set(doc["doc"]["options"]) == declared != set()
    assert doc["examples"] and doc["return"]


@pytest.mark.parametrize("role", ["appliance", "gpu_host"])
def test_argument_specs_and_defaults_say_the_same(ansible_bin: Path, role: str) -> None:
    """Ansible reads defaults from defaults/main.yml only; `default:` in the specs is documentation (ansible#77159)."""
    defaults = load_yaml(ansible_bin, COLLECTION / f"roles/{role}/defaults/main.yml")
    specs = load_yaml(ansible_bin, COLLECTION / f"roles/{role}/meta/argument_specs.yml")["argument_specs"]
    documented: dict[str, Any] = {}
    for entry in specs.values():
        for name, option in entry["options"].items():
            assert documented.setdefault(name, option) == option, f"{name} differs between entry points"
    optional = {name for name in documented if name not in defaults}
    assert defaults.keys() <= documented.keys()
    assert optional <= {"appliance_api_keys", "appliance_healthcheck"}, "undefined means: leave the host's file"
    for name, value in defaults.items():
        if not (isinstance(value, str) and "{{" in value):
            assert documented[name].get("default") == value, name


@pytest.mark.parametrize("role", ["appliance", "gpu_host"])
def test_each_entry_point_has_its_spec(ansible_bin: Path, role: str) -> None:
    specs = load_yaml(ansible_bin, COLLECTION / f"roles/{role}/meta/argument_specs.yml")["argument_specs"]
    tasks = {path.stem for path in (COLLECTION / f"roles/{role}/tasks").glob("*.yml")}
    used = {"main"} | {
        word
        for path in (COLLECTION / "playbooks").glob("*.yml")
        for block in path.read_text().split("include_role")[1:]
        if f"name: appliance.host.{role}" in block
        for line in re.findall(r"tasks_from: (.*)", block)
        for word in re.findall(r"[a-z]+", re.sub(r"undrain \| default|\bif\b|\belse\b|\bbool\b|false", "", line))
    }
    assert used <= set(specs) <= tasks


def test_the_inventory_to_copy_passes_preflight_of_its_variables(ansible_bin: Path, tmp_path: Path) -> None:
    inventory = COLLECTION / "inventory.example"
    done = run(ansible_bin, "ansible-inventory", "-i", str(inventory), "--list", cwd=tmp_path)
    hosts = json.loads(done.stdout)["_meta"]["hostvars"]
    specs = load_yaml(ansible_bin, COLLECTION / "roles/appliance/meta/argument_specs.yml")["argument_specs"]["main"]
    for variables in hosts.values():
        ours = {name for name in variables if name.startswith("appliance_")}
        assert ours and ours <= set(specs["options"])


def test_the_built_collection_is_complete_and_holds_nothing_else(ansible_bin: Path, tmp_path: Path) -> None:
    done = run(ansible_bin, "ansible-galaxy", "collection", "build", str(COLLECTION), "--output-path", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (built,) = tmp_path.glob("appliance-host-*.tar.gz")
    with tarfile.open(built) as tar:
        names = {name for name in tar.getnames() if not name.endswith("/")}
    assert {f"playbooks/{name}.yml" for name in PLAYBOOKS} <= names
    assert {
        "roles/appliance/tasks/main.yml",
        "plugins/action/bundle.py",
        "plugins/module_utils/installation.py",
    } <= names
    assert not [name for name in names if name.startswith("bundle") or "__pycache__" in name or name.endswith(".pyc")]


def test_switches_given_on_the_command_line_work() -> None:
    """`-e appliance_purge=true` gives text, which is no condition for ansible-core 2.19: conditions convert it."""
    switches = set()
    for defaults in COLLECTION.glob("roles/*/defaults/main.yml"):
        switches |= set(re.findall(r"^(\w+): (?:true|false)$", defaults.read_text(), re.MULTILINE))
    assert {"appliance_purge", "gpu_host_reboot"} <= switches
    bare = re.compile(rf"(?:when:|^ +- |\b(?:and|or|not)) \(?(?:{'|'.join(sorted(switches))})\b(?! \| bool)")
    wrong = [
        f"{path.relative_to(COLLECTION)}: {line.strip()}"
        for path in sorted(COLLECTION.glob("roles/*/tasks/*.yml"))
        for line in path.read_text().splitlines()
        if bare.search(line)
    ]
    assert not wrong
