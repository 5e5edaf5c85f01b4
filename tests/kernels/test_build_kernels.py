"""The build of the CUDA kernels: what is rebuilt, what is refused, and (where nvcc is) that all of them compile and use
the registers that kernels/registers.txt says."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import types

import pytest

from engine.cuda.module import Kernels
from engine.errors import ConfigError
from kernels import build as build_module
from kernels.build import Resources, build, compare_table, nvcc_version, parse_ptxas, read_table, spilling
from kernels.manifest import (
    KERNELS_DIR,
    FileEntry,
    Manifest,
    ManifestError,
    read_manifest,
    source_hash,
    source_path,
    sources,
    write_manifest,
)  # fmt: skip

NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
EVERYTHING = os.environ.get("CI") == "true" or os.environ.get("APPLIANCE_FULL") == "1"
KERNEL = 'extern "C" __global__ void add_one(int* x) { x[threadIdx.x] += STEP; }\n'

# One worker for all that compile the checkout's kernels: two builds into one folder would only wait for each other.
pytestmark = pytest.mark.xdist_group("nvcc")

needs_nvcc = pytest.mark.skipif(NVCC is None, reason="there is no nvcc here to compile CUDA kernels with")


@pytest.fixture(scope="module")
def compiled() -> list[Resources]:
    """All kernels, into the checkout's own kernels/fatbin, so that only what changed is compiled."""
    if NVCC is None:
        pytest.skip("there is no nvcc here to compile CUDA kernels with")
    if not nvcc_version().startswith("13.0."):  # another compiler, other registers
        pytest.skip(f"nvcc here is {nvcc_version()}; kernels/registers.txt is of 13.0")
    out = KERNELS_DIR / "fatbin" if EVERYTHING else KERNELS_DIR / "fatbin" / "quick"
    used = build(out=out, only_arch=None if EVERYTHING else "90a", jobs=2)
    files = read_manifest(out).files
    assert set(files) == set(sources()) and all(entry.kernels for entry in files.values())
    return used


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_and_uses_what_the_table_says(compiled):
    """By default for the H200 alone; with CI or APPLIANCE_FULL=1 for every architecture."""
    differences = compare_table(compiled, read_table())
    assert not differences, "\n".join(["registers.txt (python -m kernels.build --write-registers):", *differences])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_kernel_spills_registers(compiled):
    """None on the H200. Elsewhere none of those that a decode step spends its time in (there, prefill attention of
    head_dim 256 has no wgmma and more than 255 registers)."""
    hot = ("gemm_", "attention_decode_", "rmsnorm", "qkv_post_", "embed")
    lines = [line.split() for line in spilling(compiled)]
    assert [line for line in lines if line[1] == "90a" or line[0].startswith(hot)] == []


def test_the_table_is_in_order_and_has_the_h200_for_every_kernel():
    table = [line.split() for line in read_table()]
    assert table == sorted(table) and all(len(line) == 6 for line in table)
    arches = {kernel: {line[1] for line in table if line[0] == kernel} for kernel in {line[0] for line in table}}
    assert all(found in ({"90a"}, {"80", "90a"}) for found in arches.values())
    assert {line[0] for line in table} >= {"rmsnorm", "embed", "qkv_post_d128", "checksum"}


# ---- what is rebuilt -------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """A folder of two kernels and a header, and where their fatbins go."""
    (tmp_path / "one.cu").write_text('#include "step.cuh"\n' + KERNEL)
    (tmp_path / "two.cu").write_text("// path: hopper\n#define STEP 2\n" + KERNEL.replace("add_one", "add_two"))
    (tmp_path / "step.cuh").write_text('#include "deeper.cuh"\n')
    (tmp_path / "deeper.cuh").write_text("#define STEP 1\n")
    return tmp_path


@needs_nvcc
def test_only_what_changed_is_compiled_again(folder, monkeypatch):
    out = folder / "fatbin"
    compiled: list[str] = []
    real = build_module._compile
    monkeypatch.setattr(
        build_module, "_compile", lambda source, *rest: compiled.append(source.stem) or real(source, *rest)
    )

    def run(**options):
        compiled.clear()
        used = build(folder, out, only_arch="90a", **options)
        assert {line.kernel for line in used} == {"add_one", "add_two"}  # of what was not compiled again too
        read_manifest(out)
        assert sorted(path.name for path in out.glob("*.fatbin")) == sorted(
            entry.fatbin for entry in read_manifest(out).files.values()
        )
        return sorted(compiled)

    assert run() == ["one", "two"]
    assert run() == []
    (folder / "deeper.cuh").write_text("#define STEP 3\n")
    with pytest.raises(ManifestError, match=r"one\.cu or a header"):
        read_manifest(out)
    assert run() == ["one"]
    (folder / "two.cu").write_text((folder / "two.cu").read_text() + "\n")
    assert run(names=("two",)) == ["two"]
    next(out.glob("one-*")).write_bytes(b"damaged")
    assert run() == ["one"]
    assert run(force=True) == ["one", "two"]
    assert run(flags=(*build_module.FLAGS, "-DNEW")) == ["one", "two"]
    assert run() == ["one", "two"]


@needs_nvcc
def test_refused_files_show_what_nvcc_says(folder):
    (folder / "one.cu").write_text('extern "C" __global__ void broken() { this is no C++; }\n')
    with pytest.raises(build_module.BuildError, match=r"nvcc refused one\.cu:(.|\n)*error"):
        build(folder, folder / "fatbin", only_arch="90a")
    assert not (folder / "fatbin" / "manifest.json").exists()


@needs_nvcc
def test_hopper_files_are_for_hopper_only(folder):
    build(folder, folder / "fatbin", names=("two",))
    (entry,) = read_manifest(folder / "fatbin", check_sources=False).files.values()
    assert (entry.path, entry.arches, entry.kernels) == ("hopper", ("90a",), ("add_two",))


def test_without_nvcc_the_build_says_what_to_install(monkeypatch, folder):
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setattr(build_module.shutil, "which", lambda *_, **__: None)
    with pytest.raises(build_module.BuildError, match="CUDA toolkit"):
        build(folder, folder / "fatbin")


def test_a_path_that_is_neither_is_refused(folder):
    (folder / "one.cu").write_text("// path: blackwell\n" + KERNEL)
    with pytest.raises(ManifestError, match="blackwell"):
        source_path(folder / "one.cu")


# ---- what ptxas says -------------------------------------------------------------------------------------------------

PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'rmsnorm' for 'sm_80'
ptxas info    : Function properties for rmsnorm
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 8 bytes cumulative stack size, 128 bytes smem, 448 bytes cmem[0]
ptxas info    : Compile time = 12.000 ms
ptxas info    : Function properties for _Z12report_errorRK6Common9ErrorCodeiiii
    40 bytes stack frame, 7 bytes spill stores, 7 bytes spill loads
ptxas info    : Compiling entry function 'rmsnorm' for 'sm_90a'
ptxas info    : Function properties for rmsnorm
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""  # as nvcc 13.0 prints it


def test_ptxas_reports_are_read():
    assert parse_ptxas(PTXAS) == [
        Resources("rmsnorm", "80", 32, 16, 128, 8),
        Resources("rmsnorm", "90a", 168, 0, 0, 0),
    ]
    assert spilling(parse_ptxas(PTXAS)) == ["rmsnorm 80 32 16 128 8"]


def test_the_table_is_compared_for_what_was_compiled():
    used = [Resources("a", "90a", 10, 0, 0, 0), Resources("b", "90a", 20, 0, 0, 0), Resources("b", "100", 99, 0, 0, 0)]
    table = ["a 90a 10 0 0 0", "a 80 11 0 0 0", "b 90a 21 0 0 0", "c 90a 1 0 0 0"]
    assert compare_table(used, table) == ["- b 90a 21 0 0 0", "- c 90a 1 0 0 0", "+ b 90a 20 0 0 0"]
    assert compare_table(used, ["a 90a 10 0 0 0", "b 90a 20 0 0 0"]) == []


# ---- what a GPU is given ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arches,capability,runs",
    [
        (("80",), (8, 0), True), (("80",), (8, 9), True), (("86",), (8, 0), False), (("80",), (9, 0), False),
        (("90a",), (9, 0), True), (("90a",), (10, 0), False), (("ptx80",), (12, 0), True), (("ptx80",), (7, 5), False),
        (("100",), (10, 3), True), (("100",), (12, 0), False), (("120",), (12, 1), True), ((), (9, 0), False),
    ],
)  # fmt: skip
def test_which_gpu_can_load_what(arches, capability, runs):
    """CUDA programming guide, "Binary compatibility" and "PTX compatibility"; sm_90a runs on 9.0 alone."""
    assert FileEntry("f", "", "", "portable", arches, ()).runs_on(*capability) is runs


class FakeContext:
    """What Kernels asks of a DeviceContext."""

    def __init__(self, capability):
        self.info = types.SimpleNamespace(compute_capability=capability, name="GPU")
        self.loaded, self.unloaded, self.closers = [], [], []
        self.api = types.SimpleNamespace(
            cuModuleLoadData=lambda image: (self.loaded.append(image) or 0, len(self.loaded)),
            cuModuleGetFunction=lambda module, name: (0, (module, name)),
            cuFuncLoad=lambda function: (0,),
            cuModuleUnload=lambda module: (self.unloaded.append(module) or 0,),
        )

    def on_close(self, what, close):
        self.closers.append(close)


@pytest.fixture
def fatbins(tmp_path):
    out = tmp_path / "fatbin"
    out.mkdir()
    files = {}
    for name, path, arches in (("rows", "portable", ("80", "90a")), ("fast", "hopper", ("90a",))):
        source = tmp_path / f"{name}.cu"
        source.write_text(f"// path: {path}\n")
        image = name.encode()
        (out / f"{name}.fatbin").write_bytes(image)
        digest = source_hash(source, arches, ("-O3",))
        sha256 = hashlib.sha256(image).hexdigest()
        files[name] = FileEntry(f"{name}.fatbin", sha256, digest, path, arches, (f"{name}_kernel",))
    write_manifest(out, Manifest("13.0.88", files), ("-O3",))
    return out


def test_modules_are_loaded_once_and_unloaded(fatbins):
    context = FakeContext((9, 0))
    kernels = Kernels(context, fatbins)
    assert kernels.path == "hopper" and context.loaded == []
    kernels.load_all()
    assert sorted(context.loaded) == [b"fast", b"rows"]
    assert kernels.function("rows", "rows_kernel") is kernels.function("rows", "rows_kernel")
    assert len(context.loaded) == 2
    context.closers[0]()
    assert sorted(context.unloaded) == [1, 2]


def test_a_portable_gpu_never_loads_hopper_files(fatbins):
    context = FakeContext((8, 9))
    kernels = Kernels(context, fatbins)
    kernels.load_all()
    assert kernels.path == "portable" and context.loaded == [b"rows"]


@pytest.mark.parametrize(
    "break_it,message",
    [
        (lambda out: (out / "manifest.json").unlink(), "no compiled kernels"),
        (lambda out: (out / "manifest.json").write_text("{"), "damaged"),
        (lambda out: (out / "manifest.json").write_text('{"schema": 99}'), "schema 99"),
        (lambda out: (out / "manifest.json").write_text('{"schema": 1, "compiler": "", "files": {"a": 1}}'), "damaged"),
        (lambda out: (out.parent / "rows.cu").write_text("changed"), "changed since it was compiled"),
        (lambda out: (out.parent / "new.cu").write_text(""), r"new\.cu was never compiled"),
    ],
)  # fmt: skip
def test_fatbins_that_do_not_belong_to_the_sources_are_refused(fatbins, break_it, message):
    break_it(fatbins)
    with pytest.raises(ConfigError, match=message) as caught:
        Kernels(FakeContext((9, 0)), fatbins)
    assert "make kernels" in (caught.value.hint or "")


def test_a_gpu_the_kernels_were_not_compiled_for_is_refused(fatbins):
    with pytest.raises(
        ConfigError, match=r"rows\.cu was not compiled for GPU \(compute capability 12\.0\), only for 80, 90a"
    ):
        Kernels(FakeContext((12, 0)), fatbins)


def test_damaged_and_missing_fatbins_are_refused(fatbins):
    kernels = Kernels(FakeContext((9, 0)), fatbins)
    (fatbins / "rows.fatbin").write_bytes(b"rowz")
    with pytest.raises(ConfigError, match=r"rows\.fatbin is damaged"):
        kernels.function("rows", "rows_kernel")
    (fatbins / "fast.fatbin").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*fast\.fatbin"):
        kernels.function("fast", "fast_kernel")
    with pytest.raises(ConfigError, match=r"no other\.cu"):
        kernels.function("other", "x")


def test_a_manifest_cannot_name_files_elsewhere(fatbins):
    raw = json.loads((fatbins / "manifest.json").read_text())
    raw["files"]["rows"]["fatbin"] = "../rows.fatbin"
    (fatbins / "manifest.json").write_text(json.dumps(raw))
    with pytest.raises(ManifestError, match="not a plain file name"):
        read_manifest(fatbins)
