"""What the parts of the watchdog hand each other: checks for people, signals for the policy, readings of a GPU.

Signal keys (the policy's patterns match these):
  xid:N                        from NVML events or the kernel's log; detail holds the line
  sxid:N                       of an NVSwitch, from the kernel's log
  recovery_action:N            level of NVML field 230: 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset ...
  nvml:gpu_is_lost | nvml:reset_required | nvml:driver_mismatch
  gpu:missing | gpu:unexpected | gpu:mig     the set of UUIDs is not what was bound at install; divided by MIG
  gpu:off_the_bus                  the kernel said so, with or without an Xid
  ecc:uncorrected                  volatile uncorrected went up since our baseline; ecc:corrected_rate: metric only
  remap:pending | remap:failure | sram:threshold | pages:pending
  ecc:off | ecc:pending_off | persistence:off
  clocks:slowdown | clocks:thermal | clocks:power_brake | temperature:slowdown
  link:degraded | pcie:replays | nvlink:down | nvlink:errors | fabric:unhealthy
  engine:error | engine:stalled | engine:unreachable
  engine:nonfinite | engine:index | engine:step | engine:fault     it tells kernel, layer, head, position
  golden:mismatch | checksum:mismatch
  trial:error | trial:stalled | trial:unreachable | trial:nonfinite | trial:index | trial:step | trial:fault |
  trial:mismatch                   the same of an engine whose release is not the stable one: a canary, a recording
  probe:hung
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum


class Status(StrEnum):
    OK = "ok"
    DEGRADED = "degraded"
    FAILED = "failed"
    UNKNOWN = "unknown"  # not supported, not answered in time: never a reason to act


class Action(IntEnum):
    """In order of strength: where several signals come together the strongest wins."""

    NONE = 0
    ALERT = 1
    RESTART_ENGINE = 2
    DEFERRED_RESET = 3  # at the next quiet time
    DRAIN_RESET = 4  # requests in flight end first
    ABORT_RESET = 5  # they are replayed elsewhere at once
    QUARANTINE = 6


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `healthcheck check`."""

    name: str  # "remapped rows"
    status: Status
    reason: str  # one line; for UNKNOWN why it is not known
    value: float | str | bool | None = None


@dataclass(frozen=True, slots=True)
class Signal:
    """Something that the policy has to look at."""

    key: str  # see above
    uuid: str | None  # None: of the host
    detail: str
    at: float  # UTC seconds
    source: str  # nvml, nvml-event, kmsg, engine, golden, checksum, proc


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What NVML said of one GPU. A field that is absent or None is unknown; `unknown` says why."""

    uuid: str
    at: float  # UTC seconds
    fields: dict[str, float | int | str | bool | None] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    error: str | None = None  # the whole GPU could not be read: "gpu_is_lost", "reset_required", ...
