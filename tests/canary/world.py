"""A host without systemd: launchers (tests/appliance/fake_launcher.py), gateways that only answer /state and /readyz,
and two releases v1 (stable) and v2. Below a short directory in memory; one world serves many tests, `reset` between."""

from __future__ import annotations

import json
import shutil
import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from appliance.control import ControlClient
from appliance.fleet import Fleet
from appliance.golden_record import Recorder
from appliance.gpus import read_slots
from appliance.hostconfig import load_config, parse_config
from appliance.leases import Leases
from appliance.models import ModelStore
from appliance.paths import Paths
from appliance.releases import ReleaseOptions, ReleaseStore
from appliance.slots import pointer, set_slot
from tests.appliance.fake_launcher import FakeFleet
from tests.canary.stand_ins import FileRules, Script
from tests.tiny import make_tiny_model

_CONFIG = parse_config(b'[gpus]\nbackend = "cpu"\n', where="test")
QUICK = {
    "steps": [10, 100], "step_seconds": 0.05, "interval": 0.05, "warmup_seconds": 0, "settle_seconds": 0.05,
    "cooldown": 0, "liveness_seconds": 1.0, "progress_deadline": 30.0,
}  # fmt: skip


class Gateway:
    """Answers as a gateway does that follows its pointer at once."""

    def __init__(self, paths: Paths, slot: str) -> None:
        self.slot, self.paths = slot, paths
        self.in_flight: dict[str, int] = {}  # of releases
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                value = gateway.state()
                status = 503 if self.path == "/readyz" and value["serving"] is None else 200
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Server(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

            def get_request(self) -> tuple[Any, Any]:
                return super().get_request()[0], ("gateway", 0)

        path = paths.gateway_socket(slot)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        self._server = Server(str(path), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def state(self) -> dict[str, Any]:
        release = pointer(self.paths, self.slot)
        gpus, ready = [], False
        for gpu in read_slots(self.paths.gpus):  # asked, not read: the fake's state file may lag behind
            engines = ControlClient(self.paths, gpu).call("status")["state"]["engines"]
            ready = ready or any(e["release"] == release and e["state"] == "ready" for e in engines)
            rows = [{"release": e["release"], "in_flight": self.in_flight.get(e["release"], 0)} for e in engines]
            gpus.append({"engines": rows})
        return {"slot": self.slot, "release": release, "serving": release if ready else None, "gpus": gpus}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.paths.gateway_socket(self.slot).unlink(missing_ok=True)


class World:
    def __init__(self, root: Path, gpus: int = 1, config: str = "") -> None:
        self.paths = paths = Paths.under(root)
        models, store = ModelStore(paths.models), ReleaseStore(paths)
        models.add(make_tiny_model(root / "source"), "tiny")
        store.add("v1", models, "tiny", _CONFIG, link=True)
        store.add("v2", models, "tiny", _CONFIG, link=True, options=ReleaseOptions(max_batch_seqs=3))
        self.script, self.rules, self.gpus = Script(paths), FileRules(paths), gpus
        set_slot(paths, "stable", "v1")
        self.fleet = FakeFleet(paths, gpus, config=config)
        self.fleet.__enter__()
        self._record("v1", "v2")
        self.gateways = {slot: Gateway(paths, slot) for slot in ("stable", "canary")}

    def _record(self, *releases: str) -> None:
        """Golden answers, as `appliance release add` records them."""
        store, fleet = ReleaseStore(self.paths), Fleet(self.paths, load_config(self.paths.config))
        with store.changing():
            for release in releases:
                Recorder(fleet, Leases(fleet), store.get(release), displace=True).record()
                Leases(fleet).drop_all()
        for gpu in fleet.gpus():
            fleet.call(gpu, "sync")

    def close(self) -> None:
        for gateway in self.gateways.values():
            gateway.close()
        self.fleet.__exit__(None, None, None)

    def reset(self) -> None:
        """As after an install: v1 in service, no run, no rule."""
        paths = self.paths
        for slot, release in (("stable", "v1"), ("canary", None)):
            set_slot(paths, slot, release)
        for file in (
            paths.canary_run, paths.canary_abort, paths.canary_abort_volatile, paths.canary_marker,
            paths.canary_config, paths.events,
            paths.events.with_name("events.jsonl.1"), paths.state / "leases.json", self.script.path,
            paths.run / "rules.json", *paths.state.glob("canary*.damaged-*"),
        ):  # fmt: skip
            file.unlink(missing_ok=True)
        shutil.rmtree(paths.canary_runs, ignore_errors=True)
        for gateway in self.gateways.values():
            gateway.in_flight.clear()
        for gpu in range(self.gpus):
            self.fleet.script(gpu, dies={}, hangs=[], salt={}, refuse={}, log=[])
            for release in ("v1", "v2"):
                self.fleet.ask(gpu, "stop", release=release)
            self.fleet.ask(gpu, "sync")

    def engines(self) -> list[list[str]]:
        return [sorted(self.fleet.running(gpu)) for gpu in range(self.gpus)]
