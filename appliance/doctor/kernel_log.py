"""The kernel's messages of this boot: what the NVIDIA driver last said, and what the OOM killer did to us."""

from __future__ import annotations

import re

from appliance.doctor.report import NOT_NEEDED, Check, Finding, Host, degraded, of_cuda, ok, unknown

_LINES = 20_000
# "NVRM: Xid (PCI:0000:b3:00): 79, pid=..."; without "PCI:" before driver 450.
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\)[^:]*: (\d+)")
_FALLEN = re.compile(r"NVRM: .*fallen off the bus")
_OOM = re.compile(r"oom-kill:.*task_memcg=(/appliance\.slice/[^,]*)")
_UNREADABLE = unknown(
    "the journal shows no kernel messages of this boot",
    "run it as root or as a member of systemd-journal; in a container they are its host's",
)


def _kernel_lines(host: Host) -> list[str] | None:
    result = host.command(
        "journalctl", "-k", "-b", "-q", "--no-pager", "-o", "short-iso", f"--lines={_LINES}"
    )  # not -g NVRM: it needs a journalctl with PCRE
    return result.text.splitlines() if result.ok and result.text else None


@of_cuda
def nvrm(host: Host) -> Finding:
    """The last line of the driver. The watchdog judges; this shows."""
    if host.cpu_only:
        return ok(NOT_NEEDED)
    lines = _kernel_lines(host)
    if lines is None:
        return _UNREADABLE
    driver = [line for line in lines if "NVRM:" in line]
    bad = [line for line in driver if _XID.search(line) or _FALLEN.search(line)]
    if bad:
        xid = _XID.search(bad[-1])
        what = f"Xid {xid[2]} on {xid[1]}" if xid else "a GPU has fallen off the bus"
        return degraded(
            f"{what}, {len(bad)} such lines since boot; last: {bad[-1][:300]}",
            "`appliance status` shows what the watchdog made of it; NVIDIA's Xid catalogue says what it means",
        )
    return ok(f"last driver line: {driver[-1][:300]}" if driver else "no driver line since boot")


def oom(host: Host) -> Finding:
    lines = _kernel_lines(host)
    if lines is None:
        return _UNREADABLE
    killed = [found[1] for line in lines if (found := _OOM.search(line))]
    if killed:
        return degraded(
            f"the kernel killed {len(killed)} processes of ours for memory since boot, last in {killed[-1]}",
            "raise engine.memory_max, or max_model_len / the KV pool down",
        )
    return ok("no process of ours was killed for memory since boot")


CHECKS: dict[str, Check] = {"nvrm": nvrm, "oom": oom}
