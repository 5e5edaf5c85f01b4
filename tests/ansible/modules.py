"""Our Ansible plugins as plain modules: by path, since nothing in tests' venv knows collections.

The folder ansible/ is no package on purpose (it would shadow the installed one).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
_PREFIX = "ansible_collections.appliance.host.plugins"


def load(path: str) -> ModuleType:
    """`load("module_utils/installation")`; also found by the imports that the plugins have among themselves."""
    name = f"{_PREFIX}.{path.replace('/', '.')}"
    if name in sys.modules:
        return sys.modules[name]
    parts = name.split(".")[:-1]
    for length in range(1, len(parts) + 1):
        package = ".".join(parts[:length])
        if package not in sys.modules:
            sys.modules[package] = ModuleType(package)
            sys.modules[package].__path__ = []
    spec = importlib.util.spec_from_file_location(name, ROOT / "ansible" / "plugins" / f"{path}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)
    spec.loader.exec_module(module)
    return module


def load_builder(name: str) -> ModuleType:
    """A module of ansible/bundle, as `python ansible/bundle` sees it."""
    directory = str(ROOT / "ansible" / "bundle")
    sys.path.insert(0, directory)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(directory)
