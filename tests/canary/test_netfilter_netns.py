"""The rules in a real kernel under real traffic: nobody is reset, the shares are right, others' rules hold."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binom

from appliance.log import ApplianceError
from canary.netfilter.apply import Netfilter
from canary.netfilter.model import Conflict, Refused
from tests.canary.netns import CLIENTS, CLIENTS6, SECOND, SERVER, SERVER6, STRANGER, Pair, Program, require_netns

FULL = os.environ.get("APPLIANCE_FULL") == "1"
CONNECTIONS = 2500 if FULL else 150  # for each weight, of clients of the network
REQUESTS = 100_000 if FULL else 3_000  # of a whole run, at least
STEPS = (5, 10, 25, 50, 100)
V4, V6 = ["--to", SERVER], ["--to", SERVER6]
SOURCES = [word for both in zip(CLIENTS, CLIENTS6) for address in both for word in ("--source", address)]

LOCAL = ["--to", "127.0.0.1", "--to", "::1", "--to", SERVER, "--to", SERVER6]

pytestmark = [pytest.mark.netns, pytest.mark.timeout(1500), pytest.mark.xdist_group("netns")]


@pytest.fixture
def pair() -> Iterator[Pair]:
    require_netns()
    with Pair() as pair:
        yield pair


@pytest.fixture
def netfilter(pair: Pair, tmp_path: Path) -> Netfilter:
    return Netfilter(pair.server.runner, lock=tmp_path / "netfilter", proc=pair.server.proc)


@pytest.fixture
def servers(pair: Pair) -> Iterator[dict[str, Any]]:
    """The two gateways' stand-ins. They end a connection after 100 requests, as gateways do during a run."""
    limit = ("--requests-per-connection", "100")
    with pair.server.program("serve", "--name", "stable", "--port", "8000", *limit) as stable:
        with pair.server.program("serve", "--name", "canary", "--port", "8001", *limit) as canary:
            yield {"stable": stable, "canary": canary}


def inside(canary: int, connections: int, weight: float) -> bool:
    """Is the share of the canary within the 99.99 % interval of the binomial distribution?"""
    low, high = binom.interval(0.9999, connections, weight / 100)
    return bool(low <= canary <= high)


def assert_share(burst: Callable[[], dict[str, Any]], weight: float) -> int:
    """One look in 10,000 falls outside by chance, so there is a second; how many connections were made."""
    made = 0
    for attempt in (1, 2):
        report = burst()
        assert report["failures"] == {}
        counts = report["counts"]
        made += counts["new.connections"]
        if inside(counts.get("new.canary", 0), counts["new.connections"], weight):
            return made
        assert attempt == 1, f"{counts} at {weight} %"
    raise AssertionError("unreachable")


def network_clients(pair: Pair) -> Callable[[], dict[str, Any]]:
    """Both families in turn, from 16 addresses of each."""
    return lambda: pair.client.burst(CONNECTIONS, "--new", "16", *V4, *V6, *SOURCES)


def local_clients(pair: Pair) -> Callable[[], dict[str, Any]]:
    return lambda: pair.server.burst(CONNECTIONS // 2, "--new", "8", *LOCAL)


def requests_of(*programs: Program) -> int:
    return sum(program.counts()["counts"].get("requests", 0) for program in programs)


# -- what is done to the host before and in the middle
DOCKER = """
for ipt in iptables ip6tables; do
    $ipt -t nat -N DOCKER
    $ipt -t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
    $ipt -t nat -A DOCKER -p tcp --dport 9000 -j DNAT --to-destination :9001
    $ipt -t nat -A DOCKER -p tcp --dport 8000 -j DNAT --to-destination :8000
done
"""
INPUT_DROP = """
iptables -A INPUT -i lo -j ACCEPT
iptables -A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
iptables -A INPUT -p tcp -m multiport --dports 22,8000 -s 10.77.0.0/24 -m conntrack --ctstate NEW -j ACCEPT
iptables -P INPUT DROP
ip6tables -N api
ip6tables -A api -p tcp --dport 8000 -j ACCEPT
ip6tables -A INPUT -i lo -j ACCEPT
ip6tables -A INPUT -p icmpv6 -j ACCEPT
ip6tables -A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT
ip6tables -A INPUT -s fd77::/64 -j api
ip6tables -P INPUT DROP
"""
FLUSH = """
for ipt in iptables ip6tables; do
    for table in filter nat mangle raw; do $ipt -t $table -F; $ipt -t $table -X; done
done
"""
REINSERTED = "iptables -t nat -I PREROUTING 1 -p tcp --dport 8000 -m addrtype --dst-type LOCAL -j DNAT --to :8000"


@pytest.mark.parametrize(
    ("before", "middle"),
    [("", ""), (DOCKER, REINSERTED), (INPUT_DROP, ""), ("", FLUSH)],
    ids=["clean", "foreign-dnat", "input-drop", "flushed-by-others"],
)
def test_a_run_to_the_end_and_back(
    pair: Pair, netfilter: Netfilter, servers: dict[str, Any], before: str, middle: str
) -> None:
    """Keep-alive pools, new connections, streams and clients of the host itself, of both families, from 5 % to 100 %
    and back to 0: not one failure, and each share as it was set."""
    pair.server.sh(before or "true")
    netfilter.up()
    background = ["--pool", "8", "--streams", "4", "--new", "2", "--think", "0.04"]
    made = 0
    with (
        pair.client.program("load", *background, *V4, *V6, *SOURCES[:16]) as clients,
        pair.server.program("load", *background, *LOCAL) as local,
    ):
        for weight in STEPS if FULL or not (before or middle) else (5, 50, 100):
            before_it = netfilter.counters()
            assert netfilter.set_weight("42", weight).weight == weight
            if weight == 50 and middle:
                pair.server.sh(middle)
                assert netfilter.read().drift
                assert netfilter.repair()
            made += assert_share(network_clients(pair), weight)
            made += assert_share(local_clients(pair), weight)
            while made + requests_of(clients, local) < REQUESTS * (STEPS.index(weight) + 1) / len(STEPS):
                time.sleep(0.1)
            counted = netfilter.counters()
            assert counted["canary"] > before_it["canary"]
        assert netfilter.set_weight("42", 0).weight == 0
        assert_share(network_clients(pair), 0)
        reports = [clients.stop(), local.stop()]
    for report in reports:
        assert report["failures"] == {}
        assert report["counts"]["pool.canary.requests"] > 0 and report["counts"]["stream.canary"] > 0
    requests = made + sum(report["counts"]["requests"] for report in reports)
    assert requests >= REQUESTS
    print(f"{requests} requests, {made} of them on connections of their own")
    if not middle:
        counted, served = netfilter.counters(), {name: server.counts() for name, server in servers.items()}
        assert counted == {name: each["connections"] for name, each in served.items()}, "the kernel's count is exact"
    assert netfilter.read().drift == ()


@pytest.mark.parametrize("weight", [5, 50, 100])
def test_rollback_from_a_step(pair: Pair, netfilter: Netfilter, servers: dict[str, Any], weight: float) -> None:
    """New connections go to stable at once; those to the canary go on until they end by themselves."""
    netfilter.up()
    netfilter.set_weight("7", weight)
    pools = ["--pool", "40", "--streams", "8", "--think", "0.05", "--events", "40"]
    with pair.client.program("load", *pools, *V4, *V6) as clients:
        draining = netfilter.draining()
        assert draining is not None and (draining > 0 or weight == 5)
        netfilter.set_weight("7", 0)
        assert_share(network_clients(pair), 0)
        report = clients.stop()
    assert report["failures"] == {}
    assert netfilter.draining() == 0


def test_eight_pooled_clients_alone_get_the_share(pair: Pair, netfilter: Netfilter) -> None:
    """Connections that end after 10 requests (of the servers here) make a weight mean something to pools."""
    netfilter.up()
    limit = ("--requests-per-connection", "10")
    with (
        pair.server.program("serve", "--name", "stable", "--port", "8000", *limit),
        pair.server.program("serve", "--name", "canary", "--port", "8001", *limit),
    ):
        netfilter.set_weight("1", 25)
        with pair.client.program("load", "--pool", "8", *V4, *V6) as clients:
            while clients.counts()["counts"].get("pool.connections", 0) < (2000 if FULL else 150):
                time.sleep(0.05)
            report = clients.stop()
    assert report["failures"] == {}
    counts = report["counts"]
    assert inside(counts["pool.canary"], counts["pool.canary"] + counts["pool.stable"], 25)


def test_connections_that_conntrack_does_not_know_stay(pair: Pair, netfilter: Netfilter) -> None:
    """On a host where nobody used conntrack, old connections are unknown to it, and after somebody's `conntrack -F` all
    are: their next packet looks new, in mid-stream."""
    with pair.server.program("serve", "--name", "stable", "--port", "8000"):
        with pair.client.program("load", "--pool", "10", "--think", "0.02", *V4, *V6) as clients:
            wait_for(clients, 100)
            netfilter.up()
            netfilter.set_weight("1", 100)
            wait_for(clients, 200)
            pair.server.run(["conntrack", "-F"])
            wait_for(clients, 200)
            report = clients.stop()
    assert report["failures"] == {}
    assert report["counts"]["pool.connections"] == 10


def wait_for(program: Program, requests: int) -> None:
    """Until the clients have had so many more answers."""
    wanted = requests_of(program) + requests
    while requests_of(program) < wanted:
        assert not program.counts()["failures"]
        time.sleep(0.02)


def test_rewriting_the_weight_leaks_nothing(pair: Pair, netfilter: Netfilter, servers: dict[str, Any]) -> None:
    """At 100 % no connection sees the moment between the old rules and the new ones."""
    netfilter.up()
    netfilter.set_weight("1", 100)
    with pair.client.program("load", "--new", "16", *V4, *V6, *SOURCES) as clients:
        for number in range(60 if FULL else 12):
            netfilter.set_weight("1", 100 if number % 2 else 99.9999999)  # writes the chain anew
        report = clients.stop()
    assert report["failures"] == {}
    assert report["counts"]["new.canary"] > 0 and "new.stable" not in report["counts"]


def test_the_canarys_port_is_reached_through_the_port_only(
    pair: Pair, netfilter: Netfilter, servers: dict[str, Any]
) -> None:
    netfilter.up()
    for to in (V4, V6):
        direct = pair.client.burst(2, "--new", "1", "--port", "8001", *to)
        assert direct["failures"] == {"new: ECONNREFUSED": 2}
    for to in ("127.0.0.1", "::1", SERVER, SERVER6):
        assert pair.server.burst(1, "--new", "1", "--port", "8001", "--to", to)["counts"]["new.canary"] == 1
    netfilter.set_weight("1", 100)
    assert pair.client.burst(1, "--new", "1", *V4)["counts"]["new.canary"] == 1


def test_whom_the_firewall_keeps_out_the_canary_keeps_out(
    pair: Pair, netfilter: Netfilter, servers: dict[str, Any]
) -> None:
    """INPUT DROP with port 8000 open for one network: the rest of the world does not get in through port 8001."""
    pair.server.sh(INPUT_DROP)
    netfilter.up()
    from_outside = ["timeout", "1", "python3", "-c", _CONNECT, STRANGER, "10.78.0.1"]
    from_inside = ["python3", "-c", _CONNECT, CLIENTS[0], SERVER]
    for weight in (0, 100):
        netfilter.set_weight("1", weight)
        assert pair.client.run(from_outside, check=False).code == 124, f"let in at {weight} %"
        assert pair.client.run(["timeout", "10", *from_inside]).ok
    pair.server.sh(f"iptables -I INPUT 1 -p tcp -m tcp --dport 8000 -s {CLIENTS[0]} -j DROP")  # as fail2ban does
    assert netfilter.repair()
    assert pair.client.run(["timeout", "1", *from_inside], check=False).code == 124, "banned from both"


_CONNECT = """
import socket, sys
socket.create_connection((sys.argv[2], 8000), source_address=(sys.argv[1], 0)).close()
"""


def test_any_address_of_the_host_has_its_canary(pair: Pair, netfilter: Netfilter) -> None:
    """A gateway that listens on a second address of the interface: REDIRECT would send to the first."""
    netfilter.up()
    netfilter.set_weight("1", 100)
    with pair.server.program("serve", "--name", "canary", "--port", "8001", "--host", SECOND):
        assert pair.client.burst(3, "--new", "1", "--to", SECOND)["counts"]["new.canary"] == 3


def test_removal_waits_for_open_connections(pair: Pair, netfilter: Netfilter, servers: dict[str, Any]) -> None:
    before = {each: pair.server.run([f"{each}-save"]).text for each in ("iptables", "ip6tables")}
    netfilter.up()
    netfilter.set_weight("1", 100)
    with pair.client.program("load", "--pool", "3", "--think", "0.02", *V4, *V6) as clients:
        wait_for(clients, 10)
        assert netfilter.remove() == 3, "the anchor stays"
        wait_for(clients, 50)
        report = clients.stop()
    assert report["failures"] == {}
    assert netfilter.remove() == 0
    assert "APPLIANCE" not in pair.server.run(["nft", "list", "ruleset"]).text.upper()
    assert netfilter.remove() == 0, "a second time there is nothing to do"
    after = {each: pair.server.run([f"{each}-save"]).text for each in before}
    assert [line for text in after.values() for line in text.splitlines() if line.startswith("-A")] == []


def test_removal_for_good_leaves_a_host_as_it_was(pair: Pair, netfilter: Netfilter) -> None:
    """Also the empty tables that our first rule made; not those that somebody uses, be it for a policy alone."""
    pair.server.run(["nft", "flush", "ruleset"])
    netfilter.up()
    assert netfilter.remove(force=True) == 0
    assert pair.server.run(["nft", "list", "ruleset"]).text == ""
    assert netfilter.remove(force=True) == 0
    pair.server.run(["iptables", "-P", "FORWARD", "DROP"])
    pair.server.run(["ip6tables", "-t", "nat", "-N", "DOCKER"])
    netfilter.up()
    assert netfilter.remove(force=True) == 0
    left = pair.server.run(["nft", "list", "tables"]).text.split("\n")
    assert sorted(filter(None, left)) == ["table ip filter", "table ip6 nat"]
    assert "-P FORWARD DROP" in pair.server.run(["iptables", "-S"]).text


def test_the_clients_here_would_notice_a_reset(pair: Pair, netfilter: Netfilter, servers: dict[str, Any]) -> None:
    """The anchor taken by force, and no other user of conntrack: what research found happens, and is seen."""
    netfilter.up()
    netfilter.set_weight("1", 100)
    with pair.client.program("load", "--pool", "3", "--think", "0.02", *V4) as clients:
        wait_for(clients, 10)
        assert netfilter.remove(force=True) == 0
        while not clients.counts()["failures"]:
            time.sleep(0.02)
        report = clients.stop()
    assert report["failures"].get("pool: ECONNRESET", 0) >= 1


def test_two_runs_and_a_restarted_controller(pair: Pair, netfilter: Netfilter, tmp_path: Path) -> None:
    netfilter.set_weight("41", 10)
    other = Netfilter(pair.server.runner, lock=tmp_path / "netfilter", proc=pair.server.proc)
    assert (other.read().weight, other.read().run, other.read().drift) == (10, "41", ())
    assert other.repair() == [], "a weight that is there stays"
    with pytest.raises(Conflict, match="run 41 has 10 %"):
        other.set_weight("42", 5)
    assert other.read().weight == 10
    assert other.set_weight("42", 0).weight == 0, "0 is always allowed"
    assert other.set_weight("42", 5).run == "42"
    assert netfilter.read().drift, "the first one sees that it is not its weight"


def test_each_kind_of_drift_is_found_and_put_back(pair: Pair, netfilter: Netfilter) -> None:
    netfilter.set_weight("1", 30)
    good = netfilter.read()
    assert good.drift == ()
    for change in (
        "iptables -t nat -F APPLIANCE-CANARY",
        "ip6tables -t nat -F PREROUTING",
        "iptables -t nat -A PREROUTING -p tcp --dport 8000 -j APPLIANCE-CANARY",
        "iptables -t nat -I PREROUTING 1 -p udp -j ACCEPT",
        "iptables -t nat -R APPLIANCE-CANARY 1 -m statistic --mode random --probability 0.9 -j APPLIANCE-TO-CANARY",
        "iptables -F INPUT",
        "iptables -I INPUT 1 -p tcp --dport 22 -j ACCEPT",
        "iptables -A INPUT -p tcp --dport 8000 -j ACCEPT",
        "ip6tables -t nat -F OUTPUT",
        "nft delete table inet appliance_anchor",
        "nft flush table inet appliance_anchor",
        "nft flush ruleset",
    ):
        pair.server.sh(change)
        assert netfilter.diff(), change
        assert netfilter.repair(), change
        again = netfilter.read()
        assert (again.weight, again.run, again.drift, again.anchor) == (30, "1", (), True), change
        assert netfilter.diff() == ""


def test_weights_are_read_back_as_the_kernel_holds_them(netfilter: Netfilter) -> None:
    for weight in (5, 0.1, 33.333333, 99.99, 100, 2**-31 * 100, 0):
        reading = netfilter.set_weight("1", weight)
        assert reading.weight is not None and math.isclose(reading.weight, weight, rel_tol=1e-6, abs_tol=1e-7)
        assert reading.drift == ()


def test_legacy_rules_are_refused_with_the_fix(pair: Pair, netfilter: Netfilter) -> None:
    if not pair.server.run(["iptables-legacy", "-t", "nat", "-A", "PREROUTING", "-j", "ACCEPT"], check=False).ok:
        pytest.skip("this kernel has no legacy iptables")
    with pytest.raises(Refused, match="legacy ipv4 rules") as caught:
        netfilter.up()
    assert "update-alternatives" in (caught.value.hint or "")
    pair.server.run(["iptables-legacy", "-t", "nat", "-F"])
    assert netfilter.up(), "an empty legacy table does no harm"


def test_without_the_right_nothing_is_changed(pair: Pair, tmp_path: Path) -> None:
    def weak(argv: list[str], **options: Any) -> Any:
        drop = ["setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin"]
        return pair.server.runner([*drop, *argv], **options)

    netfilter = Netfilter(weak, lock=tmp_path / "netfilter", proc=pair.server.proc)
    with pytest.raises(ApplianceError) as caught:
        netfilter.set_weight("1", 0)
    assert "CAP_NET_ADMIN" in (caught.value.hint or "")
