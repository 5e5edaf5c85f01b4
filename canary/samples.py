"""What both gateways have counted, read from their admin sockets: SideCounts for the judge.

`Samples(paths, ...).read()` asks GET /counts (appliance/gateway/counts.py) of both, at most `seconds` each, and never
raises for what a gateway does: a number that cannot be trusted is named in Reading.invalid, and must not be judged.

How the numbers are made:
  requests     on the routes in JUDGED: answered 2xx, 3xx or 5xx, and answers that we cut. On all others only those that
               failed: polls of /v1/models shall not dilute errors, and a release that fails there shall not pass
  errors       by class, on all routes; each of them is one of `requests`
  request      seconds from arrival to end, on JUDGED routes, without 4xx
  ttft         seconds from arrival to the first token, of streams
  itl          seconds between two pieces of a stream as they were relayed. Events that came in one read are one piece,
               so bursts can only raise the share of slow ones
  who left     is an observation of all three, as long as he had waited, if that was the lowest limit of the metric or
               longer: a release that answers nobody in time has slow answers, not none. Who left sooner says nothing
  connections  accepted. Of the canary without those that came to its port directly (probes), so that the kernel's count
               of those it sent there can be compared
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.log import ApplianceError, ExitCode
from appliance.paths import SLOT_NAMES, Paths
from appliance.unix_http import UnixConnection
from canary.types import Limit, SideCounts

SCHEMA = 1
MAX_BYTES = 8 << 20
JUDGED = frozenset({"/v1/completions", "/v1/chat/completions", "/infer", "/generate"})
"""Routes that generate."""
OWN = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Answered by the gateway itself."""

_PREFIX = "appliance_gateway_"
_CLASSES = {"engine": "http_5xx", "engine_failed": "http_5xx", "internal": "http_5xx", "connections": "http_5xx"}
_CLASSES |= {"stream": "stream_cut", "cut": "stream_cut"}
_Number = Annotated[float, Meta(ge=0, le=2**53)]  # msgspec reads no NaN and no infinity from JSON


class SamplesError(ApplianceError):
    """The gateways do not count what a policy asks for."""

    exit_code = ExitCode.REFUSED


class Table(msgspec.Struct, frozen=True):
    """One metric. `samples`: values of the labels, then a number or, where there are `edges`, those of the buckets."""

    labels: list[str]
    edges: list[float] | None
    samples: list[tuple[list[str], _Number | list[_Number]]]


class Counts(msgspec.Struct, kw_only=True, frozen=True):
    """The answer to GET /counts."""

    schema: Literal[1]
    slot: str
    epoch: Annotated[str, Meta(min_length=1, max_length=64)]
    release: str | None
    serving: str | None
    not_ready: str | None
    run: str | None
    draining: bool
    clients: Annotated[int, Meta(ge=0)]
    connections: Annotated[int, Meta(ge=0)]  # open
    in_flight: Annotated[int, Meta(ge=0)]
    silent_workers: list[int]
    metrics: dict[str, Table]


class Reading(msgspec.Struct, kw_only=True, frozen=True):
    """Both sides at one time; None: no numbers of this side."""

    at: float  # monotonic seconds
    canary: SideCounts | None
    stable: SideCounts | None
    invalid: str | None = None  # why these numbers must not be judged
    not_alive: dict[str, str] = {}  # slot -> why its `alive` is False
    open_connections: dict[str, int] = {}  # slot -> how many now
    in_flight: dict[str, int] = {}  # slot -> requests in work now
    marked: dict[str, str | None] = {}  # slot -> the run that it has read the marker of


class Samples:
    """`releases`: slot -> the release that is judged there; another's requests are not counted, and a slot that serves
    another one is not alive. `limits`: of the run's policy; every one needs a histogram edge (`check`)."""

    def __init__(
        self,
        paths: Paths,
        *,
        releases: Mapping[str, str] | None = None,
        limits: Iterable[Limit] = (),
        seconds: float = 0.5,
        patience: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`seconds`: for one answer. `patience`: a gateway that was silent for so long is not alive."""
        self._paths, self._releases = paths, dict(releases or {})
        self._limits = list(limits)
        self._seconds, self._patience, self._clock = seconds, patience, clock
        self._answered: dict[str, float] = {}

    def read(self) -> Reading:
        """Ask both; takes a few milliseconds, at most twice `seconds`."""
        sides: dict[str, SideCounts | None] = {}
        invalid: list[str] = []
        not_alive: dict[str, str] = {}
        answers: dict[str, Counts] = {}
        for slot in SLOT_NAMES:
            sides[slot] = None
            try:
                answers[slot] = counts = fetch(self._paths, slot, self._seconds)
            except GatewayError as error:
                invalid.append(error.message)
                if error.dead or self._silent(slot):
                    not_alive[slot] = error.message
                continue
            self._answered[slot] = at = self._clock()
            if counts.silent_workers:
                workers = ", ".join(map(str, counts.silent_workers))
                invalid.append(f"stale: worker {workers} of gateway {slot} did not answer")
            if (reason := self._not_serving(counts)) is not None:
                not_alive[slot] = reason
            try:
                sides[slot] = side_counts(
                    counts, at, release=self._releases.get(slot), limits=self._limits, alive=slot not in not_alive
                )
            except (ValueError, LookupError) as error:
                invalid.append(f"gateway {slot} counts otherwise than we read: {error}")
        return Reading(
            at=self._clock(), canary=sides["canary"], stable=sides["stable"], invalid="; ".join(invalid) or None,
            not_alive=not_alive, open_connections={slot: c.connections for slot, c in answers.items()},
            in_flight={slot: c.in_flight for slot, c in answers.items()},
            marked={slot: c.run for slot, c in answers.items()},
        )  # fmt: skip

    def check(self) -> None:
        """SamplesError where a limit has no edge of its own in both gateways' histograms: a share above a limit that
        is interpolated would be a guess. Also where a gateway does not answer."""
        for slot in SLOT_NAMES:
            metrics = fetch(self._paths, slot, self._seconds).metrics
            for limit in self._limits:
                table = metrics.get(_HISTOGRAMS[limit.metric])
                if table is None or limit.seconds not in (table.edges or []):
                    raise SamplesError(
                        f"gateway {slot} counts {limit.metric} without an edge at {limit.seconds:g} s",
                        hint=f"add {limit.seconds:g} to gateway.metrics_buckets_seconds in appliance.toml, restart the "
                        "gateways, or choose a limit that has an edge (see `le` of the histogram in /metrics)",
                    )

    def _silent(self, slot: str) -> bool:
        """Whether it has not answered for `patience`, counted from our first question."""
        return self._clock() - self._answered.setdefault(slot, self._clock()) >= self._patience

    def _not_serving(self, counts: Counts) -> str | None:
        wanted = self._releases.get(counts.slot)
        if counts.not_ready is not None:
            return f"gateway {counts.slot} is not ready: {counts.not_ready}"
        if wanted is not None and counts.serving != wanted:
            return f"gateway {counts.slot} serves {counts.serving or 'nothing'}, not {wanted}"
        return None


# ---- asking ----------------------------------------------------------------------------------------------------------


class GatewayError(ApplianceError):
    """A gateway's numbers cannot be had. `dead`: nobody listens on its socket."""

    exit_code = ExitCode.FAILED

    def __init__(self, message: str, *, dead: bool = False) -> None:
        super().__init__(message, hint="see `systemctl status 'appliance-gateway@*'`")
        self.dead = dead


def fetch(paths: Paths, slot: str, seconds: float) -> Counts:
    """GatewayError when there is no whole and understandable answer within `seconds`."""
    connection = UnixConnection(paths.gateway_socket(slot), seconds)
    try:
        connection.request("GET", "/counts")
        response = connection.getresponse()
        data = response.read(MAX_BYTES + 1)
    except (FileNotFoundError, ConnectionRefusedError):
        raise GatewayError(f"gateway {slot} does not run: nobody listens on its socket", dead=True) from None
    except TimeoutError:
        raise GatewayError(f"stale: gateway {slot} did not answer within {seconds:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise GatewayError(f"gateway {slot} did not answer: {error!r}") from None
    finally:
        connection.close()
    if response.status != 200 or len(data) > MAX_BYTES:
        raise GatewayError(f"gateway {slot} answered /counts with {response.status}, {len(data)} bytes")
    try:
        counts = msgspec.json.decode(data, type=Counts)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise GatewayError(f"gateway {slot} answered what we cannot read: {error}") from None
    if counts.slot != slot:
        raise GatewayError(f"the gateway on the socket of {slot} says that it is {counts.slot}")
    return counts


# ---- adding up -------------------------------------------------------------------------------------------------------

_HISTOGRAMS = {
    "itl": _PREFIX + "event_gap_seconds",
    "ttft": _PREFIX + "time_to_first_token_seconds",
    "request": _PREFIX + "request_seconds",
}
_LEFT = _PREFIX + "left_waiting_seconds"
Labels = Mapping[str, str]


def slow_key(metric: str, seconds: float) -> str:
    """The key of SideCounts.slow: "itl:0.08", "request:1"."""
    return f"{metric}:{seconds:g}"


def side_counts(
    counts: Counts, at: float, *, release: str | None = None, limits: Iterable[Limit] = (), alive: bool = True
) -> SideCounts:
    """`release`: None counts all. ValueError where the answer lacks a metric or has one in another form."""
    mine = _of_release(release)
    observations: dict[str, int] = {}
    slow: dict[str, int] = {}
    for metric in _HISTOGRAMS:
        lowest = min((limit.seconds for limit in limits if limit.metric == metric), default=0.0)
        observations[metric], above = _above(counts, metric, mine, lowest)
        slow |= {slow_key(metric, edge): number for edge, number in above.items()}
    requests, rejected = _requests(counts, mine)
    errors: dict[str, int] = {}
    for labels, value in _rows(counts, _PREFIX + "errors_total"):
        if mine(labels):
            name = _CLASSES.get(labels["class"], labels["class"])
            errors[name] = errors.get(name, 0) + round(_single(value))
    return SideCounts(
        epoch=counts.epoch, at=at, requests=requests, errors=errors, rejected=rejected,
        connections=_connections(counts), clients=counts.clients, observations=observations, slow=slow, alive=alive,
    )  # fmt: skip


def _of_release(release: str | None) -> Callable[[Labels], bool]:
    """A request that no engine answered has the release "": it counts, too."""
    return lambda labels: release is None or labels["release"] in (release, "")


def _requests(counts: Counts, mine: Callable[[Labels], bool]) -> tuple[int, int]:
    """(judged, rejected)"""
    judged = rejected = 0.0
    for labels, value in _rows(counts, _PREFIX + "requests_total"):
        if not mine(labels) or labels["route"] in OWN:
            continue
        code = labels["code"]
        if code == "429":
            rejected += _single(value)
        elif code[0] == "5" or (code[0] in "23" and labels["route"] in JUDGED):
            judged += _single(value)
    for labels, value in _rows(counts, _PREFIX + "errors_total"):
        if not mine(labels):
            continue
        # Counted as 499, or not at all where a worker died: the answer broke off. And answers of other routes that are
        # 200 have no error class, so nothing is counted twice.
        judged += _single(value) if labels["class"] == "cut" else 0.0
    return round(judged), round(rejected)


def _connections(counts: Counts) -> int:
    """Accepted ones; of the canary without those that came to its port directly."""
    accepted = sum(_single(value) for _, value in _rows(counts, _PREFIX + "accepted_connections_total"))
    if counts.slot == "canary":
        accepted -= sum(
            _single(value)
            for labels, value in _rows(counts, _PREFIX + "opened_connections_total")
            if labels["via"] == "direct"
        )
    return max(0, round(accepted))


def _above(counts: Counts, metric: str, mine: Callable[[Labels], bool], lowest: float) -> tuple[int, dict[float, int]]:
    """The number of observations, and for each edge how many were longer."""
    table = _table(counts, _HISTOGRAMS[metric])
    edges = table.edges or []
    whole = [0.0] * (len(edges) + 1)
    left: list[tuple[float, float]] = []  # (more than so many seconds, number)
    for labels, value in _rows(counts, _HISTOGRAMS[metric]):
        if not mine(labels) or (metric == "request" and labels["route"] not in JUDGED):
            continue
        if metric == "request" and labels["code"] == "499":
            left += _longer_than(edges, value)
        elif metric != "request" or labels["code"] != "4xx":
            whole = [a + b for a, b in zip(whole, _buckets(value, edges), strict=True)]
    if metric != "request":
        further = _table(counts, _LEFT)
        for labels, value in _rows(counts, _LEFT):
            if mine(labels) and labels["metric"] == metric:
                left += _longer_than(further.edges or [], value)
    left = [(seconds, number) for seconds, number in left if seconds >= lowest]
    total = sum(whole) + sum(number for _, number in left)
    upward = list(accumulate(reversed(whole)))[::-1]  # from each bucket on
    above = {
        edge: round(upward[index + 1] + sum(number for seconds, number in left if seconds >= edge))
        for index, edge in enumerate(edges)
    }
    return round(total), above


def _longer_than(edges: list[float], value: float | list[float]) -> list[tuple[float, float]]:
    """Of each bucket: its lower edge and its count."""
    return list(zip([0.0, *edges], _buckets(value, edges), strict=True))


def _table(counts: Counts, name: str) -> Table:
    table = counts.metrics.get(name)
    if table is None:
        raise ValueError(f"it does not count {name}: is it of another version?")
    return table


def _rows(counts: Counts, name: str) -> Iterable[tuple[dict[str, str], Any]]:
    table = _table(counts, name)
    for labels, value in table.samples:
        yield dict(zip(table.labels, labels, strict=True)), value


def _single(value: float | list[float]) -> float:
    if isinstance(value, list):
        raise ValueError("a counter has buckets")
    return value


def _buckets(value: float | list[float], edges: list[float]) -> list[float]:
    """Without the sum behind them."""
    if not isinstance(value, list) or len(value) != len(edges) + 2 or edges != sorted(set(edges)):
        raise ValueError("a histogram does not fit its edges")
    return value[:-1]
