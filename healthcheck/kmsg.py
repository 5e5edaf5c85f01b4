"""The kernel's log as the NVIDIA driver writes it -> signals: Xids, changed recovery actions, GPUs off the bus.

/dev/kmsg (kernel: Documentation/ABI/testing/dev-kmsg): one record a read, "PREFIX,SEQUENCE,MICROSECONDS,FLAGS;TEXT",
with bytes that are not printable as \\xNN. It is read from the end on: what was there before us says nothing of now
(the levels that NVML gives do), and a watchdog that is started again must not act on old lines. Records that were
overwritten before we came are counted by their sequence numbers. Only facility 0 counts, which user space cannot write:
whoever may write to /dev/kmsg gets facility 1 (for tests: `test_facility`). The text must be the driver's from its
first letter on, so that no name of a process or a file, wherever the kernel quotes it, is taken for one.
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.launcher.loop import READ, Loop
from appliance.log import printable
from healthcheck import pci
from healthcheck.types import Check, Signal, Status

_RECORD_BYTES = 8192  # the kernel's PRINTK_MESSAGE_MAX is below; a shorter buffer gets EINVAL
_AT_ONCE = 256  # records, then the others of the loop have their turn
_MAX_DETAIL = 400  # characters
_KERNEL, _USER = 0, 1  # syslog facilities
_ESCAPE = re.compile(rb"\\x([0-9a-f]{2})")

# "NVRM: Xid (PCI:0000:b3:00): 79, pid=1, ..."; before driver 450 without "PCI:"; MIG: "(PCI:0000:01:00 GPU-I:05)".
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?({pci.PATTERN})(?: [^)\n]*)?\): ([0-9]{{1,5}})\b")
_RECOVERY = re.compile(r"GPU recovery action changed from 0x([0-9a-f]{1,8}) \(.*?\) to 0x([0-9a-f]{1,8})\b")
# Of an NVSwitch: "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 ...". It belongs to no one GPU.
_SXID = re.compile(r"nvidia-nvswitch\d+: SXid \([^)\n]*\): ([0-9]{1,6})\b")
# "NVRM: GPU at 0000:b3:00.0 has fallen off the bus.", "NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.", and
# "NVRM: The NVIDIA GPU 0000:b3:00.0\nNVRM: (PCI ID: ...) installed in this system has\nNVRM: fallen off the bus ...".
_FALLEN = re.compile(r"fallen off the bus")
_NAMED = re.compile(rf"NVRM: (?:The NVIDIA )?GPU (?:at )?(?:PCI:)?({pci.PATTERN})(?![0-9a-fA-F])")
_LINES_BETWEEN = 4  # records of the driver between the one that names the GPU and "fallen off the bus"


@dataclass(frozen=True, slots=True)
class Record:
    """One message of the kernel."""

    facility: int
    sequence: int
    text: str


def parse_record(data: bytes) -> Record | None:
    """None where it is no record. The lines after the first, " KEY=VALUE", say of which device it is; not needed."""
    prefix, semicolon, rest = data.partition(b";")
    words = prefix.split(b",")
    if not semicolon or len(words) < 3 or not all(word.isdigit() and len(word) <= 20 for word in words[:3]):
        return None
    text = _ESCAPE.sub(lambda found: bytes([int(found[1], 16)]), rest.partition(b"\n")[0])
    return Record(int(words[0]) >> 3, int(words[1]), text.decode(errors="replace"))


class Reader:
    """Signals from the driver's texts. Keeps which GPU a text of several records is about."""

    def __init__(self, uuids: Mapping[str, str]) -> None:
        """`uuids`: PCI address (as healthcheck.pci spells it) -> UUID, from before the fault: a GPU that is gone cannot
        be asked any more. Looked up at each use, so it may grow."""
        self.uuids = uuids
        self._named: tuple[str, int] | None = None  # (PCI address, records since)

    def signals(self, text: str, now: float) -> list[Signal]:
        """`now`: UTC seconds."""
        detail = printable(" ".join(text.split())[:_MAX_DETAIL])
        if sxid := _SXID.match(text):
            return [self._signal(f"sxid:{int(sxid[1])}", None, detail, now)]
        if not text.startswith("NVRM:"):
            return []
        if xid := _XID.match(text):
            address, number = pci.normalise_pci(xid[1]), int(xid[2])
            found = [self._signal(f"xid:{number}", address, detail, now)]
            if number == 154 and (action := _RECOVERY.search(text)) and int(action[2], 16) != 0:
                found.append(self._signal(f"recovery_action:{int(action[2], 16)}", address, detail, now))
            return found
        named = _NAMED.match(text)
        if _FALLEN.search(text):
            address_or_none = pci.normalise_pci(named[1]) if named else self._named[0] if self._named else None
            self._named = None
            return [self._signal("gpu:off_the_bus", address_or_none, detail, now)]
        if named:
            self._named = pci.normalise_pci(named[1]), 0
        elif self._named is not None:
            address, count = self._named
            self._named = (address, count + 1) if count < _LINES_BETWEEN else None
        return []

    def _signal(self, key: str, address: str | None, detail: str, now: float) -> Signal:
        return Signal(key, self.uuids.get(address) if address is not None else None, detail, now, "kmsg")


class KmsgFollower:
    """Follows the kernel's log in the loop. Where it cannot be read `error` says why, and NVML's events are left."""

    def __init__(
        self, loop: Loop, on_signal: Callable[[Signal], None], uuids: Mapping[str, str],
        path: Path = Path("/dev/kmsg"), *, test_facility: bool = False,
    ) -> None:  # fmt: skip
        self._loop, self._on_signal, self._path = loop, on_signal, path
        self._reader = Reader(uuids)
        self._facilities = {_KERNEL, _USER} if test_facility else {_KERNEL}
        self._next: int | None = None  # the sequence number that follows
        self._fd = -1
        self.lost = self.records = self.malformed = 0
        self.error: str | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)
            loop.watch(self._fd, READ, self._readable)
        except OSError as error:
            self._fail(error)

    def check(self) -> Check:
        if self.error is not None:
            return Check("kernel log", Status.UNKNOWN, f"{self.error}; Xids come from NVML only")
        if self.lost:
            return Check("kernel log", Status.OK, f"followed; {self.lost} records were lost, NVML's levels stand", 0)
        return Check("kernel log", Status.OK, f"followed, {self.records} records", self.lost)

    def _readable(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                data = os.read(self._fd, _RECORD_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EPIPE:  # overwritten: the next read goes on, and its number says how many
                    self._fail(error)
                    return
                continue
            if not data:
                self._fail(OSError(errno.EIO, "it ended"))
                return
            self._take(data)

    def _take(self, data: bytes) -> None:
        record = parse_record(data)
        if record is None:
            self.malformed += 1
            return
        self.records += 1
        if self._next is not None and record.sequence > self._next:
            self.lost += record.sequence - self._next
        self._next = record.sequence + 1
        if record.facility in self._facilities:
            for signal in self._reader.signals(record.text, time.time()):
                self._on_signal(signal)

    def _fail(self, error: OSError) -> None:
        self.error = f"{self._path}: {error.strerror}"
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
