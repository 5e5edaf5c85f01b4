"""The appliance in a box on a machine with GPUs: its driver inside, the bundle installed, and how to ask all of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.host.box import CHECKOUT, Box
from tests.host.roots import HostError

PYTHON = "/usr/lib/appliance/current/venv/bin/python"
CLIENT = "/opt/tests/tests/host/gpu_client.py"
DRIVER = "/usr/local/lib/gpu-host-driver"
MODEL = "/srv/model-of-the-host"
UID = 870
_LIBRARIES = ("libcuda.so", "libcudadebugger.so", "libnvidia-")
_NOT_NEEDED = tuple(
    f"libnvidia-{name}"
    for name in ("gl", "egl", "rtcore", "vksc", "encode", "fbc", "opticalflow", "tls", "ngx", "wayland", "gtk")
)


@dataclass(frozen=True)
class Slot:
    gpu: int
    uuid: str
    nodes: tuple[str, ...]  # that an engine of it may open
    model: str


def find_driver() -> Path:
    """The directory of this machine's libcuda.so.1; HostError where there is none."""
    shown = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    found = [line.rpartition(" => ")[2].strip() for line in shown.splitlines() if "libcuda.so.1 " in line]
    places = [*found, *(f"/usr/local/nvidia/{name}/libcuda.so.1" for name in ("lib64", "lib")),
              "/usr/lib/x86_64-linux-gnu/libcuda.so.1"]  # fmt: skip
    for place in places:
        if Path(place).exists():
            return Path(place).parent
    raise HostError(f"there is no libcuda.so.1: {shown[:500]}")


def collect_driver(source: Path, target: Path) -> dict[str, int]:
    """Copies the user-space part of the driver, without graphics, to a directory of its own: `source` may be the one
    with this machine's libc, which is no good in the box. Returns name -> bytes."""
    target.mkdir(parents=True)
    copied = {}
    for path in sorted(source.iterdir()):
        ours = path.name.startswith(_LIBRARIES) and not path.name.startswith(_NOT_NEEDED)
        if not ours or ".so" not in path.name or not path.is_file():
            continue
        real = path.resolve()
        if real.name not in copied:
            shutil.copy(real, target / real.name)
            copied[real.name] = real.stat().st_size
        if path.name != real.name:
            (target / path.name).symlink_to(real.name)
    return copied


def unpack_wheels(source: Path, target: Path) -> list[str]:
    """Wheels that only the benchmark needs (psutil), beside the installation and not in it."""
    names = []
    for wheel in sorted(source.glob("*.whl")):
        with zipfile.ZipFile(wheel) as file:
            file.extractall(target)
        names.append(wheel.name)
    return names


class World:
    """`box` with an appliance in it."""

    def __init__(self, box: Box, backend: str) -> None:
        self.box, self.backend = box, backend
        self.slots: list[Slot] = []
        self.nodes: list[str] = []  # every NVIDIA node of the box
        self.release = "v1"
        self.model_name = "llama"

    # -- install
    def install(self, bundle: str) -> dict[str, Any]:
        """The collection's own code; the units, sysusers.d and tmpfiles.d of the bundle, unchanged."""
        done = self.box.run(["/usr/bin/python3", "/opt/tests/tests/host/gpu_install.py", bundle], timeout=900)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    def units_as_shipped(self) -> dict[str, bool]:
        """Name -> is the installed unit the checkout's, byte for byte?"""
        names = [path for kind in ("service", "slice", "target") for path in (CHECKOUT / "systemd").glob(f"*.{kind}")]
        same = {path.name: self.box.read(f"/usr/lib/systemd/system/{path.name}") == path.read_text() for path in names}
        for kind in ("sysusers", "tmpfiles"):
            shipped = (CHECKOUT / f"systemd/{kind}.d/appliance.conf").read_text()
            same[f"{kind}.d"] = self.box.read(f"/usr/lib/{kind}.d/appliance.conf") == shipped
        return same

    def configure(self, engine: dict[str, Any], slots: int) -> None:
        lines = ["schema = 1", "[gpus]", f'backend = "{self.backend}"']
        lines += [f"cpu_slots = {slots}"] if self.backend == "cpu" else []
        lines += ["[restart]", "first_delay = 0.5", "[engine]", *(f"{k} = {json.dumps(v)}" for k, v in engine.items())]
        self.box.write("/etc/appliance/appliance.toml", "\n".join(lines) + "\n")

    # -- ask
    def appliance(self, *words: str, timeout: float = 120, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.box.run(["/usr/bin/appliance", *words], timeout=timeout, check=check)

    def bind(self) -> list[Slot]:
        """`appliance gpus bind`; the slots."""
        self.appliance("gpus", "bind")
        rows = json.loads(self.appliance("gpus", "list", "--json").stdout)["gpus"]
        for row in rows:
            now = row["now"]
            nodes = (f"/dev/nvidia{now['minor']}", "/dev/nvidiactl", "/dev/nvidia-uvm") if now else ()
            self.slots.append(Slot(row["slot"], row["uuid"], nodes, now["model"] if now else "cpu"))
        self.nodes = self.box.run(["sh", "-c", "ls -d /dev/nvidia*"]).stdout.split()
        return self.slots

    def state(self, gpu: int) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self.box.read(f"/run/appliance/gpu{gpu}/state.json"))
        return state

    def engine(self, gpu: int) -> dict[str, Any]:
        """The release's entry in the launcher's state; empty if there is none."""
        try:
            engines = self.state(gpu)["engines"]
        except (HostError, ValueError):  # the launcher is being restarted
            return {}
        return next((entry for entry in engines if entry["release"] == self.release), {})

    def scope(self, gpu: int) -> str:
        return f"/sys/fs/cgroup/appliance.slice/appliance-gpu{gpu}.slice/appliance-gpu{gpu}-{self.release}.scope"

    def processes(self, group: str) -> list[int]:
        return [int(pid) for pid in self.box.read(f"{group}/cgroup.procs").split()]

    def status_of(self, pid: int) -> dict[str, str]:
        lines = self.box.read(f"/proc/{pid}/status").splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def pss_mib(self, pid: int) -> float:
        lines = self.box.read(f"/proc/{pid}/smaps_rollup").splitlines()
        return round(next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024, 2)

    def until(self, what: Callable[[], Any], seconds: float, why: str) -> Any:
        deadline = time.monotonic() + seconds
        while not (value := what()):
            if time.monotonic() > deadline:
                raise HostError(f"{why}: not in {seconds:g} s")
            time.sleep(0.1)
        return value

    def until_admitted(self, gpu: int, seconds: float = 60.0) -> dict[str, Any]:
        entry: dict[str, Any] = self.until(
            lambda: (found := self.engine(gpu)).get("admitted") and found, seconds, f"no engine on GPU {gpu}"
        )
        return entry

    # -- clients
    def ask(self, where: dict[str, Any], *questions: tuple[str, dict[str, Any] | None]) -> list[dict[str, Any]]:
        order = json.dumps(where | {"ask": questions})
        done = self.box.run([PYTHON, "-P", CLIENT, order], timeout=180)
        return [json.loads(line) for line in done.stdout.splitlines()]

    @contextmanager
    def load(self, bodies: Sequence[dict[str, Any]], seconds: float = 0.0) -> Iterator[dict[str, Any]]:
        """Streams through :8000; the `with` block runs once all have begun. The dictionary is filled at the end."""
        order = json.dumps({"port": 8000, "bodies": bodies, "seconds": seconds})
        result: dict[str, Any] = {}
        process = self.box.popen(
            [PYTHON, "-P", CLIENT, order], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        with process:
            try:
                assert process.stdout and process.stderr
                line = process.stdout.readline()
                if line.strip() != "begun":
                    raise HostError(f"the clients ended: {line}{process.stderr.read()[-2000:]}")
                yield result
                out, err = process.communicate(timeout=180)
                if process.returncode:
                    raise HostError(f"the clients ended with {process.returncode}: {err[-2000:]}")
                result |= json.loads(out.splitlines()[-1])
            finally:
                process.kill()
