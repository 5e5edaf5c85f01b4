"""The kernel's log: lines that real drivers wrote (each with where it is on record), the format, a real /dev/kmsg."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.launcher.loop import Loop
from healthcheck import kmsg
from healthcheck.kmsg import KmsgFollower, Reader, parse_record
from healthcheck.pci import normalise_pci
from healthcheck.types import Signal, Status

MAP = {"0000:b3:00.0": "GPU-b3", "0000:01:00.0": "GPU-01", "0008:01:00.0": "GPU-8", "10000:01:00.0": "GPU-vmd"}


def keys(*texts: str) -> list[tuple[str, str | None]]:
    reader = Reader(MAP)
    return [(signal.key, signal.uuid) for text in texts for signal in reader.signals(text, 5.0)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("NVRM: Xid (PCI:0000:b3:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", 79),  # gpud
        ("NVRM: Xid (0000:b3:00): 14, Channel 00000001", 14),  # before driver 450
        ("NVRM: Xid (PCI:0000:B3:00): 31, pid=1123, name=python3, Ch 00000008, intr 00000000. MMU Fault", 31),
        ("NVRM: Xid (PCI:0000:b3:00.0): 119, pid=1, name=nvidia-smi, Timeout waiting for RPC from GSP!", 119),  # #446
        # open-gpu-kernel-modules kern_gmmu / kernel_rc: MIG's ids in the parentheses
        ("NVRM: Xid (PCI:0000:b3:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No", 94),
        ("NVRM: Xid (PCI:0000:b3:00 GPU-I:01 GPU-CI:02): 13, pid=9, name=a, Graphics Exception", 13),
        ("NVRM: Xid (PCI:0000:b3:00): 95, pid=7062, Uncontained: LTC TAG (0x2,0x1). RST: Yes, D-RST: No", 95),
    ],
)
def test_xids_of_real_drivers(text: str, expected: int) -> None:
    (signal,) = Reader(MAP).signals(text, 5.0)
    assert (signal.key, signal.uuid, signal.at, signal.source) == (f"xid:{expected}", "GPU-b3", 5.0, "kmsg")
    assert signal.detail == text


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)", 2),
        ("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", 1),
        # newer drivers have other words for the same numbers, so the number counts
        ("154, GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", 2),
        ("154, GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)", 1),
        ("154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x4 (Drain and Reset)", 4),
    ],
)
def test_xid_154_says_what_to_do(text: str, action: int) -> None:
    found = keys(f"NVRM: Xid (PCI:0008:01:00): {text}")
    assert found == [("xid:154", "GPU-8"), (f"recovery_action:{action}", "GPU-8")]


def test_xid_154_back_to_none_asks_for_nothing() -> None:
    text = "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    assert keys(text) == [("xid:154", "GPU-01")]


@pytest.mark.parametrize(
    "texts",
    [
        ("NVRM: GPU at 0000:b3:00.0 has fallen off the bus.",),
        ("NVRM: GPU 0000:b3:00.0: GPU has fallen off the bus.",),
        ("NVRM: GPU at PCI:0000:b3:00 has fallen off the bus.",),
        (  # NVSentinel #155, gpud PR #1209: one message of three lines, without an Xid
            "NVRM: The NVIDIA GPU 0000:b3:00.0\n"
            "               NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
            "               NVRM: fallen off the bus and is not responding to commands.",
        ),
        (
            "NVRM: The NVIDIA GPU 0000:b3:00.0",
            "NVRM: (PCI ID: 10de:26b5) installed in this system has",
            "NVRM: fallen off the bus and is not responding to commands.",
        ),
    ],
)
def test_a_gpu_off_the_bus_is_seen_without_an_xid(texts: tuple[str, ...]) -> None:
    assert keys(*texts) == [("gpu:off_the_bus", "GPU-b3")]


def test_off_the_bus_of_an_unknown_gpu_is_told_but_of_no_gpu() -> None:
    assert keys("NVRM: fallen off the bus and is not responding to commands.") == [("gpu:off_the_bus", None)]
    assert keys("NVRM: The NVIDIA GPU 0000:b3:00.0", *["NVRM: something else"] * 9, "NVRM: fallen off the bus") == [
        ("gpu:off_the_bus", None)
    ]


def test_a_gpu_that_is_not_in_the_map_is_not_guessed() -> None:
    assert keys("NVRM: Xid (PCI:0000:77:00): 48, An uncorrectable double bit error") == [("xid:48", None)]


def test_an_nvswitch_is_no_gpu() -> None:
    text = "nvidia-nvswitch3: SXid (PCI:0000:b3:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)"
    assert keys(text) == [("sxid:28006", None)]


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid : 32, pid=2280636",
        "NVRM: Xid (PCI:0000:66:00): abc, pid=2280636",
        "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  580.159.04",
        "NVRM: GPU at PCI:0000:b3:00: GPU-b3000000-0000-0000-0000-000000000000",
        "usb 1-1: Product: NVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus.",
        "usb 1-1: Product: x\nNVRM: Xid (PCI:0000:b3:00): 79, GPU has fallen off the bus.",
        " NVRM: Xid (PCI:0000:b3:00): 79,",
        "Killed process 7 (NVRM: Xid (PCI:)",
        "",
    ],
)
def test_what_is_not_the_drivers_or_says_nothing_brings_nothing(text: str) -> None:
    assert keys(text) == []


@pytest.mark.parametrize(
    ("spelled", "normal"),
    [
        ("0000:b3:00", "0000:b3:00.0"), ("00000000:B3:00.0", "0000:b3:00.0"), ("b3:00.1", "0000:b3:00.1"),
        ("00000008:01:00.0", "0008:01:00.0"), ("10000:E1:00.0", "10000:e1:00.0"),  # a domain behind Intel's VMD
    ],
)  # fmt: skip
def test_pci_addresses_are_spelled_as_sysfs_does(spelled: str, normal: str) -> None:
    assert normalise_pci(spelled) == normal == normalise_pci(normal)


@pytest.mark.parametrize("spelled", ["", "0", "10de:26b5", "0000:b3:00.8", "0000:b3:00.0x", "zz:00.0"])
def test_what_is_no_pci_address(spelled: str) -> None:
    with pytest.raises(ValueError, match="no PCI address"):
        normalise_pci(spelled)


def test_records_as_the_kernels_document_shows_them() -> None:
    """Documentation/ABI/testing/dev-kmsg, its example."""
    record = parse_record(b"7,160,424069,-;pci_root PNP0A03:00: host bridge window [io  0x0000-0x0cf7] (ignored)\n"
                          b" SUBSYSTEM=acpi\n DEVICE=+acpi:PNP0A03:00\n")  # fmt: skip
    assert record is not None and (record.facility, record.sequence) == (0, 160)
    assert record.text == "pci_root PNP0A03:00: host bridge window [io  0x0000-0x0cf7] (ignored)"
    record = parse_record(b"30,340,5690716,-,caller=T1;udevd[80]: starting version 181\\x0aNVRM: x\n")
    assert record is not None and record.facility == 3 and record.text == "udevd[80]: starting version 181\nNVRM: x"


@pytest.mark.parametrize("data", [b"", b";", b"1,2;x", b"a,1,2,-;x", b"-6,1,2,-;x", b"6,1,2,-", b"6,1" + b"9" * 30])
def test_what_is_no_record(data: bytes) -> None:
    assert parse_record(data) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_a_record_or_none(data: bytes) -> None:
    record = parse_record(data)
    if record is not None:
        Reader(MAP).signals(record.text, 0.0)


@given(st.lists(st.text(max_size=200).map(lambda text: f"NVRM: {text}") | st.text(max_size=200), max_size=8))
def test_any_texts_bring_signals_that_are_whole_or_none(texts: list[str]) -> None:
    reader = Reader(MAP)
    for text in texts:
        for signal in reader.signals(text, 0.0):
            assert signal.key.split(":")[0] in {"xid", "gpu", "recovery_action", "sxid"} and signal.detail.isprintable()


@given(st.integers(0, 0xFFFFFFFF), st.integers(0, 255), st.integers(0, 31), st.integers(0, 99999), st.text(max_size=60))
def test_every_address_and_xid_that_the_driver_can_print_is_read(
    domain: int, bus: int, device: int, number: int, rest: str
) -> None:
    """kernel_rc.c prints "%04x:%02x:%02x" and "%d"."""
    address = f"{domain:04x}:{bus:02x}:{device:02x}"
    reader = Reader({f"{address}.0": "GPU-x"})
    (signal, *_) = reader.signals(f"NVRM: Xid (PCI:{address}): {number}, {rest}", 0.0)
    assert (signal.key, signal.uuid) == (f"xid:{number}", "GPU-x")


class Log:
    """A stand-in for /dev/kmsg: a pipe in packet mode, one record a read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kmsg.os, "lseek", lambda *_: 0)
        self.read_end, self.write_end = os.pipe2(os.O_DIRECT)
        self.path = Path(f"/proc/self/fd/{self.read_end}")
        self.loop, self.signals = Loop(), list[Signal]()

    def follow(self, *, test_facility: bool = False) -> KmsgFollower:
        self.follower = KmsgFollower(self.loop, self.signals.append, MAP, self.path, test_facility=test_facility)
        return self.follower

    def say(self, sequence: int, text: str, facility: int = 0) -> None:
        os.write(self.write_end, f"{facility * 8 + 3},{sequence},123456,-;{text}\n".encode())

    def run(self, reached: Callable[[], bool]) -> None:
        assert self.loop.run(reached, 20.0)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[Log]:
    log = Log(monkeypatch)
    yield log
    log.follower.close()
    os.close(log.read_end)
    os.close(log.write_end)
    log.loop.close()


XID = "NVRM: Xid (PCI:0000:b3:00): 48, An uncorrectable double bit error"


def test_only_the_kernels_own_lines_count(log: Log) -> None:
    follower = log.follow()
    for sequence, facility in enumerate((1, 3, 0)):
        log.say(sequence, XID, facility)
    log.run(lambda: follower.records == 3)
    assert [signal.key for signal in log.signals] == ["xid:48"]


def test_tests_may_have_facility_1_count_but_no_other(log: Log) -> None:
    follower = log.follow(test_facility=True)
    for sequence, facility in enumerate((1, 3, 0)):
        log.say(sequence, XID, facility)
    log.run(lambda: follower.records == 3)
    assert len(log.signals) == 2


def test_lost_records_are_counted_by_their_numbers(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = log.follow()
    log.say(100, "first")
    log.run(lambda: follower.records == 1)
    assert follower.lost == 0  # what was before the first one was not for us
    real, broken = os.read, [OSError(errno.EPIPE, "Broken pipe")]

    def read(fd: int, size: int) -> bytes:
        if broken:
            raise broken.pop()
        return real(fd, size)

    monkeypatch.setattr(kmsg.os, "read", read)
    log.say(141, XID)
    log.run(lambda: follower.records == 2)
    assert follower.lost == 40 and len(log.signals) == 1 and follower.error is None
    check = follower.check()
    assert check.status is Status.OK and "40 records were lost" in check.reason


def test_a_flood_lets_others_have_their_turn(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kmsg, "_AT_ONCE", 4)
    follower, turns = log.follow(), list[int]()
    for sequence in range(15):
        log.say(sequence, "noise")
    log.loop.later(0, lambda: turns.append(follower.records))
    log.run(lambda: follower.records == 15)
    assert turns and turns[0] <= 8


def test_a_log_that_cannot_be_read_is_said(log: Log, tmp_path: Path) -> None:
    log.follow()
    missing = KmsgFollower(log.loop, log.signals.append, MAP, tmp_path / "kmsg")
    check = missing.check()
    assert check.status is Status.UNKNOWN and "No such file" in check.reason


def test_a_log_that_breaks_later_is_said_and_left(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    follower = log.follow()

    def read(fd: int, size: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(kmsg.os, "read", read)
        log.say(1, "x")
        log.run(lambda: follower.error is not None)
    assert follower.check().status is Status.UNKNOWN


def _real() -> tuple[int, bytes] | None:
    """The real log at its end, and what the kernel makes of a line of ours; None where that is not ours to do."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDWR | os.O_NONBLOCK)
    except OSError:
        return None
    os.lseek(fd, 0, os.SEEK_END)
    with contextlib.suppress(OSError):
        os.write(fd, "<3>appliance test: a\\b é NVRM: Xid (PCI:0000:b3:00): 48\n".encode())
        for _ in range(1000):
            data = os.read(fd, 8192)
            if b"appliance test" in data:
                return fd, data
    os.close(fd)
    return None


def test_the_real_kernel_escapes_and_says_who_wrote() -> None:
    """User space asks for facility 0, level 3; the kernel makes it facility 1."""
    real = _real()
    if real is None:
        pytest.skip("/dev/kmsg is not ours to write and read here")
    fd, data = real
    os.close(fd)
    record = parse_record(data)
    assert record is not None and record.facility == 1
    assert record.text == "appliance test: a\\b é NVRM: Xid (PCI:0000:b3:00): 48"


def test_the_real_log_is_followed_from_its_end() -> None:
    real = _real()
    if real is None:
        pytest.skip("/dev/kmsg is not ours to write and read here")
    fd, _ = real
    loop, signals, texts = Loop(), list[Signal](), list[str]()
    follower = KmsgFollower(loop, signals.append, MAP)
    take = follower._take

    def taken(data: bytes) -> None:
        texts.append(data.decode(errors="replace"))
        take(data)

    follower._take = taken  # type: ignore[method-assign]
    os.write(fd, b"<3>appliance test: after\n")
    try:
        assert loop.run(lambda: any("appliance test: after" in text for text in texts), 20.0)
    finally:
        follower.close()
        os.close(fd)
        loop.close()
    assert not any("a\\x5cb" in text for text in texts) and signals == [] and follower.lost == 0
