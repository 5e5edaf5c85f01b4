"""What became of a GPU, without NVML and without opening a device: for the launcher when an engine gives up, and for
report_failure. Reads the driver's /proc and the PCI bus's /sys, so a GPU that hangs cannot hang who asks.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from appliance.gpus import visible_gpus


@dataclass(frozen=True, slots=True)
class GpuFacts:
    state: str
    pci: str | None = None  # 0000:1b:00.0, where the driver shows the GPU


def gpu_facts(
    uuid: str, proc: Path = Path("/proc/driver/nvidia"), pci: Path = Path("/sys/bus/pci/devices")
) -> GpuFacts:
    """State of one GPU in a word: "shown" by the driver, "no-driver", "off-bus" (a GPU of this host answers no PCI read
    any more), "not-shown" (on the bus, but not by this UUID), "unknown"."""
    try:
        if not (proc / "version").exists():
            return GpuFacts("no-driver")
        for gpu in visible_gpus(proc / "gpus", pci):
            if gpu.uuid == uuid:  # the driver goes on showing a GPU that fell off the bus: the bus has the last word
                return GpuFacts("off-bus" if _answers(pci / gpu.pci) is False else "shown", gpu.pci)
        silent = any(_answers(device) is False for device in pci.iterdir() if _is_gpu(device))
        return GpuFacts("off-bus" if silent else "not-shown")
    except OSError:
        return GpuFacts("unknown")


def _is_gpu(device: Path) -> bool:
    """NVIDIA, display or 3D controller; sysfs keeps both from when the device was found."""
    try:
        vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
    except OSError:
        return False
    return vendor == "0x10de" and kind.startswith("0x03")


def _answers(device: Path) -> bool | None:
    """Whether a read of the PCI configuration space comes back (all ones: nobody answers); None: cannot be read."""
    try:
        with (device / "config").open("rb") as file:
            return file.read(4) != b"\xff\xff\xff\xff"
    except OSError:
        return None
