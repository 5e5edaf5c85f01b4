"""`healthcheck inject-fault` with a scripted NVML: every fault that it writes is one that the checks then see."""

from __future__ import annotations

from pathlib import Path

import pytest

from healthcheck.checks import check_hosts_gpus, event_signals, judge
from healthcheck.limits import Limits
from healthcheck.nvml import Round
from healthcheck.nvml_protocol import Gpu
from healthcheck.script_edit import healthy_script, reset_gpu, write_script
from healthcheck.scripted_faults import inject
from healthcheck.scripted_nvml import ScriptedBackend
from healthcheck.types import GpuReading

UUID = "GPU-a"


def read(backend: ScriptedBackend) -> dict[str, GpuReading]:
    found: dict[str, GpuReading] = {}

    def keep(gpu: Gpu) -> None:
        found[gpu.uuid] = GpuReading(gpu.uuid, gpu.at, dict(gpu.fields), dict(gpu.unknown), gpu.error)

    assert backend.read({}, frozenset(), lambda begin: None, keep).ok
    return found


@pytest.mark.parametrize(
    "key",
    ["xid:79", "recovery_action:2", "ecc:uncorrected", "remap:pending", "remap:failure", "sram:threshold", "ecc:off",
     "nvml:gpu_is_lost", "nvml:reset_required", "gpu:missing"],
)  # fmt: skip
def test_what_is_injected_is_seen(tmp_path: Path, key: str) -> None:
    path = tmp_path / "nvml.json"
    write_script(path, healthy_script([UUID, "GPU-b"]))
    backend = ScriptedBackend(path)
    before = judge(read(backend)[UUID], None, Limits())
    assert not before.signals
    assert inject(path, UUID, key)
    signals = [signal for event in backend.events() for signal in event_signals(event)]
    readings = read(backend)
    if UUID in readings:
        signals += judge(readings[UUID], before.baseline, Limits()).signals
    done = Round(True, None, "", None, tuple(readings), ())
    signals += check_hosts_gpus(done, readings, [UUID, "GPU-b"], 0.0)[1]
    assert [(signal.key, signal.uuid) for signal in signals] == [(key, UUID)]


def test_a_reset_cures_what_a_reset_cures(tmp_path: Path) -> None:
    path = tmp_path / "nvml.json"
    write_script(path, healthy_script([UUID]))
    for key in ("recovery_action:1", "ecc:uncorrected", "remap:pending", "remap:failure"):
        inject(path, UUID, key)
    reset_gpu(path, UUID)
    judged = judge(read(ScriptedBackend(path))[UUID], None, Limits())
    assert [signal.key for signal in judged.signals] == ["remap:failure"]


def test_what_nvml_would_not_tell_is_not_its_script(tmp_path: Path) -> None:
    path = tmp_path / "nvml.json"
    write_script(path, healthy_script([UUID]))
    before = path.read_text()
    for key in ("golden:mismatch", "checksum:mismatch", "engine:error", "gpu:off_the_bus", "xid:x"):
        assert not inject(path, UUID, key)
    assert path.read_text() == before
