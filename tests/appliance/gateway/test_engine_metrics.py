"""The engines' own metrics on the gateway's /metrics: judged by prometheus-client's parser and by promtool."""

from __future__ import annotations

import asyncio
import subprocess
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from appliance.gateway import engine_metrics
from appliance.gateway.engine_metrics import MAX_BYTES, BadMetrics, parse
from engine.api.metrics import Metrics
from engine.messages import Stats
from tests.host.promtool import promtool

from .test_lifecycle import started
from .world import FakeEngine, Received, answer, chunk, metric_value

FREE = (
    b"# HELP appliance_kv_pages_free Free KV pages\n# TYPE appliance_kv_pages_free gauge\nappliance_kv_pages_free %d\n"
)


def says(text: bytes, status: int = 200):
    async def metrics(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(answer(status, text, kind="text/plain; version=0.0.4"))

    return metrics


def real_text() -> bytes:
    """What an engine of ours writes, each metric with a sample."""
    stats = Stats(
        **{name: 3 for name in Stats.__struct_fields__ if name != "waiting_by_bucket"}, waiting_by_bucket={"512": 2}
    )
    client = SimpleNamespace(state="ready", queued_requests=1, queued_prompt_tokens=9, stats=stats)
    metrics = Metrics(client)  # type: ignore[arg-type]
    metrics.itl.observe(0.02)
    metrics.latency.labels('/v1/x"\\\n').observe(1)
    metrics.finished.labels("stop").inc()
    return metrics.render()


def series(text: str) -> set[tuple[str, frozenset[tuple[str, str]], float]]:
    return {
        (sample.name, frozenset(sample.labels.items()), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def check_text(text: str, *, judged: bool = False) -> None:
    """One HELP and TYPE a family, no series twice; `judged`: by promtool, too."""
    for word in ("# HELP ", "# TYPE "):
        names = [line.split()[2] for line in text.splitlines() if line.startswith(word)]
        assert len(names) == len(set(names))
    lines = [line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) == len(set(lines))
    if not judged:
        return
    result = subprocess.run([promtool(), "check", "metrics"], input=text.encode(), capture_output=True, timeout=60)
    assert b"error while linting" not in result.stderr, result.stderr  # style of names is not judged here


async def test_every_sample_of_an_engine_comes_with_its_gpu_and_release(host, front):
    theirs = real_text()
    for gpu in (0, 1):
        (await host.engine(gpu)).metrics = says(theirs)
    gateway = await front()
    text = (await gateway.get("/metrics"))[1]
    check_text(text, judged=True)
    wanted = {
        (name, labels | {("gpu", gpu), ("release", "r1")}, value)
        for name, labels, value in series(theirs.decode())
        for gpu in "01"
    }
    assert wanted <= series(text)
    rest = {name for name, _, _ in series(text) - wanted if not name.startswith("appliance_gateway_")}
    own = {"appliance_slot_release", "appliance_host_drained", "appliance_gpu_admitted", "appliance_engine_state"}
    canary = {name for name in rest if name.startswith("appliance_canary_")}  # test_canary_gauges.py
    assert canary and rest - canary == own | {"appliance_engine_restarts_total", "appliance_gpu_share"}
    assert metric_value(text, "appliance_gateway_engine_scrape_errors_total") == 0


async def test_held_engines_and_the_canarys_are_there_once_and_dead_ones_are_not_asked(host, front):
    host.point("canary", "r2")
    for gpu, release in ((0, "r1"), (1, "r1"), (1, "r2"), (2, "r1")):
        (await host.engine(gpu, release)).metrics = says(FREE % (10 * gpu))
    host.hold(1, operator={"level": "drain", "reason": "x"})
    host.report(2, "r1", state="failed", admitted=False)
    stable, canary = await front(), await front(slot="canary")
    assert "appliance_kv_pages_free" not in (await canary.get("/metrics"))[1]
    text = (await stable.get("/metrics"))[1]
    found = {tuple(sorted(dict(labels).items())) for name, labels, _ in series(text) if name.endswith("pages_free")}
    assert found == {
        (("gpu", "0"), ("release", "r1")), (("gpu", "1"), ("release", "r1")), (("gpu", "1"), ("release", "r2")),
    }  # fmt: skip


async def hangs(request: Received, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def drips(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not request.gone.is_set():
        writer.write(chunk(b"#\n"))
        await asyncio.sleep(0.02)


async def floods(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(MAX_BYTES // 1000 + 100):
        writer.write(chunk(b"#" * 999 + b"\n"))
        await writer.drain()


async def dies(request: Received, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 500\r\n\r\n" + FREE % 1)
    await writer.drain()
    writer.transport.abort()


GAUGE = b"# TYPE appliance_x gauge\n"
TEXTS = {
    "no UTF-8": GAUGE + b'appliance_x{a="\xff"} 1\n',
    "no type": b"appliance_x 1\n",
    "the type of another": GAUGE + b"appliance_y 1\n",
    "two types": GAUGE + b"# TYPE appliance_x counter\n",
    "the same type twice": GAUGE + GAUGE,
    "an unknown type": b"# TYPE appliance_x stateset\nappliance_x 1\n",
    "a gauge that is a histogram's count": b"# TYPE appliance_x histogram\n# TYPE appliance_x_count gauge\n",
    "the same series twice": GAUGE + b'appliance_x{a="1",b="2"} 1\nappliance_x{b="2",a="1"} 2\n',
    "another GPU's label": GAUGE + b'appliance_x{gpu="7"} 1\n',
    "another release's label": GAUGE + b'appliance_x{release="r9"} 1\n',
    "a label twice": GAUGE + b'appliance_x{a="1",a="2"} 1\n',
    "a label that is cut": GAUGE + b'appliance_x{a="1} 1\n',
    "a label that ends early": GAUGE + b'appliance_x{a="1"} 1\nappliance_x{a="2"} 3,b="} 1\n',
    "a bad escape": GAUGE + b'appliance_x{a="\\q"} 1\n',
    "a reserved label": GAUGE + b'appliance_x{__name__="y"} 1\n',
    "a time stamp": GAUGE + b"appliance_x 1 1700000000000\n",
    "an exemplar": GAUGE + b'appliance_x 1 # {a="b"} 1\n',
    "no number": GAUGE + b"appliance_x one\n",
    "a Python number": GAUGE + b"appliance_x 1_0\n",
    "a name of others": b"# TYPE go_goroutines gauge\ngo_goroutines 1\n",
    "carriage returns": GAUGE + b"appliance_x 1\r\n",
    "a control character": b"# HELP appliance_x a\x00b\n" + GAUGE + b"appliance_x 1\n",
    "too many samples": GAUGE + b"".join(b'appliance_x{a="%d"} 1\n' % number for number in range(6000)),
    "too many types": b"".join(b"# TYPE appliance_x%d gauge\n" % number for number in range(600)),
    "HTML": b"<html><body>not found</body></html>\n",
    "a gateway's": b"# TYPE appliance_gateway_new gauge\nappliance_gateway_new 1\n",
    "a forged readiness": b"# TYPE appliance_gateway_ready gauge\nappliance_gateway_ready 1\n",
    "a forged GPU": b"# TYPE appliance_gpu_admitted gauge\nappliance_gpu_admitted 1\n",
    "a second type of what others have": b"# TYPE appliance_kv_pages_free counter\nappliance_kv_pages_free 1\n",
}
BAD = {name: says(text) for name, text in TEXTS.items()} | {
    "status": says(FREE % 1, 503), "hangs": hangs, "drips": drips, "floods": floods, "dies": dies,
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_an_engine_spoils_only_its_own_part_and_is_counted(host, front, monkeypatch, name):
    monkeypatch.setattr(engine_metrics, "SCRAPE_SECONDS", 0.3)
    (await host.engine(0)).metrics = says(FREE % 5)
    (await host.engine(1)).metrics = BAD[name]
    (await host.engine(2)).metrics = says(FREE % 7)
    gateway = await front()
    status, text = await gateway.get("/metrics")
    assert status == 200
    check_text(text)
    free = {dict(labels)["gpu"]: value for name, labels, value in series(text) if name == "appliance_kv_pages_free"}
    assert free == {"0": 5, "2": 7}
    assert "appliance_x" not in text
    assert metric_value(text, "appliance_gateway_ready") == 1
    failed = "appliance_gateway_engine_scrape_errors_total"
    assert metric_value(text, failed) == metric_value(text, failed, gpu="1", release="r1") == 1
    assert (await gateway.get("/livez"))[0] == 200


async def test_scrapes_at_the_same_time_share_one_round(host, front):
    asked = 0

    async def slow(request: Received, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0.3)
        writer.write(answer(body=FREE % 5, kind="text/plain"))

    (await host.engine(0)).metrics = slow
    gateway = await front()
    hasty = asyncio.create_task(gateway.get("/metrics"))
    await asyncio.sleep(0.1)
    hasty.cancel()  # who leaves takes nothing from the others
    texts = await asyncio.gather(*(gateway.get("/metrics") for _ in range(10)))
    assert all(metric_value(text, "appliance_kv_pages_free", gpu="0") == 5 for _, text in texts)
    assert asked == 1


async def test_with_several_workers_they_are_there_once(host):
    (await host.engine(0)).metrics = says(FREE % 5)
    async with started(host, "workers = 2") as gateway:
        text = await asyncio.to_thread(fetch, gateway.url + "/metrics")
        check_text(text)
        assert metric_value(text, "appliance_kv_pages_free", gpu="0", release="r1") == 5


WATCHDOG_TEXT = b"""\
# HELP appliance_watchdog_breaker_open 1 while automation has stopped itself
# TYPE appliance_watchdog_breaker_open gauge
appliance_watchdog_breaker_open 0
# HELP appliance_gpu_state 1 for the state a GPU is in
# TYPE appliance_gpu_state gauge
appliance_gpu_state{gpu="0",uuid="GPU-a",state="HEALTHY"} 1
"""


async def test_the_watchdogs_metrics_come_as_they_are(host, front):
    """By the gateway of the slot stable alone; they have the label gpu already, and no release."""
    await host.engine(0)
    watchdog = FakeEngine(host.paths.watchdog_socket)
    watchdog.metrics = says(WATCHDOG_TEXT)
    await watchdog.start()
    gateway = await front()
    text = (await gateway.get("/metrics"))[1]
    check_text(text, judged=True)
    assert series(WATCHDOG_TEXT.decode()) <= series(text)
    host.point("canary", "r1")
    assert "appliance_watchdog" not in (await (await front(slot="canary")).get("/metrics"))[1]
    watchdog.metrics = says(b"# TYPE appliance_gateway_ready gauge\nappliance_gateway_ready 1\n")
    text = (await gateway.get("/metrics"))[1]
    check_text(text)
    name = "appliance_gateway_engine_scrape_errors_total"
    assert metric_value(text, name, gpu="", release="watchdog", reason="conflict") == 1
    await watchdog.die()  # its socket is left behind
    text = (await gateway.get("/metrics"))[1]
    check_text(text)
    assert "appliance_watchdog" not in text and metric_value(text, name, gpu="", release="watchdog") >= 1


async def test_an_engine_that_takes_the_watchdogs_names_is_left_out(host, front):
    (await host.engine(0)).metrics = says(b"# TYPE appliance_gpu_state counter\nappliance_gpu_state 7\n")
    watchdog = FakeEngine(host.paths.watchdog_socket)
    watchdog.metrics = says(WATCHDOG_TEXT)
    await watchdog.start()
    text = (await (await front()).get("/metrics"))[1]
    check_text(text)
    assert series(WATCHDOG_TEXT.decode()) <= series(text)
    await watchdog.die()


def fetch(url: str) -> str:
    import urllib.request

    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


@given(st.binary(max_size=300), st.integers(0, 400))
def test_nothing_but_its_own_error_comes_of_any_text(data, place):
    whole = real_text()[:4000]
    for text in (data, whole[:place] + data + whole[place:]):
        try:
            families = parse(text)
        except BadMetrics:
            continue
        merged = engine_metrics.Merged([])
        merged.add(0, "r1", families)
        list(text_string_to_metric_families(merged.render().decode()))


def watchdog_text() -> bytes:
    """What the watchdog writes (healthcheck/metrics.py)."""
    from healthcheck.metrics import Counters, text

    counters = Counters()
    counters.signal("0", "xid:48")
    gpu = {
        "gpu": 0, "uuid": "GPU-0", "state": "HEALTHY", "needs": None, "since": 1.0, "probed_at": 2.0, "resets": 0,
        "checks": [{"name": "engine v1", "status": "ok"}], "phases": {"RESETTING": 1.5},
    }  # fmt: skip
    document = {"nvml": "on", "breaker": None, "maintenance": None, "gpus": [gpu]}
    return text(counters, document, {0: {"temperature_c": 40, "name": "NVIDIA H200", "remap_pending": False}})


async def test_what_the_watchdog_really_writes_is_handed_on(host, front):
    engine = await host.engine()
    engine.metrics = says(FREE % 7)
    watchdog = FakeEngine(host.paths.watchdog_socket)
    watchdog.metrics = says(watchdog_text())
    await watchdog.start()
    text = (await (await front()).get("/metrics"))[1]
    check_text(text, judged=True)
    missing = series(watchdog_text().decode()) - series(text)
    assert {name for name, _, _ in missing} <= {"appliance_gpu_probe_age_seconds"}, "an age is another one by now"
    assert metric_value(text, "appliance_kv_pages_free", gpu="0") == 7
    await watchdog.die()
