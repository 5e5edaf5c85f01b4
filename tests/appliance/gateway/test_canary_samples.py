"""What the judge is told (canary/samples.py) is what happened to the clients of both gateways."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess

import aiohttp
import pytest
from scipy.stats import binom

from appliance.paths import Paths
from canary.samples import Samples, SamplesError
from canary.types import Limit
from engine.spawn import python_env, python_module

from .world import DONE, STREAM_HEAD, Received, answer, chunk, counting, event

BOTH = {"canary": "r2", "stable": "r1"}


async def scripted(request: Received, writer: asyncio.StreamWriter) -> None:
    """An engine that does what the body says."""
    asked = json.loads(request.body) if request.body else {}
    if "status" in asked:
        writer.write(answer(asked["status"], b"{}", f"X-Appliance-Error: {asked.get('code', 'c')} final\r\n"))
    elif asked.get("hang"):
        await asyncio.sleep(30)
    elif asked.get("cut"):
        writer.write(STREAM_HEAD.replace(b"X-Appliance-Seed: 7\r\n", b"") + chunk(event(0, 1)))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()
    elif asked.get("late"):
        error = b': error deadline_exceeded final\ndata: {"error":{}}\n\n'
        writer.write(STREAM_HEAD + chunk(event(0, 1)) + chunk(error) + b"0\r\n\r\n")
    elif "gaps" in asked:
        writer.write(STREAM_HEAD + chunk(event(0, 1)))
        for number, gap in enumerate(asked["gaps"], 2):
            await asyncio.sleep(gap)
            writer.write(chunk(event(0, number)))
        writer.write(chunk(DONE) + b"0\r\n\r\n")
    elif asked.get("stream"):
        await counting(5)(request, writer)
    else:
        writer.write(answer())


@pytest.fixture
async def both(host, front):
    """Both gateways, each with an engine of its release."""
    host.point("canary", "r2")
    for release in ("r1", "r2"):
        await host.engine(0, release, scripted)
    return await front(), await front(slot="canary", canary_port=0)


async def read(paths: Paths, **options):
    return await asyncio.to_thread(Samples(paths, **options).read)


async def test_what_counts_as_a_request_and_what_as_an_error(host, both):
    stable, canary = both
    for _ in range(4):
        assert (await canary.post())[0] == 200
    await canary.stream({"stream": True})
    for status, code in ((400, "bad"), (404, "m"), (429, "busy"), (500, "x"), (504, "deadline_exceeded")):
        assert (await canary.post("/infer", {"status": status, "code": code}))[0] == status
    for _ in range(50):  # polls; one of them fails
        await canary.get("/v1/models")
        await canary.get("/livez")
        await canary.get("/readyz")
    assert (await canary.post("/tokenize", {"status": 500}))[0] == 500
    await canary.get("/nothing")
    await canary.raw(b"this is no HTTP\r\n\r\n")
    body = await canary.stream({"cut": True})
    assert b"data: [DONE]" not in body  # its engine broke off, and could not be resumed
    await canary.stream({"late": True})
    with pytest.raises(TimeoutError):
        await canary.post(body={"hang": True}, timeout=aiohttp.ClientTimeout(total=0.3))
    await stable.post()
    await asyncio.sleep(0.05)

    found = await read(host.paths, releases=BOTH)
    assert found.invalid is None and not found.not_alive
    # 4 + 1 stream + 500 + 504 + /tokenize's 500 + cut + late; neither 4xx nor polls nor who left.
    assert found.canary.requests == 10
    assert found.canary.errors == {"http_5xx": 2, "stream_cut": 1, "deadline": 2}
    assert found.canary.rejected == 1
    assert (found.stable.requests, found.stable.errors, found.stable.rejected) == (1, {}, 0)
    assert found.canary.observations["ttft"] == 3  # streams; "hang" asked for none
    assert found.canary.observations["request"] == 4 + 1 + 2 + 2 + 1  # who left had waited: longer than "no limit"
    assert found.canary.alive and found.stable.alive
    assert found.canary.epoch != found.stable.epoch


async def test_slow_events_are_counted_at_the_limit(host, both):
    _, canary = both
    before = (await read(host.paths)).canary
    await canary.stream({"gaps": [0.001, 0.1, 0.001, 0.12, 0.001, 0.3]})
    after = (await read(host.paths)).canary
    assert 6 <= after.observations["itl"] - before.observations["itl"] <= 7  # [DONE] may come with the last one
    assert after.slow["itl:0.08"] >= 3
    assert after.slow["itl:0.25"] >= 1
    assert after.slow["itl:0.08"] <= 5  # the fast ones are not among them


async def test_another_releases_requests_are_not_the_canarys(host, both):
    """A gateway whose release is gone goes on with the one before: clients are served, and the canary is judged by
    somebody else's answers, were it not seen."""
    _, canary = both
    await canary.post()
    assert (await read(host.paths, releases=BOTH)).canary.requests == 1
    await host.engine(0, "r3", scripted)
    host.point("canary", "r3")
    await canary.until(lambda: canary.worker.gateway.engines.serving() == "r3")
    now = {"canary": "r3", "stable": "r1"}
    assert (await read(host.paths, releases=now)).canary.requests == 0
    host.remove(0, "r3")
    await canary.until(lambda: canary.worker.gateway.engines.serving() == "r2")
    assert (await canary.post())[0] == 200  # by r2
    found = await read(host.paths, releases=now)
    assert found.canary.requests == 0
    assert not found.canary.alive
    assert "serves r2, not r3" in found.not_alive["canary"]
    assert (await read(host.paths)).canary.requests == 2  # whoever asks for all of them gets all


async def test_a_canary_without_an_engine_is_not_alive(host, both):
    host.report(0, "r2", state="failed", admitted=False)
    await both[1].until(lambda: both[1].worker.gateway.engines.not_ready())
    found = await read(host.paths, releases=BOTH)
    assert not found.canary.alive and "no engine of r2" in found.not_alive["canary"]
    assert found.stable.alive and found.invalid is None


async def test_a_drained_host_is_not_a_dead_canary(host, both):
    host.drain("maintenance")
    await both[1].until(lambda: both[1].worker.gateway.not_ready())
    found = await read(host.paths, releases=BOTH)
    assert found.canary.alive and not found.not_alive


async def test_who_left_counts_from_the_limit_on(host, both):
    _, canary = both
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await canary.post(body={"hang": True, "stream": True}, timeout=aiohttp.ClientTimeout(total=0.4))
    await canary.until(lambda: not canary.worker.gateway.active)
    strict = await read(host.paths, limits=[Limit(metric="ttft", seconds=0.25)])
    assert (strict.canary.observations["ttft"], strict.canary.slow["ttft:0.25"]) == (2, 2)
    assert strict.canary.requests == 0  # and no errors either: the client left
    lax = await read(host.paths, limits=[Limit(metric="ttft", seconds=5.0)])
    assert (lax.canary.observations["ttft"], lax.canary.slow["ttft:5"]) == (0, 0)


async def test_a_limit_without_an_edge_is_refused(host, front):
    host.point("canary", "r2")
    await front(metrics_buckets_seconds=[0.123])
    await front(slot="canary", canary_port=0, metrics_buckets_seconds=[0.123])

    def check(*limits: Limit) -> None:
        Samples(host.paths, limits=limits).check()

    metrics = ("itl", "ttft", "request")
    await asyncio.to_thread(check, *(Limit(metric=metric, seconds=0.08) for metric in metrics))
    await asyncio.to_thread(check, *(Limit(metric=metric, seconds=0.123) for metric in metrics))
    with pytest.raises(SamplesError, match=r"itl without an edge at 0\.07 s") as error:
        await asyncio.to_thread(check, Limit(metric="itl", seconds=0.07))
    assert "metrics_buckets_seconds" in (error.value.hint or "") and error.value.exit_code == 4


# ---- with the kernel's own rules -------------------------------------------------------------------------------------


@pytest.mark.netns
def test_what_the_kernel_sent_to_the_canary_is_what_it_has_accepted(tmp_path):
    """Each connection that the rules counted, and none that came to the canary's port directly, over IPv4 and IPv6."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "ip", "iptables", "ip6tables"))):
        pytest.skip("needs root, unshare, ip and iptables")
    connections = 10_000 if os.environ.get("APPLIANCE_FULL") else 400
    done = subprocess.run(
        ["unshare", "-n", *python_module("tests.appliance.gateway.redirected"), str(tmp_path), str(connections)],
        env=python_env(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seen"]["canary"] + found["seen"]["stable"] == connections
    assert found["canary"] == found["kernel"] == found["seen"]["canary"]
    assert found["stable"] == found["seen"]["stable"]
    assert found["direct"] == {"canary": 40}
    assert found["requests"] == [found["seen"]["canary"] + 40, found["seen"]["stable"]]
    assert found["clients"] == [2, 2]  # 127.0.0.1 and ::1
    low, high = binom.ppf([5e-5, 1 - 5e-5], connections, 0.3)
    assert low <= found["kernel"] <= high
    assert set(found["probes"]) == {"ok/canary", "ok/stable"}
    assert found["listening"] == ["127.0.0.1:8001", "[::1]:8001"]
