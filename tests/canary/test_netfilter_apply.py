"""apply.py against stand-ins for the programs (their real words and exit codes), and the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from appliance.command import NOT_FOUND, Result
from appliance.log import BusyError, ExitCode
from appliance.statefile import state_lock
from canary.netfilter import __main__ as program
from canary.netfilter import apply
from canary.netfilter.apply import Netfilter
from canary.netfilter.model import Conflict, Family, NetfilterError, Refused
from tests.canary.test_netfilter_parse import ANCHOR, CONNTRACK
from tests.canary.test_netfilter_plan import read_case

HERE = Path(__file__).parent / "netfilter_cases" / "already_there.json"
SAVED = "\n".join(json.loads(HERE.read_text())["save"]["ipv4"]) + "\n"  # 5 % of run 42
VERSION = "iptables v1.8.9 (nf_tables)\n"


class Host:
    """Answers of the programs, by the first words of their command; the last entry that fits counts."""

    def __init__(self, **changes: Any) -> None:
        self.ran: list[list[str]] = []
        self.given: list[str] = []
        self.answers: dict[str, Callable[[], tuple[int, str, str]] | tuple[int, str, str]] = {
            "iptables-save -V": (0, VERSION, ""),
            "iptables-restore -V": (0, VERSION, ""),
            "iptables-save -c": (0, SAVED, ""),
            "iptables-restore --noflush": (0, "", ""),
            "nft -j list table": (0, ANCHOR, ""),
            "nft -f": (0, "", ""),
            "conntrack -L": (0, "", "conntrack v1.4.7 (conntrack-tools): 0 flow entries have been shown."),
        } | changes

    def __call__(self, argv: Sequence[str], *, timeout: float, limit: int = 0, stdin: bytes = b"") -> Result:
        self.ran.append(list(argv))
        self.given.append(stdin.decode())
        for words, answer in reversed(self.answers.items()):
            if " ".join(argv).startswith(words):
                code, out, err = answer() if callable(answer) else answer
                return Result(tuple(argv), code, out.encode(), err.encode())
        return Result(tuple(argv), NOT_FOUND, b"", b"")

    def changed(self) -> list[str]:
        return [text for argv, text in zip(self.ran, self.given) if argv[0] in ("iptables-restore", "nft") and text]


@pytest.fixture
def make(tmp_path: Path) -> Callable[[Host], Netfilter]:
    (tmp_path / "net").mkdir()
    return lambda host: Netfilter(host, families=(Family.IPV4,), lock=tmp_path / "run" / "netfilter", proc=tmp_path)


def test_a_rollback_comes_before_any_look(make: Callable[[Host], Netfilter]) -> None:
    _, state, _ = read_case(HERE)
    assert state.rulesets  # 5 % before
    zero = SAVED.replace(next(line for line in SAVED.splitlines() if "statistic" in line) + "\n", "")
    host = Host(**{"iptables-save -c": (0, zero, "")})
    reading = make(host).set_weight("42", 0)
    assert host.ran[0][0] == "iptables-restore" and "*nat\n:APPLIANCE-CANARY - [0:0]\n" in host.given[0]
    assert "statistic" not in host.given[0] and reading.weight == 0


def test_a_rollback_is_done_even_where_nothing_can_be_read(make: Callable[[Host], Netfilter]) -> None:
    host = Host(**{"iptables-save -c": (1, "", "iptables-save: kernel says no")})
    with pytest.raises(NetfilterError, match="kernel says no"):
        make(host).set_weight("42", 0)
    assert len(host.changed()) == 1 and ":APPLIANCE-CANARY" in host.changed()[0]


def test_a_rollback_does_not_wait_for_the_lock(make: Callable[[Host], Netfilter], tmp_path: Path) -> None:
    host = Host()
    (tmp_path / "run").mkdir()
    with state_lock(tmp_path / "run" / "netfilter"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "state_lock", lambda path: state_lock(path, wait_seconds=0.05))
        with pytest.raises(BusyError):
            make(host).set_weight("42", 0)
    assert len(host.changed()) == 1


def test_busy_is_asked_again_and_denied_is_not(
    make: Callable[[Host], Netfilter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 4 is both: "resource problem" and "Permission denied (you must be root)"."""
    answers = [(4, "", "iptables-restore: Resource temporarily unavailable."), (0, "", "")]
    drifted = [SAVED.replace("-A PREROUTING", "-A OUTPUT"), SAVED]
    host = Host(
        **{
            "iptables-restore --noflush": lambda: answers.pop(0),
            "iptables-save -c": lambda: (0, drifted.pop(0) if len(drifted) > 1 else drifted[0], ""),
        }
    )
    assert make(host).repair()
    assert answers == [] and len(host.changed()) == 2

    host = Host(
        **{
            "iptables-save -c": (0, "", ""),
            "iptables-restore --noflush": (4, "", "Could not fetch rule set generation id: Permission denied"),
        }
    )
    with pytest.raises(NetfilterError) as caught:
        make(host).repair()
    assert "CAP_NET_ADMIN" in (caught.value.hint or "") and len(host.changed()) == 1


def test_busy_for_ever_is_an_error(make: Callable[[Host], Netfilter], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "_BUSY_SECONDS", 0.12)
    host = Host(**{"iptables-save -c": (0, "", ""), "iptables-restore --noflush": (4, "", "busy")})
    with pytest.raises(NetfilterError, match="exit code 4: busy"):
        make(host).repair()
    assert len(host.changed()) > 1


def test_somebody_who_changes_the_rules_all_the_time_is_a_conflict(make: Callable[[Host], Netfilter]) -> None:
    host = Host(**{"iptables-save -c": (0, "", ""), "iptables-restore --noflush": (1, "", "line 2 failed: Bad rule")})
    with pytest.raises(Conflict, match="Bad rule"):
        make(host).repair()
    assert len(host.changed()) == apply._ATTEMPTS, "read again each time, never taken for done"


def test_what_this_iptables_does_not_know(make: Callable[[Host], Netfilter]) -> None:
    unknown = (2, "", 'unknown option "--foo"\nError occurred at line: 2')
    host = Host(**{"iptables-save -c": (0, "", ""), "iptables-restore --noflush": unknown})
    with pytest.raises(NetfilterError) as caught:
        make(host).repair()
    assert "iptables 1.8" in (caught.value.hint or "") and len(host.changed()) == 1


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"iptables-restore -V": (0, "iptables v1.8.9 (legacy)\n", "")}, "legacy backend", "update-alternatives"),
        ({"iptables-save -c": (0, SAVED.replace(" (nf_tables)", ""), "")}, "legacy backend", "update-alternatives"),
        ({"iptables-save -V": (NOT_FOUND, "", "")}, "not installed", "install the packages"),
    ],
)
def test_hosts_that_are_refused(
    make: Callable[[Host], Netfilter], changes: dict[str, Any], message: str, hint: str
) -> None:
    host = Host(**changes)
    with pytest.raises(Refused, match=message) as caught:
        make(host).read()
    assert hint in (caught.value.hint or "") and caught.value.exit_code == ExitCode.REFUSED
    assert host.changed() == []


def test_legacy_rules_beside_ours_are_refused(make: Callable[[Host], Netfilter], tmp_path: Path) -> None:
    netfilter = make(
        host := Host(
            **{"iptables-legacy-save": (0, "*nat\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING -j X\nCOMMIT\n", "")}
        )
    )
    (tmp_path / "net" / "ip_tables_names").write_text("nat\n")
    with pytest.raises(Refused, match=r"legacy ipv4 rules \(tables nat\)"):
        netfilter.read()
    host.answers["iptables-legacy-save"] = (0, "*nat\n:PREROUTING ACCEPT [0:0]\nCOMMIT\n", "")
    assert netfilter.read().weight == 5
    host.answers["iptables-legacy-save"] = (0, "*filter\n:INPUT DROP [0:0]\nCOMMIT\n", "")
    with pytest.raises(Refused):
        netfilter.read()


def test_an_answer_that_is_not_understood_changes_nothing(make: Callable[[Host], Netfilter]) -> None:
    host = Host(**{"iptables-save -c": (0, "*nat\n?\nCOMMIT\n", "")})
    with pytest.raises(NetfilterError, match="an unknown line"):
        make(host).set_weight("42", 10)
    assert host.changed() == []


def test_counters_go_on_where_somebody_zeroed_them(make: Callable[[Host], Netfilter]) -> None:
    host = Host()
    netfilter = make(host)
    assert netfilter.counters() == {"canary": 3, "stable": 9}
    host.answers["iptables-save -c"] = (0, SAVED.replace("[3:180]", "[0:0]").replace("[9:540]", "[11:660]"), "")
    assert netfilter.counters() == {"canary": 3, "stable": 11}


def test_draining_connections(make: Callable[[Host], Netfilter], tmp_path: Path) -> None:
    host = Host(**{"conntrack -L": (0, f"{CONNTRACK}\n{CONNTRACK.replace('ESTABLISHED', 'TIME_WAIT')}\n", "")})
    assert make(host).draining() == 1
    host.answers["conntrack -L"] = (NOT_FOUND, "", "")
    assert make(host).draining() is None, "unknown is not 0"
    (tmp_path / "net" / "nf_conntrack").write_text(
        f"ipv4     2 {CONNTRACK}\nipv4     2 {CONNTRACK.replace('sport=8001', 'sport=8000')}\n"
    )
    assert make(host).draining() == 1


def test_unknown_connections_keep_the_anchor(make: Callable[[Host], Netfilter]) -> None:
    host = Host(**{"iptables-save -c": (0, "", ""), "conntrack -L": (1, "", "Operation failed")})
    assert make(host).remove() == 1
    assert not [text for text in host.changed() if "appliance_anchor" in text]
    assert make(host).remove(force=True) == 0
    assert host.changed()[-1] == "delete table inet appliance_anchor\n"


# -- the command line
@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "etc/appliance").mkdir(parents=True)
    (tmp_path / "etc/appliance/appliance.toml").write_text("schema = 1\n[gateway]\nport = 8080\ncanary_port = 8081\n")
    monkeypatch.setenv("APPLIANCE_ROOT", str(tmp_path))
    return tmp_path


def _with(monkeypatch: pytest.MonkeyPatch, host: Host) -> Host:
    def netfilter(**options: Any) -> Netfilter:
        return Netfilter(host, proc=Path("/nowhere"), **options)  # a kernel without IPv6

    monkeypatch.setattr(program, "Netfilter", netfilter)
    return host


def test_the_ports_are_those_of_the_configuration(
    installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    host = _with(monkeypatch, Host(**{"nft -j list chains": (0, '{"nftables": []}', "")}))
    host.answers["iptables-save -c"] = (0, "", "")
    host.answers["nft -j list table"] = (1, "", "Error: No such file or directory")
    assert program.main(["show", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["port"], shown["canary_port"], shown["weight"], shown["anchor"]) == (8080, 8081, None, False)
    assert shown["drift"]
    assert program.main(["show"]) == 0
    assert "weight:            none" in capsys.readouterr().out
    saves = [(0, "", ""), (0, SAVED.replace("8000", "8080").replace("8001", "8081"), "")]
    host.answers["iptables-save -c"] = lambda: saves.pop(0) if len(saves) > 1 else saves[0]
    host.answers["nft -j list table"] = (0, ANCHOR, "")
    assert program.main(["up"]) == 0
    assert any("--dport 8080" in text for text in host.changed())


def test_exit_codes(installed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    host = _with(monkeypatch, Host(**{"iptables-restore -V": (0, "iptables v1.8.9 (legacy)", "")}))
    assert program.main(["up", "--json"]) == ExitCode.REFUSED
    assert "legacy" in json.loads(capsys.readouterr().out)["error"]["message"]
    host.answers["iptables-restore -V"] = (0, VERSION, "")
    host.answers["iptables-save -c"] = (0, "", "")
    host.answers["conntrack -L"] = (0, CONNTRACK.replace("8000", "8080").replace("8001", "8081"), "")
    assert program.main(["down"]) == ExitCode.INCONCLUSIVE
    assert "1 connections" in capsys.readouterr().err
    assert program.main(["down", "--force"]) == ExitCode.DONE
    (installed / "etc/appliance/appliance.toml").unlink()
    assert program.main(["up"]) == ExitCode.REFUSED
    with pytest.raises(SystemExit) as caught:
        program.main([])
    assert caught.value.code == ExitCode.USAGE
