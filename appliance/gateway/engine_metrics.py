"""The engines' own metrics, handed on with the labels `gpu` and `release`, and the watchdog's as they are: all of them
listen on Unix sockets only, so Prometheus cannot ask them itself.

Only the gateway of the slot `stable` does so, for every engine on this host that is up, whatever its slot and whether
or not it is admitted: each series is there once, and a GPU that is held still tells how it is.

Asked at each scrape, all engines at once, each for at most SCRAPE_SECONDS and MAX_BYTES. An engine's text is taken
whole or not at all, so what an engine says can spoil only its own part; that is counted. Format: Prometheus text 0.0.4
(prometheus.io/docs/instrumenting/exposition_formats), of which an engine may use what prometheus-client writes.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from appliance.gateway.metrics import Counter, Metric, quote_label
from appliance.gateway.upstream import Pool, UpstreamError
from appliance.paths import SLOT_NAMES
from engine.log import log_event

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.gateway.engines import Engines

logger = logging.getLogger(__name__)

OWNER = SLOT_NAMES[0]  # the slot whose gateway hands them on
LABELS = ("gpu", "release")  # ours; an engine that sets them itself is not believed
UP = frozenset({"ready", "draining"})  # states (appliance/launcher/lifecycle.py) in which an engine is asked
SCRAPE_SECONDS = 1.0
MAX_BYTES = 256 << 10  # prometheus-client writes some 20 KiB for an engine of ours
MAX_SAMPLES = 5000
MAX_FAMILIES = 500
MAX_ENGINES = 64

WATCHDOG = (None, "watchdog")  # in the place of an engine's GPU and release

_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n\r\n"
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f]")
_COMMENT = re.compile(r"# (HELP|TYPE) (appliance_[a-z0-9_]{1,100})(?: ((?:[^\\]|\\[\\n])*))?")
_SAMPLE = re.compile(r"(appliance_[a-z0-9_]{1,110})(?:\{(.*)\})? ([^ {}]{1,40})")
_LABEL = re.compile(r'([a-z][a-z0-9_]{0,60})="((?:[^"\\]|\\[\\"n])*)"(?:,|\Z)')
_VALUE = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|Inf)|NaN")
_SUFFIXES = {"counter": ("",), "gauge": ("",), "untyped": ("",), "histogram": ("_bucket", "_sum", "_count")}
_OURS = "appliance_gateway_"


class BadMetrics(Exception):
    """A text that is not handed on. `reason`: a label value."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(slots=True)
class Family:
    """One metric: its samples are (name, labels as they are written, value)."""

    name: str
    kind: str
    help: str
    samples: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Of its samples."""
        return [self.name + suffix for suffix in _SUFFIXES[self.kind]]


def parse(data: bytes, taken_labels: Sequence[str] = LABELS) -> list[Family]:
    """The families of one text, which may not set `taken_labels` itself. BadMetrics for anything that Prometheus or
    another engine could trip over."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise BadMetrics("malformed", f"not UTF-8: {error}") from None
    if _CONTROL.search(text) is not None:
        raise BadMetrics("malformed", "control characters")
    families: dict[str, Family] = {}
    helps: dict[str, str] = {}
    taken: set[str] = set()  # names of samples
    series: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    current: Family | None = None
    for line in text.split("\n"):
        if not line:
            continue
        if line.startswith("#"):
            found = _COMMENT.fullmatch(line)
            if found is None:
                continue
            if found[1] == "HELP":
                helps[found[2]] = found[3] or ""
                continue
            current = Family(found[2], found[3] or "", helps.get(found[2], ""))
            known = current.kind in _SUFFIXES and taken.isdisjoint(current.names)
            if not known or len(families) >= MAX_FAMILIES:
                raise BadMetrics("malformed", f"an unknown type, a second one, or one too many: {line[:200]!r}")
            families[current.name] = current
            taken.update(current.names)
            continue
        name, labels, value = _sample(line, taken_labels)
        if current is None or name not in current.names:
            raise BadMetrics("malformed", f"a sample without its type before it: {line[:200]!r}")
        key = name, frozenset(labels.items())
        if key in series or len(series) >= MAX_SAMPLES:
            raise BadMetrics("malformed", f"the same sample twice, or over {MAX_SAMPLES}: {line[:200]!r}")
        series.add(key)
        current.samples.append((name, ",".join(f'{label}="{text}"' for label, text in labels.items()), value))
    return list(families.values())


def _sample(line: str, taken_labels: Sequence[str]) -> tuple[str, dict[str, str], str]:
    """Name, labels (values still escaped), value. No time stamps: an engine's clock is not Prometheus'."""
    found = _SAMPLE.fullmatch(line)
    if found is None or _VALUE.fullmatch(found[3]) is None:
        raise BadMetrics("malformed", f"not a sample: {line[:200]!r}")
    labels: dict[str, str] = {}
    text, position = found[2] or "", 0
    while position < len(text):
        label = _LABEL.match(text, position)
        if label is None or label[1] in labels or label[1] in taken_labels:
            raise BadMetrics("malformed", f"not labels that an engine may set: {line[:200]!r}")
        labels[label[1]] = label[2]
        position = label.end()
    return found[1], labels, found[3]


class Merged:
    """The families of several engines and of the watchdog, with one HELP and TYPE each. `reserved`: names of ours."""

    def __init__(self, reserved: Iterable[str]) -> None:
        self._reserved = frozenset(reserved)
        self._families: dict[str, Family] = {}
        self._owner: dict[str, str] = {}  # name of a sample -> of its family

    def add(self, gpu: int | None, release: str, families: list[Family]) -> None:
        """All of one engine's, or BadMetrics and none."""
        for family in families:
            for name in (family.name, *family.names):
                if name.startswith(_OURS) or name in self._reserved:
                    raise BadMetrics("conflict", f"{name} is a metric of the gateway")
                if self._owner.get(name, family.name) != family.name:
                    raise BadMetrics("conflict", f"{name} belongs to another metric of another engine")
            known = self._families.get(family.name)
            if known is not None and known.kind != family.kind:
                raise BadMetrics("conflict", f"{family.name} is a {known.kind} elsewhere, here a {family.kind}")
        whose = (f'{label}="{quote_label(value)}"' for label, value in zip(LABELS, (str(gpu), release), strict=True))
        ours = [] if gpu is None else [",".join(whose)]
        for family in families:
            known = self._families.setdefault(family.name, Family(family.name, family.kind, family.help))
            self._owner |= dict.fromkeys(family.names, family.name)
            known.samples += [
                (name, ",".join([*ours, labels] if labels else ours), value) for name, labels, value in family.samples
            ]

    def render(self) -> bytes:
        lines: list[str] = []
        for family in self._families.values():
            lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.kind}"]
            lines += [
                f"{name}{{{labels}}} {value}" if labels else f"{name} {value}" for name, labels, value in family.samples
            ]
        return "".join(line + "\n" for line in lines).encode()


Part = tuple[int | None, str, list[Family]]


class EngineMetrics:
    """What the engines of this host and its watchdog say of themselves. `collect`, then `render` at once."""

    def __init__(self, engines: Engines, watchdog: Path) -> None:
        """`watchdog`: its socket."""
        self._engines, self._watchdog = engines, watchdog
        self._running: asyncio.Task[list[Part]] | None = None
        self.errors = Counter(
            "appliance_gateway_engine_scrape_errors_total",
            "Times that an engine's or the watchdog's own metrics could not be handed on, by reason",
            ("gpu", "release", "reason"),
        )

    async def collect(self) -> list[Part]:
        """Ask all of them now; scrapes at the same time share one round."""
        if self._engines.slot != OWNER:
            return []
        if self._running is None:
            self._running = asyncio.get_running_loop().create_task(self._collect())
            self._running.add_done_callback(self._collected)
        return await asyncio.shield(self._running)

    def close(self) -> None:
        if self._running is not None:
            self._running.cancel()

    def render(self, parts: list[Part], ours: Iterable[Metric]) -> bytes:
        """`ours`: the metrics that the text is appended to."""
        merged = Merged(metric.name for metric in ours)
        for gpu, release, families in parts:
            try:
                merged.add(gpu, release, families)
            except BadMetrics as error:
                self._failed(gpu, release, error)
        return merged.render()

    def _collected(self, task: asyncio.Task[list[Part]]) -> None:
        self._running = None

    async def _collect(self) -> list[Part]:
        up = [
            (gpu, entry.release, entry.socket)
            for gpu, launcher in sorted(self._engines.launchers.items())
            for entry in launcher.engines
            if entry.state in UP and entry.socket is not None
        ]
        unique = {(gpu, release): socket for gpu, release, socket in up[:MAX_ENGINES]}
        asked: dict[tuple[int | None, str], str] = {WATCHDOG: str(self._watchdog)} if self._watchdog.exists() else {}
        asked.update(unique.items())  # the watchdog first: an engine that takes its names is left out
        parts = await asyncio.gather(*(self._ask(gpu, release, socket) for (gpu, release), socket in asked.items()))
        return [part for part in parts if part is not None]

    async def _ask(self, gpu: int | None, release: str, socket: str) -> Part | None:
        self.errors.inc(_label(gpu), release, "late", by=0)  # so that the first error is a change
        try:
            return gpu, release, parse(await _fetch(socket), () if gpu is None else LABELS)
        except BadMetrics as error:
            self._failed(gpu, release, error)
            return None

    def _failed(self, gpu: int | None, release: str, error: BadMetrics) -> None:
        self.errors.inc(_label(gpu), release, error.reason)
        log_event(
            logger, logging.WARNING, "engine_metrics", str(error), gpu=gpu, release=release, reason=error.reason
        )  # fmt: skip


def _label(gpu: int | None) -> str:
    return "" if gpu is None else str(gpu)


async def _fetch(socket: str) -> bytes:
    """BadMetrics where there is no whole text in time."""
    pool, body = Pool(socket), bytearray()
    try:
        async with asyncio.timeout(SCRAPE_SECONDS):
            exchange = (await pool.acquire()).send(_REQUEST, b"")
            try:
                head = await exchange.head
                if head.status != 200:
                    raise BadMetrics("status", f"it answers {head.status}")

                def keep(data: bytes) -> None:
                    body.extend(data)
                    if len(body) > MAX_BYTES:
                        exchange.close("large", f"its metrics are over {MAX_BYTES} bytes")

                exchange.attach(keep)
                await exchange.ended
            finally:
                exchange.close()
    except UpstreamError as error:
        raise BadMetrics(error.kind, str(error)) from None
    except TimeoutError:
        raise BadMetrics("late", f"no metrics within {SCRAPE_SECONDS:g} s") from None
    finally:
        pool.close()
    return bytes(body)
