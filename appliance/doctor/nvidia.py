"""Driver, device nodes, GPUs and the services of NVIDIA around them."""

from __future__ import annotations

import re
from pathlib import Path

from appliance.doctor.report import NOT_NEEDED, Check, Finding, Host, degraded, failed, of_cuda, ok, unknown
from appliance.gpus import Gpu, mig_gpus, read_slots, unready_gpus, visible_gpus

MIN_DRIVER = 580  # the first branch with CUDA 13 (CUDA 13.0 release notes, table "CUDA Toolkit and Driver Versions")
NVIDIA_MAJOR, CONTROL_MINOR = 195, 255  # Documentation/admin-guide/devices.txt; nvidia-modprobe has them fixed as well
_VERSION = re.compile(r"Kernel Module(?: for \S+)?\s+([0-9]+)((?:\.[0-9]+)+)")


@of_cuda
def driver(host: Host) -> Finding:
    """The loaded module, from /proc/driver/nvidia/version; the open and the closed module write it differently."""
    if host.cpu_only:
        return ok(NOT_NEEDED)
    text = host.read("/proc/driver/nvidia/version")
    if text is None:
        return _not_loaded(host)
    found = _VERSION.search(text)
    if found is None:
        return unknown(f"cannot read a version from {text.strip().splitlines()[:1]}")
    version = found[1] + found[2]
    if int(found[1]) < MIN_DRIVER:
        return failed(f"driver {version} is too old for CUDA 13", f"install a driver of branch {MIN_DRIVER} or newer")
    kind = "open" if "Open Kernel Module" in text else "closed"
    return ok(f"driver {version} ({kind} module)")


def _not_loaded(host: Host) -> Finding:
    gpus = [device for device, vendor, kind in _pci(host) if vendor == "0x10de" and kind.startswith("0x03")]
    if not gpus:
        return failed("the NVIDIA driver is not loaded, and no NVIDIA GPU is on the PCI bus", "see lspci and the BIOS")
    bound = {(device / "driver").resolve().name for device in gpus if (device / "driver").exists()}
    if "nouveau" in bound:
        return failed(
            f"{len(gpus)} GPUs belong to nouveau", "blacklist nouveau, `update-initramfs -u`, reboot (NVIDIA README)"
        )
    if "vfio-pci" in bound:
        return failed(f"{len(gpus)} GPUs belong to vfio-pci", "they are given to a virtual machine: unbind them")
    return failed(
        f"{len(gpus)} GPUs, but the NVIDIA driver is not loaded", "`modprobe nvidia` and dmesg say why (DKMS? signing?)"
    )


def _pci(host: Host) -> list[tuple[Path, str, str]]:
    """(device, vendor, class) of sysfs."""
    directory, found = host.root / "sys/bus/pci/devices", []
    for device in sorted(directory.iterdir()) if directory.is_dir() else ():
        try:
            found.append((device, (device / "vendor").read_text().strip(), (device / "class").read_text().strip()))
        except OSError:
            continue  # unplugged meanwhile
    return found


@of_cuda
def module(host: Host) -> Finding:
    """Is the module on disk the one that runs? If not, the libraries are newer as well, and CUDA and NVML refuse."""
    if host.cpu_only:
        return ok(NOT_NEEDED)
    loaded = (host.read("/sys/module/nvidia/version") or "").strip()
    result = host.command("modinfo", "-F", "version", "nvidia")
    if not loaded or not result.ok:
        return unknown(f"cannot compare with the module on disk: {result.why() if loaded else 'not loaded'}")
    installed = result.text.strip()
    if installed != loaded:
        return failed(
            f"module {loaded} is loaded, {installed} is installed: CUDA and NVML refuse (version mismatch)",
            "reboot, or stop everything on the GPUs and load the module again",
        )
    return ok(f"loaded and installed module are both {loaded}")


def character_majors(text: str) -> dict[str, set[int]]:
    """/proc/devices: name -> majors of character devices. Up to driver 550.40 195 is called nvidia-frontend."""
    majors: dict[str, set[int]] = {}
    for line in text.partition("Block devices:")[0].splitlines():
        words = line.split()
        if len(words) == 2 and words[0].isdecimal():
            majors.setdefault(words[1], set()).add(int(words[0]))
    return majors


@of_cuda
def nodes(host: Host) -> list[Finding]:
    """Every node an engine needs, with the major that the driver has now: that of nvidia-uvm changes over reboots."""
    if host.cpu_only:
        return [ok(NOT_NEEDED)]
    majors = character_majors(host.read("/proc/devices") or "")
    main = majors.get("nvidia") or majors.get("nvidia-frontend")
    if main is None:
        return [failed("/proc/devices has neither nvidia nor nvidia-frontend", "load the driver: modprobe nvidia")]
    if NVIDIA_MAJOR not in main:
        return [unknown(f"the driver has major {sorted(main)}, not {NVIDIA_MAJOR}: an unknown driver")]
    uvm = majors.get("nvidia-uvm")
    wanted = {"nvidiactl": (NVIDIA_MAJOR, CONTROL_MINOR)}
    wanted |= {f"nvidia{gpu.minor}": (NVIDIA_MAJOR, gpu.minor) for gpu in _visible(host)}
    found = [finding for name, numbers in wanted.items() if (finding := _node(host, name, numbers))]
    if uvm is None:
        found.append(failed("nvidia-uvm is not loaded: CUDA cannot start", "`nvidia-modprobe -u -c 0`"))
    elif finding := _node(host, "nvidia-uvm", (min(uvm), 0)):
        found.append(finding)
    return found or [ok(f"{len(wanted) + 1} nodes, majors {NVIDIA_MAJOR} and {min(uvm or {0})} (nvidia-uvm)")]


def _node(host: Host, name: str, numbers: tuple[int, int]) -> Finding | None:
    """What is wrong with /dev/NAME; None if nothing."""
    node = host.device(host.root / "dev" / name)
    again = "`systemctl start appliance-gpu-nodes` makes the nodes"
    if node is None:
        return failed(f"/dev/{name} is not there", again)
    if (node.major, node.minor) != numbers:
        return failed(
            f"/dev/{name} is {node.major}:{node.minor}, the driver has {numbers[0]}:{numbers[1]}",
            f"a static node of an earlier boot: remove it; {again}",
        )
    if node.mode & 0o006 != 0o006:
        return degraded(
            f"/dev/{name} has mode {node.mode:04o}: the user appliance may not open it",
            "mode 0666 (NVreg_DeviceFileMode of the module), or its group for the user appliance",
        )
    return None


def _visible(host: Host) -> list[Gpu]:
    return visible_gpus(host.root / "proc/driver/nvidia/gpus", host.root / "sys/bus/pci/devices")


@of_cuda
def gpus(host: Host) -> list[Finding]:
    """GPUs that the driver shows against those that the appliance has bound."""
    slots = read_slots(host.paths.gpus)
    if host.cpu_only:
        wrong = [number for number, entry in slots.items() if not entry["uuid"].startswith("CPU-")]
        if wrong:
            return [failed(f"backend cpu, but slots {wrong} have GPUs", "correct [gpus] in appliance.toml")]
        return [ok(f"{len(slots)} CPU slots")] if slots else [_nothing_bound()]
    visible = {gpu.uuid: gpu for gpu in _visible(host)}
    found = [
        failed(
            f"gpu {number}: {entry['uuid']} is bound and not there",
            "dmesg: did it fall off the bus? reboot, or have the card looked at; slots are never renumbered",
        )
        for number, entry in slots.items()
        if entry["uuid"] not in visible
    ]
    found += [
        degraded(f"{address}: the driver has no UUID for it yet", "start nvidia-persistenced; if it stays so: dmesg")
        for address in unready_gpus(host.root / "proc/driver/nvidia/gpus")
    ]
    bound = {entry["uuid"] for entry in slots.values()}
    found += [
        degraded(f"{uuid} ({gpu.model}) may be used and has no slot", "appliance gpus bind")
        for uuid, gpu in visible.items()
        if uuid not in bound and (host.config is None or host.config.gpus.includes(uuid))
    ]
    if not slots:
        found.append(_nothing_bound())
    return found or [ok(f"{len(slots)} GPUs bound, all there")]


def _nothing_bound() -> Finding:
    return failed("no GPU is bound to a slot", "appliance gpus bind")


@of_cuda
def mig(host: Host) -> Finding:
    if host.cpu_only:
        return ok(NOT_NEEDED)
    divided = mig_gpus(host.root / "proc/driver/nvidia")
    names = [gpu.uuid for gpu in _visible(host) if gpu.minor in divided]
    if names:
        return failed(
            f"MIG instances on {', '.join(names)}: MIG is not supported",
            "nvidia-smi -i UUID -mig 0 and a GPU reset, or leave the GPU out of gpus.devices",
        )
    return ok("no MIG instances")


@of_cuda
def persistence(host: Host) -> Finding:
    """Without a client the driver forgets a GPU's state: seconds at each start, and counters begin at 0 again."""
    if host.cpu_only:
        return ok(NOT_NEEDED)
    unit = "nvidia-persistenced.service"
    show = host.units([unit], ["LoadState", "ActiveState"])
    if show is None:
        return unknown("systemctl does not answer")
    state = show[unit]
    if state.get("LoadState") != "loaded":
        return degraded(f"{unit} is not installed", "install nvidia-persistenced, or `nvidia-smi -pm 1` at boot")
    if state.get("ActiveState") != "active":
        return degraded(f"{unit} is {state.get('ActiveState')}", f"systemctl enable --now {unit}")
    return ok(f"{unit} is active")


@of_cuda
def fabric(host: Host) -> Finding:
    """With NVSwitches CUDA answers 802 (system not yet initialized) until the fabric manager has set them up."""
    if host.cpu_only:
        return ok(NOT_NEEDED)
    switches = [device for device, vendor, kind in _pci(host) if vendor == "0x10de" and kind.startswith("0x0680")]
    devices = host.root / "proc/driver/nvidia-nvswitch/devices"
    if not switches and not (devices.is_dir() and any(devices.iterdir())):
        return ok("no NVSwitch")
    unit = "nvidia-fabricmanager.service"
    show = host.units([unit], ["LoadState", "ActiveState"])
    if show is None:
        return unknown("there are NVSwitches, and systemctl does not answer")
    state = show[unit]
    if state.get("LoadState") != "loaded":
        return failed(
            f"{len(switches)} NVSwitches, but {unit} is not installed: CUDA answers 802",
            "install nvidia-fabricmanager of exactly the driver's version",
        )
    if state.get("ActiveState") != "active":
        return failed(
            f"{len(switches)} NVSwitches, and {unit} is {state.get('ActiveState')}: CUDA answers 802",
            f"systemctl enable --now {unit}; its version must be exactly the driver's",
        )
    return ok(f"{unit} is active")


CHECKS: dict[str, Check] = {
    "driver": driver,
    "module": module,
    "nodes": nodes,
    "gpus": gpus,
    "mig": mig,
    "persistence": persistence,
    "fabric": fabric,
}
