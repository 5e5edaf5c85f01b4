"""The playbooks against a bare server (the namespace box, at native speed): from nothing to nothing, in order.

Each test goes on where the one before it stopped. The same way in the machine with its own kernel, with kills, limits
and a reboot on the way, is test_vm_install.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.ansible import hosts
from tests.ansible.conftest import build_bundle
from tests.ansible.hosts import Controller, Play
from tests.host.box import Box, why_no_box
from tests.host.plugin import HOST_SECONDS, require, root_for
from tests.tiny import make_tiny_model

LONG = os.environ.get("APPLIANCE_FULL") == "1"
pytestmark = [
    pytest.mark.box,
    pytest.mark.slow,
    pytest.mark.timeout(HOST_SECONDS),
    pytest.mark.xdist_group("box"),
    pytest.mark.skipif(not LONG, reason="ten minutes; with APPLIANCE_FULL=1"),
]
KEY = "sk-a-key-that-never-reaches-a-host"
OTHER_KEY = hashlib.sha256(b"sk-known-by-its-hash-only").hexdigest()
ASK = """
import json, sys, urllib.error, urllib.request
path, key, model = sys.argv[1:4]
body = json.dumps({"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0}).encode() if model else None
headers = {"content-type": "application/json"} | ({"authorization": "Bearer " + key} if key else {})
try:
    answer = urllib.request.urlopen(urllib.request.Request("http://127.0.0.1:8000" + path, body, headers), timeout=60)
    print(answer.status, answer.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
"""


@dataclass
class Server:
    """The box, how to reach it, and what it looked like before anything was installed."""

    box: Box
    controller: Controller
    bundles: dict[str, Path]
    before: dict[str, str] = field(default_factory=dict)
    packages_before: str = ""

    def listing(self) -> dict[str, str]:
        shown = self.box.run(["find", "/", "-xdev", "-printf", hosts.LISTING], timeout=300)
        return hosts.listing(shown.stdout)

    def packages(self) -> str:
        return self.box.run(["dpkg-query", "-W", "-f", "${Package} ${db:Status-Abbrev}\n"]).stdout

    def ask(self, path: str, key: str = "", model: str = "") -> tuple[int, str]:
        status, _, text = self.box.run(["python3", "-c", ASK, path, key, model]).stdout.partition(" ")
        return int(status), text

    def status(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.box.run(["appliance", "status", "--json"], check=False).stdout)
        return value

    def pid(self, unit: str) -> str:
        return self.box.run(["systemctl", "show", "-P", "MainPID", unit]).stdout.strip()

    def active(self) -> list[str]:
        shown = self.box.run(["systemctl", "list-units", "--plain", "--no-legend", "appliance*"], check=False).stdout
        return sorted(line.split()[0] for line in shown.splitlines())


@pytest.fixture(scope="module")
def server(ansible_bin: Path, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    require(why_no_box())
    directory = tmp_path_factory.mktemp("controller")
    new = build_bundle(tmp_path_factory.mktemp("new") / "dist", "--version", "9.0.0+test")
    model = make_tiny_model(directory / "tiny")
    with Box(root_for(hosts.SERVER), network=False, hostname="server") as box:
        key = hosts.key_pair(directory)
        reach = hosts.ssh_variables(key, hosts.let_in(box, key))
        variables = {
            "appliance_bundle": str(bundle),
            "appliance_config": {"gpus": {"backend": "cpu", "cpu_slots": 2}, "engine": {"drain_timeout": 5}},
            "appliance_model": {"name": "tiny", "src": str(model)},
            "appliance_release": {"name": "v1"},
            "appliance_ready_timeout": 120,
            "appliance_require_controllers": [],  # a box on a development machine has none
        }
        path = hosts.inventory(directory / "inventory.json", {"server": reach})
        yield Server(box, Controller(ansible_bin, directory, path, variables), {"old": bundle, "new": new})


def good(play: Play) -> Play:
    assert play.status == 0 and play.failed == 0, play.output[-6000:]
    return play


def refused(play: Play, *texts: str) -> None:
    """The play failed, says why and what to do, and changed nothing."""
    assert play.status != 0 and play.changed == 0, play.output[-6000:]
    shown = " ".join(play.output.split())
    for text in texts:
        assert text in shown, play.output[-6000:]


def test_preflight_names_the_fix_and_changes_nothing(server: Server) -> None:
    server.before, server.packages_before = server.listing(), server.packages()
    play = server.controller.play
    refused(play("install", appliance_config={}), "No NVIDIA GPU is on the PCI bus", "gpus: {backend: cpu}")
    refused(play("install", appliance_min_free_gb=900000), "GB free, 900000 GB are needed", "mount a larger disk")
    refused(play("install", appliance_require_controllers=["cpu", "nosuch"]), "Without", "would be without effect")
    refused(play("install", appliance_api_keys=[{"label": "x", "key": "short"}]), "censored")
    refused(play("install", appliance_ready_timeout=1), "Timeouts are positive seconds")
    refused(play("install", appliance_release={"name": "v1", "golden": "maybe"}), "must be one of: auto, skip")
    for gateway in ({"host": "0.0.0.0"}, {"canary_host": "::"}, {"admin_host": "0.0.0.0"}, {"auth": "keys"}):
        open_to_all = {"gpus": {"backend": "cpu"}, "gateway": gateway}
        refused(
            play("install", appliance_config=open_to_all, appliance_api_keys=[]), "no API key", "appliance_api_keys"
        )
    refused(play("upgrade"), "Nothing is installed here")
    refused(play("verify"), "Nothing is installed here")
    with server.box.popen(["python3", "-m", "http.server", "8000", "--bind", "127.0.0.1"]) as other:
        time.sleep(1)
        refused(play("install"), "Port 8000 is taken by", "choose gateway.port")
        other.kill()
    assert not hosts.boiled_down(server.before, server.listing())


def test_a_damaged_bundle_is_refused(server: Server, tmp_path: Path) -> None:
    damaged = tmp_path / server.bundles["old"].name
    data = bytearray(server.bundles["old"].read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    play = server.controller.play("install", appliance_bundle=str(damaged))
    assert play.status != 0 and "SHA-256" in play.output, play.output[-3000:]
    assert not hosts.boiled_down(server.before, server.listing()), "what it had begun is gone"
    damaged.with_name(damaged.name + ".sha256").write_text(f"{'0' * 64}  {damaged.name}\n")
    refused(server.controller.play("install", appliance_bundle=str(damaged)), "is not what", "copy it again")


def test_check_mode_on_a_bare_host_says_all_and_changes_nothing(server: Server) -> None:
    before = server.listing()
    play = good(server.controller.play("install", "--check"))
    assert play.tasks() == [
        "Install the bundle", "Write appliance.toml", "Bring the model", "Put the release into service",
    ]  # fmt: skip
    assert "+write /usr/lib/systemd/system/appliance-gpu@.service" in play.output
    assert '+backend = "cpu"' in play.output
    assert not hosts.boiled_down(before, server.listing())


def test_install_brings_an_endpoint_that_answers(server: Server) -> None:
    good(server.controller.play("install"))
    status, text = server.ask("/v1/completions", model="tiny")
    assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 4
    assert server.status()["ok"], server.status()["problems"]
    for unit in ("appliance.target", "appliance-gateway@stable", "appliance-gpu@0", "appliance-gpu@1"):
        assert server.box.run(["systemctl", "is-enabled", unit]).stdout.strip() == "enabled"
    assert server.box.run(["stat", "-c", "%U %a", "/etc/appliance/appliance.toml"]).stdout.split() == ["root", "644"]


def test_the_second_run_changes_nothing(server: Server) -> None:
    before, pids = server.listing(), [server.pid(f"appliance-gpu@{gpu}") for gpu in (0, 1)]
    assert good(server.controller.play("install")).changed == 0
    assert good(server.controller.play("install", "--check")).changed == 0
    assert not hosts.boiled_down(before, server.listing())
    assert [server.pid(f"appliance-gpu@{gpu}") for gpu in (0, 1)] == pids


DROP_IN = "/etc/systemd/system/appliance-gateway@.service.d/mine.conf"


def test_a_setting_of_the_gateway_restarts_gateways_and_no_engine(server: Server) -> None:
    server.box.write(DROP_IN, "[Service]\nNice=3\n")
    config = server.controller.variables["appliance_config"] | {"gateway": {"max_in_flight": 77}}
    launchers, gateway = [server.pid(f"appliance-gpu@{gpu}") for gpu in (0, 1)], server.pid("appliance-gateway@stable")
    play = good(server.controller.play("install", appliance_config=config))
    # The controller reads the gateways' addresses; the watchdog is let alone, as the engines are.
    assert play.tasks() == ["Write appliance.toml", "Restart the gateways", "Restart the canary"]
    assert [server.pid(f"appliance-gpu@{gpu}") for gpu in (0, 1)] == launchers
    assert server.pid("appliance-gateway@stable") != gateway
    assert server.box.read(DROP_IN) == "[Service]\nNice=3\n"
    server.controller.variables["appliance_config"] = config


def test_a_setting_of_the_engine_restarts_the_launchers(server: Server) -> None:
    config = server.controller.variables["appliance_config"] | {"engine": {"drain_timeout": 4}}
    for _ in range(6):  # systemd refuses the sixth; the playbook must not be refused as well
        done = server.box.run(["systemctl", "restart", "appliance-gpu@0"], check=False)
    assert done.returncode != 0
    gateway = server.pid("appliance-gateway@stable")
    play = good(server.controller.play("install", appliance_config=config))
    assert play.tasks() == [
        "Write appliance.toml", "Stop the watchdog", "Restart the launchers", "Start the watchdog",
    ]  # fmt: skip
    assert server.pid("appliance-gateway@stable") == gateway
    server.controller.variables["appliance_config"] = config


def test_a_configuration_that_is_wrong_never_gets_into_place(server: Server) -> None:
    before = server.box.read("/etc/appliance/appliance.toml")
    config = {"gpus": {"backend": "cpu"}, "gateway": {"prot": 8000}}
    play = server.controller.play("install", appliance_config=config)
    assert play.status != 0 and "gateway" in play.output and "prot" in play.output, play.output[-3000:]
    assert server.box.read("/etc/appliance/appliance.toml") == before
    assert server.ask("/v1/completions", model="tiny")[0] == 200


def test_keys_reach_the_host_as_hashes_only(server: Server) -> None:
    keys = [{"label": "alice", "key": KEY}, {"label": "bob", "sha256": OTHER_KEY}]
    server.controller.variables["appliance_api_keys"] = keys
    gateway = server.pid("appliance-gateway@stable")
    play = good(server.controller.play("install", "-vvv"))
    assert play.tasks() == ["Write the hashes of the API keys", "Reload the gateways"]
    assert KEY not in play.output, "no_log"
    assert server.box.run(["grep", "-rqF", KEY, "/etc", "/var", "/usr/lib/appliance", "/run"], check=False).returncode
    kept = "/etc/appliance/credentials/api-keys"
    assert server.box.run(["stat", "-c", "%U %a", kept]).stdout.split() == ["root", "400"]
    assert hashlib.sha256(KEY.encode()).hexdigest() in server.box.read(kept) and OTHER_KEY in server.box.read(kept)
    assert server.pid("appliance-gateway@stable") == gateway, "a reload"
    assert server.ask("/v1/completions", model="tiny")[0] == 401
    assert server.ask("/v1/completions", KEY, "tiny")[0] == 200
    assert server.ask("/v1/completions", "sk-known-by-its-hash-only", "tiny")[0] == 200
    assert good(server.controller.play("install")).changed == 0


def test_drain_and_undrain(server: Server) -> None:
    assert good(server.controller.play("drain", appliance_drain_reason="fan")).changed == 1
    assert server.ask("/readyz")[0] == 503 and server.status()["host"]["drain"]["reason"] == "fan"
    assert server.ask("/v1/completions", KEY, "tiny")[0] == 200, "what still comes is served"
    assert good(server.controller.play("drain")).changed == 0
    refused(server.controller.play("verify"), "Not everything serves: the host is drained: maintenance")  # at once
    play = good(server.controller.play("install"))
    assert play.changed == 0 and "Left as it is: the host is drained: maintenance" in play.output
    assert good(server.controller.play("drain", undrain=True)).changed == 1
    assert server.ask("/readyz")[0] == 200
    assert good(server.controller.play("verify")).changed == 0


def test_tls(server: Server, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl here to make a certificate")
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    make += ["-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key", "-out", "cert"]
    subprocess.run(make, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    config = server.controller.variables["appliance_config"]
    config = config | {"gateway": config["gateway"] | {"tls": True}}
    files: dict[str, Any] = {"appliance_tls_cert": str(tmp_path / "cert"), "appliance_tls_key": str(tmp_path / "key")}
    play = good(server.controller.play("install", appliance_config=config, **files))
    assert play.tasks() == [
        "Write appliance.toml", "Write certificate and key", "Restart the gateways", "Restart the canary",
    ]  # fmt: skip
    assert server.box.run(["stat", "-c", "%U %a", "/etc/appliance/credentials/tls-key"]).stdout.split() == [
        "root",
        "400",
    ]
    script = "import ssl; print(ssl.get_server_certificate(('127.0.0.1', 8000)), end='')"
    assert server.box.run(["python3", "-c", script]).stdout.strip() == (tmp_path / "cert").read_text().strip()
    assert (tmp_path / "key").read_text().splitlines()[1] not in play.output, "no_log"
    good(server.controller.play("install"))  # and back


def test_a_rollout_stops_at_the_first_host_that_fails_and_leads_it_back(server: Server) -> None:
    """The new version gets as far as running; its release is refused. The second host is the first by another name."""
    before = server.listing()
    alone = server.controller
    (reach,) = json.loads(alone.inventory.read_text())["appliance"]["hosts"].values()
    both = hosts.inventory(alone.directory / "both.json", {"server": reach, "server-2": reach})
    config = server.controller.variables["appliance_config"] | {"gateway": {"max_in_flight": 55}}
    play = replace(alone, inventory=both).play(
        "upgrade",
        appliance_bundle=str(server.bundles["new"]),
        appliance_release={"name": "bad", "options": {"max_model_len": 999_999}},
        appliance_config=config,
    )
    assert play.status != 0 and play.rescued == 1, play.output[-6000:]
    assert "server-2" not in play.output
    shown = " ".join(play.output.split())
    assert "The upgrade failed at" in shown and "max_model_len is 999999" in shown and "as before" in shown
    state = server.status()
    assert state["ok"] and state["slots"]["stable"] == "v1" and state["host"]["drain"] is None
    assert state["version"] == _version(server.bundles["old"])
    assert "max_in_flight = 77" in server.box.read("/etc/appliance/appliance.toml")
    assert server.ask("/v1/completions", KEY, "tiny")[0] == 200
    changed = [
        line for line in hosts.boiled_down(before, server.listing()) if "/usr/lib/appliance/9.0.0+test" not in line
    ]
    assert [line.rpartition("/")[2].split(".toml")[0] for line in changed] == ["appliance"], changed  # the backup
    assert good(server.controller.play("install")).changed == 0, "nothing runs the version that was left"


def test_upgrade(server: Server) -> None:
    server.controller.variables["appliance_bundle"] = str(server.bundles["new"])
    server.controller.variables["appliance_release"] = {"name": "v2"}
    server.box.run(["appliance", "drain", "0", "1", "--reason", "fan"])
    refused(server.controller.play("upgrade"), "Every GPU of this host is held (fan)", "appliance undrain GPU")
    server.box.run(["appliance", "undrain", "1"])
    before = server.listing()
    assert good(server.controller.play("upgrade", "--check")).changed > 0
    assert not hosts.boiled_down(before, server.listing())
    shown = " ".join(good(server.controller.play("upgrade", appliance_release={"name": "v1"})).output.split())
    assert "v1 was made with engine" in shown and "Left as it is: gpu 0 is held by operator: fan" in shown
    server.box.run(["appliance", "undrain", "0"])
    good(server.controller.play("upgrade"))
    state = server.status()
    assert state["ok"] and state["slots"]["stable"] == "v2" and state["version"] == "9.0.0+test"
    assert {engine["engine_version"] for gpu in state["gpus"] for engine in gpu["engines"]} == {"9.0.0+test"}
    assert server.ask("/v1/completions", KEY, "tiny")[0] == 200 and server.ask("/readyz")[0] == 200
    assert server.box.read(DROP_IN) == "[Service]\nNice=3\n"
    assert server.box.exists(f"/usr/lib/appliance/{_version(server.bundles['old'])}"), "v1 needs it"
    assert good(server.controller.play("install")).changed == 0


def test_rollback_by_hand_is_an_upgrade_to_the_old_names(server: Server) -> None:
    """`appliance release use v1` is enough for the release; its engine runs the code that it was made with. The code
    goes back with the old bundle."""
    server.box.run(["appliance", "release", "use", "v1"], timeout=300)
    state = server.status()
    assert state["slots"]["stable"] == "v1" and state["version"] == "9.0.0+test"
    assert {engine["engine_version"] for gpu in state["gpus"] for engine in gpu["engines"]} == {
        _version(server.bundles["old"])
    }
    assert server.ask("/v1/completions", KEY, "tiny")[0] == 200
    old = {"appliance_bundle": str(server.bundles["old"]), "appliance_release": {"name": "v1"}}
    good(server.controller.play("upgrade", **old))
    state = server.status()
    assert state["ok"] and state["slots"]["stable"] == "v1" and state["version"] == _version(server.bundles["old"])
    assert server.ask("/v1/completions", KEY, "tiny")[0] == 200 and server.ask("/readyz")[0] == 200
    assert good(server.controller.play("install", **old)).changed == 0


def test_uninstall_leaves_models_and_configuration(server: Server) -> None:
    play = good(server.controller.play("uninstall", "--check"))
    assert play.changed > 0 and server.status()["ok"]
    good(server.controller.play("uninstall"))
    assert server.active() == []
    left = hosts.boiled_down(server.before, server.listing())
    kept = ("/etc/appliance", "/srv/appliance", DROP_IN.rpartition("/")[0])
    assert not [line for line in left if not line.startswith(tuple(f"+ {path}" for path in kept))], left
    assert server.packages() == server.packages_before
    assert server.box.exists("/srv/appliance/models/tiny") and server.box.exists("/etc/appliance/appliance.toml")
    assert server.box.run(["getent", "passwd", "appliance"], check=False).returncode != 0
    again = good(server.controller.play("uninstall"))
    assert again.changed == 0, again.output[-3000:]


def test_install_again_finds_models_and_configuration(server: Server) -> None:
    play = good(server.controller.play("install"))
    assert "Bring the model" not in play.tasks() and "Write appliance.toml" not in play.tasks()
    assert server.ask("/v1/completions", KEY, "tiny")[0] == 200


def test_purge_leaves_nothing(server: Server) -> None:
    good(server.controller.play("uninstall", "-e", "appliance_purge=true"))  # as documented: -e gives text
    server.box.run(["rm", "-r", DROP_IN.rpartition("/")[0]])
    assert not hosts.boiled_down(server.before, server.listing())
    assert server.packages() == server.packages_before
    assert not server.box.exists("/run/appliance")


def _version(bundle: Path) -> str:
    return bundle.name.split("-")[1]
