"""Trees of files as a host has them, for whatever reads /proc, /sys and the state directories.

Formats: /proc/driver/nvidia/version as the closed and the open module write it (nix-community/nixGL#186 and #121);
/proc/driver/nvidia/gpus/*/information as in NVIDIA's README, "The /proc Interface"; /proc/devices as in
NVIDIA/nvidia-container-toolkit#324 and kubernetes-sigs/dra-driver-nvidia-gpu#304; /proc/net/tcp as proc(5);
`systemctl show` and the journal as systemd 252 prints them.
"""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from appliance.command import NOT_FOUND, Result
from appliance.paths import Paths
from appliance.statefile import write_state
from tests.release_files import release_json

UUIDS = ["GPU-5fd4f087-86f3-7a43-b711-4771313afc50", "GPU-8f639255-9bdd-d28c-78be-e05a47c7049e"]

# Driver 580 on an HGX H200; the UUID of a GPU that nothing has opened yet reads GPU-????????-...
INFORMATION = """\
Model: \t\t NVIDIA H200
IRQ:   \t\t {irq}
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.a0.00.01
Bus Type: \t PCIe
DMA Size: \t 52 bits
DMA Mask: \t 0xfffffffffffff
Bus Location: \t {pci}
Device Minor: \t {minor}
GPU Firmware: \t 580.82.07
GPU Excluded:\t No
"""
NO_UUID = "GPU-????????-????-????-????-????????????"
OPEN_VERSION = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build  (dvs-builder@U22-I3-H04-01-5)  Wed Aug 27 17:59:04 UTC 2025
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14+deb12u1)
"""  # noqa: E501
CLOSED_VERSION = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)
"""
DEVICES = """\
Character devices:
  1 mem
  5 /dev/tty
  5 /dev/console
 10 misc
195 nvidia
195 nvidiactl
195 nvidia-modeset
234 nvidia-caps-imex-channels
237 nvidia-caps
510 nvidia-uvm

Block devices:
  7 loop
195 not-a-character-device
259 blkext
"""
OLD_DEVICES = DEVICES.replace("195 nvidia\n195 nvidiactl\n195 nvidia-modeset", "195 nvidia-frontend")


def put(root: Path, path: str, text: str) -> Path:
    """Writes a file below `root`."""
    file = root / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def add_gpu(root: Path, minor: int, uuid: str, pci: str | None = None, numa: int = 0) -> str:
    """A GPU as driver and sysfs show it; its PCI address."""
    pci = pci or f"0000:{0x1B + 16 * minor:02x}:00.0"
    text = INFORMATION.format(irq=100 + minor, uuid=uuid, pci=pci, minor=minor)
    put(root, f"proc/driver/nvidia/gpus/{pci}/information", text)
    add_pci(root, pci, "0x10de", "0x030200", numa)
    return pci


def add_pci(root: Path, pci: str, vendor: str, kind: str, numa: int = 0) -> None:
    for name, value in (("vendor", vendor), ("class", kind), ("numa_node", str(numa))):
        put(root, f"sys/bus/pci/devices/{pci}/{name}", f"{value}\n")


def nvidia_host(root: Path, gpus: int = 2) -> None:
    """Driver 580 with `gpus` H200s, everything as it should be."""
    put(root, "proc/driver/nvidia/version", OPEN_VERSION)
    put(root, "sys/module/nvidia/version", "580.82.07\n")
    put(root, "proc/devices", DEVICES)
    for minor in range(gpus):
        add_gpu(root, minor, UUIDS[minor], numa=minor)


def make_dirs(paths: Paths) -> None:
    """What tmpfiles.d makes."""
    for path in (paths.etc, paths.state / "holds", paths.state / "slots", paths.releases, paths.run, paths.cache):
        path.mkdir(parents=True, exist_ok=True)
    paths.models.mkdir(parents=True, exist_ok=True)


def add_release(paths: Paths, name: str, *, slot: str | None = None, golden: Sequence[str] = ("cpu",)) -> Path:
    """A release by the contract: release.json, manifest.json, model/, golden/."""
    directory = paths.release(name)
    (directory / "model").mkdir(parents=True)
    (directory / "golden").mkdir()
    (directory / "model" / "config.json").write_text("{}")
    (directory / "release.json").write_text(json.dumps(release_json(name, engine_version="0.1.0", model_name="m")))
    files = {name: {"size": (directory / name).stat().st_size, "sha256": "0" * 64} for name in
             ("release.json", "model/config.json")}  # fmt: skip
    write_state(directory / "manifest.json", {"files": files}, schema=1)
    for device in golden:
        (directory / "golden" / f"{device}.json").write_text("{}")
    if slot:
        paths.slot_pointer(slot).parent.mkdir(parents=True, exist_ok=True)
        paths.slot_pointer(slot).symlink_to(f"../releases/{name}")
    return directory


def add_launcher(root: Path, paths: Paths, gpu: int, **fields: Any) -> None:
    """The state file of a launcher that runs as PID 1000 + gpu, with the engine of PID 2000 + gpu in a scope."""
    pid = 1000 + gpu
    put(root, f"proc/{pid}/comm", "python\n")
    scope = f"/appliance.slice/appliance-gpu{gpu}.slice/appliance-gpu{gpu}-a.scope"
    put(root, f"proc/{pid + 1000}/cgroup", f"0::{scope}\n")
    put(root, f"sys/fs/cgroup{scope}/memory.current", "1610612736\n")
    put(root, f"sys/fs/cgroup{scope}/memory.max", "25769803776\n")
    put(root, f"sys/fs/cgroup{scope}/memory.events", "low 0\nhigh 0\nmax 4\noom 1\noom_kill 1\noom_group_kill 0\n")
    engine = {
        "release": "a", "model": "m", "engine_version": "0.1.0", "state": "ready", "admitted": True, "restarts": 2,
        "pid": pid + 1000, "since": 1000.0, "last_exit": None, "progress": None, "retry_at": None,
        "scope": scope.rpartition("/")[2], "socket": "s", "memory_max": 25769803776,
    }  # fmt: skip
    state = {"gpu": gpu, "uuid": UUIDS[gpu], "backend": "cuda", "pid": pid, "since": 900.0, "status": "serving a"}
    state |= {"holds": {}, "admitted": True, "engines": [engine]}
    paths.gpu_run(gpu).mkdir(parents=True, exist_ok=True)
    write_state(paths.launcher_state(gpu), state | fields, schema=1, durable=False)


@contextmanager
def gateway(paths: Paths, slot: str, answer: Callable[[], Any]) -> Iterator[None]:
    """An admin socket whose /state and /health answer what `answer()` gives (JSON, or bytes as they are)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            value, status = answer(), 200 if self.path == "/state" else 404
            if self.path == "/health" and isinstance(value, dict):  # as appliance/gateway/probes.py answers it
                ready = value.get("status", "ready") == "ready"
                value, status = {"status": "ready", "reason": None} | value, 200 if ready else 503
            data = value if isinstance(value, bytes) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def address_string(self) -> str:
            return "unix"

        def log_message(self, *args: Any) -> None:
            pass

    class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
        daemon_threads = True

    socket = paths.gateway_socket(slot)
    socket.parent.mkdir(parents=True, exist_ok=True)
    with Server(str(socket), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            socket.unlink()


class Commands:
    """Stands in for appliance.command.run: answers by the first words of the command line, and remembers the calls."""

    def __init__(self, answers: dict[str, str | Result | Callable[[Sequence[str]], str]] | None = None) -> None:
        self.answers = answers or {}
        self.calls: list[list[str]] = []

    def __call__(self, argv: Sequence[str], *, timeout: float, limit: int = 0) -> Result:
        self.calls.append(list(argv))
        for start, answer in self.answers.items():
            if " ".join(argv).startswith(start):
                if isinstance(answer, Result):
                    return answer
                text = answer if isinstance(answer, str) else answer(argv)
                return Result(tuple(argv), 0, text.encode(), b"")
        return Result(tuple(argv), NOT_FOUND, b"", b"")


def show(units: dict[str, dict[str, str]]) -> Callable[[Sequence[str]], str]:
    """`systemctl show` of these units; others are not found, as systemd 252 answers it."""

    def answer(argv: Sequence[str]) -> str:
        names = argv[argv.index("--") + 1 :]
        blocks = []
        for name in names:
            state = {"Id": name, "LoadState": "not-found", "ActiveState": "inactive", "UnitFileState": ""}
            state |= units.get(name, {})
            blocks.append("\n".join(f"{key}={value}" for key, value in state.items()))
        return "\n\n".join(blocks) + "\n"

    return answer
