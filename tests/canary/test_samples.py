"""Numbers that cannot be trusted are named, and the arithmetic of those that can."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.gateway.counts import counts as say
from appliance.gateway.metrics import GatewayMetrics
from appliance.paths import Paths
from canary.samples import Counts, GatewayError, Samples, fetch, side_counts, slow_key
from canary.types import Limit

# ---- gateways that cannot be believed --------------------------------------------------------------------------------


@contextmanager
def listening(paths: Paths, slot: str, reply: bytes | None) -> Iterator[None]:
    """An admin socket that says `reply`, or nothing at all."""
    path = paths.gateway_socket(slot)
    path.parent.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(8)
        kept = []

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                if reply is not None:
                    connection.recv(4096)
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(reply), reply))
                    connection.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            for connection in kept:
                connection.close()
            path.unlink()


def said(slot: str = "canary", **changes) -> bytes:
    """What an idle gateway says."""
    metrics = {
        metric.name: {"labels": metric.labels, "edges": getattr(metric, "edges", None), "samples": metric.export()}
        for metric in GatewayMetrics(slot).all()
    }
    whole = {
        "schema": 1, "slot": slot, "epoch": "e", "release": "r", "serving": "r", "not_ready": None, "run": None,
        "draining": False, "clients": 0, "connections": 0, "in_flight": 0, "silent_workers": [], "metrics": metrics,
    }  # fmt: skip
    return msgspec.json.encode(whole | changes)


def test_what_the_gateway_says_is_what_we_read(tmp_path):
    paths = Paths.under(tmp_path)
    with listening(paths, "canary", said()), listening(paths, "stable", said("stable")):
        found = Samples(paths).read()
    assert found.invalid is None and found.canary is not None
    assert (found.canary.requests, found.canary.errors, found.canary.connections) == (0, {}, 0)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (b"", "cannot read"), (b"{}", "cannot read"), (b"[1]", "cannot read"), (b"\xff\xfe", "cannot read"),
        (said("stable"), "says that it is stable"), (said(schema=2), "cannot read"), (said(epoch=""), "cannot read"),
        (said(clients=-1), "cannot read"), (said().replace(b'"in_flight":0', b'"in_flight":NaN'), "cannot read"),
        (said(silent_workers=[17]), "worker 17 of gateway canary did not answer"),
        (said(metrics={}), "counts otherwise"),
        (said(metrics={"appliance_gateway_event_gap_seconds": {"labels": [], "edges": [1], "samples": [[[], [1]]]}}),
         "counts otherwise"),
        (b"[" * 100_000, "cannot read"),
    ],
)  # fmt: skip
def test_what_cannot_be_believed_is_invalid(tmp_path, reply, why):
    paths = Paths.under(tmp_path)
    with listening(paths, "canary", reply), listening(paths, "stable", said("stable")):
        found = Samples(paths).read()
    assert found.invalid is not None and why in found.invalid
    assert found.stable is not None
    assert not found.not_alive  # it answers: nothing says that clients suffer


def test_no_gateway_is_dead_at_once_and_a_silent_one_after_a_while(tmp_path):
    paths, now = Paths.under(tmp_path), [100.0]
    samples = Samples(paths, seconds=0.05, patience=2.0, clock=lambda: now[0])
    with listening(paths, "stable", None):
        found = samples.read()
        assert set(found.not_alive) == {"canary"} and "does not run" in found.not_alive["canary"]
        assert found.canary is None and found.stable is None
        assert "stale: gateway stable did not answer within 0.05 s" in (found.invalid or "")
        now[0] += 1.9
        assert "stable" not in samples.read().not_alive
        now[0] += 0.2
        assert "stable" in samples.read().not_alive
    with listening(paths, "stable", said("stable")):
        assert "stable" not in samples.read().not_alive
    with listening(paths, "stable", None):  # its patience begins with the last answer
        now[0] += 1.0
        assert "stable" not in samples.read().not_alive
        now[0] += 1.5
        assert "stable" in samples.read().not_alive


@settings(max_examples=60)
@given(st.binary(max_size=300), st.integers(0, 2000), st.integers(0, 255))
def test_no_answer_breaks_the_reader(garbage, at, byte):
    """Our own answer with bytes changed, and any bytes: read, or refused by name."""
    whole = bytearray(said())
    whole[at % len(whole)] = byte
    for data in (bytes(whole), garbage):
        try:
            counts = msgspec.json.decode(data, type=Counts)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        try:
            side_counts(counts, 0.0)
        except (ValueError, LookupError):
            pass


# ---- arithmetic ------------------------------------------------------------------------------------------------------

SECONDS = st.floats(0, 30) | st.sampled_from([0.08, 0.1, 1.0, 0.0])


class FakeGateway:
    """What counts() asks a gateway for."""

    class settings:
        slot = "canary"

    class engines:
        release = "r"

        @staticmethod
        def serving() -> str:
            return "r"

        @staticmethod
        def not_ready() -> None:
            return None

    class canary:
        run, draining = "1", False

        class clients:
            number = 3

    epoch, stopping = "e", False


@settings(max_examples=60)
@given(st.lists(SECONDS, max_size=30), st.lists(SECONDS, max_size=30), st.none() | st.sampled_from([0.08, 1.0, 10.0]))
def test_the_share_above_a_limit_is_exact(relayed, left, limit):
    """Counted one by one. Who left counts by the lower edge of his bucket: he has waited at least so long."""
    metrics = GatewayMetrics("canary")
    for seconds in relayed:
        metrics.first_token.observe(seconds, "canary", "r")
        metrics.gap.observe(seconds, "canary", "r")
        metrics.latency.observe(seconds, "canary", "r", "/infer", "2xx")
        metrics.latency.observe(seconds, "canary", "r", "/infer", "4xx")  # refused: nobody waited for an answer
        metrics.latency.observe(seconds, "canary", "r", "/v1/models", "2xx")
    for seconds in left:
        metrics.left.observe(seconds, "canary", "r", "ttft")
        metrics.latency.observe(seconds, "canary", "r", "/infer", "499")
    limits = [] if limit is None else [Limit(metric="ttft", seconds=limit), Limit(metric="request", seconds=limit)]
    text = msgspec.json.encode(say(FakeGateway, metrics.all(), connections=0, in_flight=0, silent=[]))
    found = side_counts(msgspec.json.decode(text, type=Counts), 1.0, release="r", limits=limits)
    for edge in (0.08, 1.0, 10.0):
        slow = sum(seconds > edge for seconds in relayed)
        assert found.slow[slow_key("itl", edge)] == slow
        gone = sum(seconds > max(edge, limit or 0) for seconds in left)
        assert found.slow[slow_key("ttft", edge)] == slow + gone
        assert found.slow[slow_key("request", edge)] == slow + gone
    assert found.observations["itl"] == len(relayed)
    known = len(left) if limit is None else sum(seconds > limit for seconds in left)
    assert found.observations["ttft"] == found.observations["request"] == len(relayed) + known
    for key, number in found.slow.items():
        assert 0 <= number <= found.observations[key.partition(":")[0]]


def test_the_canarys_connections_are_those_that_the_kernel_can_have_sent(tmp_path):
    metrics = GatewayMetrics("canary")
    metrics.accepted.inc("canary", by=10)
    for via, number in (("redirect", 5), ("direct", 3), ("unknown", 1)):  # and one TLS handshake that failed
        metrics.opened.inc("canary", "r", via, by=number)
    tables = {m.name: {"labels": m.labels, "edges": getattr(m, "edges", None), "samples": m.export()}
              for m in metrics.all()}  # fmt: skip
    for slot, wanted in (("canary", 7), ("stable", 10)):
        counts = msgspec.json.decode(said(slot, metrics=tables), type=Counts)
        assert side_counts(counts, 0.0).connections == wanted


def test_keys_are_written_as_people_write_the_limits():
    assert [slow_key("itl", s) for s in (0.08, 1.0, 0.0025, 600, 0.123456)] == [
        "itl:0.08", "itl:1", "itl:0.0025", "itl:600", "itl:0.123456",
    ]  # fmt: skip


def test_a_fetch_has_one_deadline(tmp_path):
    paths = Paths.under(tmp_path)
    with listening(paths, "canary", None), pytest.raises(GatewayError, match="stale"):
        fetch(paths, "canary", 0.1)
