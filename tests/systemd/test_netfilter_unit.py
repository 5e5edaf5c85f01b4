"""appliance-netfilter.service in a booted systemd: its sandbox lets it work, and it comes and goes with the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host import appliance_box
from tests.host.box import Box
from tests.host.plugin import HOST_SECONDS

UNIT = "appliance-netfilter.service"
GATEWAY = "appliance-gateway@stable.service"

pytestmark = [pytest.mark.box, pytest.mark.timeout(HOST_SECONDS)]


@pytest.fixture(scope="module")
def installed(box_root: Path) -> Iterator[Box]:
    with Box(box_root, **appliance_box.boot_options()) as box:
        appliance_box.install(box)
        yield box


def show(box: Box) -> dict[str, Any]:
    command = [appliance_box.PYTHON, "-P", "-m", "canary.netfilter", "show", "--json"]
    return dict(json.loads(box.run(command).stdout))


def ours(box: Box) -> str:
    """What nft, iptables and ip6tables have of ours."""
    saved = "".join(box.run([program]).stdout for program in ("iptables-save", "ip6tables-save"))
    lines = (saved + box.run(["nft", "list", "tables"]).stdout).splitlines()
    return "\n".join(line for line in lines if "appliance" in line.lower())


def test_rules_come_and_go_with_the_unit(installed: Box) -> None:
    assert ours(installed) == ""
    installed.run(["systemctl", "start", UNIT])
    shown = show(installed)
    assert (shown["weight"], shown["run"], shown["anchor"], shown["drift"]) == (0, None, True, [])
    assert shown["families"] == ["ipv4", "ipv6"]
    installed.run(["systemctl", "restart", UNIT])
    assert show(installed)["drift"] == []
    installed.run(["systemctl", "stop", UNIT])
    assert ours(installed) == ""
    assert installed.show(UNIT, "Result")["Result"] == "success"
    assert installed.exists("/run/appliance/gateway"), "of the gateways, which may still run"


def test_a_gateway_brings_the_rules_before_it_listens(installed: Box) -> None:
    installed.run(["systemctl", "start", GATEWAY], timeout=120)
    try:
        assert show(installed)["drift"] == []
        times = [
            int(installed.show(unit, "ActiveEnterTimestampMonotonic")["ActiveEnterTimestampMonotonic"])
            for unit in (UNIT, GATEWAY)
        ]
        assert times[0] < times[1]
    finally:
        installed.run(["systemctl", "stop", GATEWAY, UNIT], timeout=120)
    assert ours(installed) == ""


def test_without_netfilter_the_endpoint_serves(installed: Box) -> None:
    """nft is not there: the unit fails, says what to install, and takes nothing down with it."""
    installed.run(["mv", "/usr/sbin/nft", "/usr/sbin/nft.away"])
    try:
        installed.run(["systemctl", "start", GATEWAY], timeout=120)
        assert installed.show(GATEWAY, "ActiveState")["ActiveState"] == "active"
        assert installed.show(UNIT, "ActiveState")["ActiveState"] == "failed"
        assert "install the packages iptables, nftables and conntrack" in installed.journal(UNIT)
    finally:
        installed.run(["mv", "/usr/sbin/nft.away", "/usr/sbin/nft"])
        installed.run(["systemctl", "stop", GATEWAY], timeout=120)
        installed.run(["systemctl", "reset-failed"])
