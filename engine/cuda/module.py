"""Loads the compiled kernels: fatbins named by kernels/fatbin/manifest.json, which `make kernels` wrote.

A GPU host needs no compiler. What is loaded is what was built: contents are checked against the manifest, and the
manifest against the sources where they lie beside it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from engine.cuda.errors import check
from engine.errors import ConfigError
from kernels.manifest import FATBIN_DIR, FileEntry, Manifest, ManifestError, read_manifest

if TYPE_CHECKING:
    from pathlib import Path

    from engine.cuda.context import DeviceContext

_REBUILD = "Run `make kernels` where nvcc is, or install a package that holds the compiled kernels."


class Kernels:
    """Modules and functions of one context, loaded when first asked for. Closed with the context.

    path: "hopper" on compute capability 9.0, else "portable" (kernels/launch.py). ConfigError if the fatbins are
    missing, damaged, older than the sources, or not compiled for this GPU.
    """

    def __init__(self, context: DeviceContext, folder: Path = FATBIN_DIR) -> None:
        self._context = context
        self._folder = folder
        major, minor = context.info.compute_capability
        self.path = "hopper" if (major, minor) == (9, 0) else "portable"
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        try:
            self.manifest: Manifest = read_manifest(folder)
        except ManifestError as error:
            raise ConfigError(str(error), hint=_REBUILD) from error
        for name, entry in self.manifest.files.items():
            if entry.path in (self.path, "portable") and not entry.runs_on(major, minor):
                raise ConfigError(
                    f"kernels/{name}.cu was not compiled for {context.info.name} (compute capability {major}.{minor}), "
                    f"only for {', '.join(entry.arches)}",
                    hint=_REBUILD,
                )
        context.on_close("kernels", self.close)

    def function(self, module: str, kernel: str) -> Any:
        """CUfunction of extern "C" `kernel` in kernels/<module>.cu, its code already on the device."""
        found = self._functions.get((module, kernel))
        if found is None:
            api = self._context.api
            found = check(api.cuModuleGetFunction(self._module(module), kernel.encode()), f"finding kernel {kernel}")
            check(api.cuFuncLoad(found), f"loading kernel {kernel}")  # else the first launch would allocate
            self._functions[module, kernel] = found
        return found

    def load_all(self) -> None:
        """Load every kernel of this GPU's path, so that no step is the first to use one."""
        for name, entry in self.manifest.files.items():
            if entry.path in (self.path, "portable"):
                for kernel in entry.kernels:
                    self.function(name, kernel)

    def _module(self, name: str) -> Any:
        module = self._modules.get(name)
        if module is None:
            image = self._image(name)
            module = self._modules[name] = check(
                self._context.api.cuModuleLoadData(image), f"loading the kernels of {name}.cu"
            )
        return module

    def _image(self, name: str) -> bytes:
        entry: FileEntry | None = self.manifest.files.get(name)
        if entry is None:
            raise ConfigError(f"the manifest in {self._folder} has no {name}.cu", hint=_REBUILD)
        path = self._folder / entry.fatbin
        try:
            image = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}", hint=_REBUILD) from error
        if hashlib.sha256(image).hexdigest() != entry.sha256:
            raise ConfigError(f"{path} is damaged: its SHA-256 is not the manifest's", hint=_REBUILD)
        return image

    def close(self) -> None:
        self._functions.clear()
        while self._modules:
            name, module = self._modules.popitem()
            check(self._context.api.cuModuleUnload(module), f"unloading the kernels of {name}.cu")
