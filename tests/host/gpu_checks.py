"""What is looked at and measured once the appliance runs in the box (gpu_host.py says in which order)."""

from __future__ import annotations

import json
import mmap
import time
from typing import Any

from tests.host.gpu_record import Record
from tests.host.gpu_sandbox import probe
from tests.host.gpu_world import PYTHON, UID, Slot, World
from tests.host.roots import HostError

STABLE = {"port": 8000}
NO_CAPABILITY = "0" * 16


def bodies(world: World, streams: int, tokens: int) -> list[dict[str, Any]]:
    """Requests that differ, drawn with a seed: exactness says each has one answer, wherever it is computed."""
    return [
        {
            "model": world.model_name, "prompt": f"Request {n}: " + "tell me about compilers. " * (1 + n % 5),
            "max_tokens": tokens, "ignore_eos": True, "temperature": 0.8, "seed": n, "stream": True,
            "stream_options": {"include_usage": True},
        }
        for n in range(streams)
    ]  # fmt: skip


def same_texts(reference: dict[str, Any], result: dict[str, Any]) -> bool:
    """Every client has the text of the undisturbed run, always, and no client had an error."""
    return not result["errors"] and [set(texts) for texts in result["texts"]] == [set(t) for t in reference["texts"]]


def shown(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "texts"}


# -- answers
def completion(world: World, record: Record) -> None:
    """Through the gateway, in the shape of OpenAI's API reference (completions, chat completions, models)."""
    model = world.model_name
    text = {
        "model": model,
        "prompt": "The capital of France is",
        "max_tokens": 16,
        "temperature": 0,
        "ignore_eos": True,
    }
    chat = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16, "temperature": 0}
    answers = world.ask(STABLE, ("/v1/completions", text), ("/v1/chat/completions", chat), ("/v1/models", None))
    first, second, models = (answer["answer"] for answer in answers)
    good = [answer["status"] for answer in answers] == [200] * 3
    good = good and first["object"] == "text_completion" and second["object"] == "chat.completion"
    good = good and len(first["choices"][0]["text"]) > 0 and first["choices"][0]["finish_reason"] == "length"
    good = good and first["usage"]["completion_tokens"] == 16 and first["model"] == model
    good = good and isinstance(second["choices"][0]["message"]["content"], str)
    good = good and model in [entry["id"] for entry in models["data"]]
    record.check("completion through :8000", good, answers=answers)


def same_bits(world: World, record: Record, when: str = "") -> None:
    """The same request to each engine's own socket: text and log probabilities; and all against the golden answers."""
    body = {
        "model": world.model_name, "prompt": "Bits are bits, whichever card computes them.", "max_tokens": 64,
        "temperature": 0, "ignore_eos": True, "logprobs": 5,
    }  # fmt: skip
    choices = {}
    for slot in world.slots:
        socket = {"socket": world.engine(slot.gpu)["socket"]}
        (answer,) = world.ask(socket, ("/v1/completions", body))
        choices[slot.uuid] = answer["answer"].get("choices", answer)
    first = next(iter(choices.values()))
    same = all(choice == first for choice in choices.values()) and len(choices) == len(world.slots)
    record.check(
        f"the same bits from each GPU{when}", same, tokens=64, logprobs=5, choices=choices if not same else first
    )
    done = world.appliance("release", "check", world.release, "--json", check=False)
    record.check(
        f"golden answers of each GPU{when}", done.returncode == 0, said=done.stdout[-2000:] + done.stderr[-500:]
    )


# -- the scope
def scope(world: World, record: Record, slot: Slot) -> None:
    """The engine's processes, its cgroup's files and systemd's properties, beside what the launcher says."""
    entry, group = world.engine(slot.gpu), world.scope(slot.gpu)
    name = group.rpartition("/")[2]
    pids = world.processes(group)
    status = {pid: world.status_of(pid) for pid in pids}
    fields = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
    raw = {pid: {field: values[field] for field in fields} for pid, values in status.items()}
    good = entry["pid"] in pids and len(pids) >= 2
    for values in raw.values():
        good = good and values["Uid"].split() == values["Gid"].split() == [str(UID)] * 4 and values["Groups"] == ""
        good = good and all(value == NO_CAPABILITY for key, value in values.items() if key.startswith("Cap"))
        good = good and values["NoNewPrivs"] == "1" and values["Seccomp"] == "2"
    record.check(f"gpu{slot.gpu}: processes of the engine", good, scope=name, processes=raw)

    links = "for p in $1; do for f in /proc/$p/fd/*; do readlink $f; done; done | grep ^/dev/nvidia | sort | uniq -c"
    held = world.box.run(["sh", "-c", links, "links", " ".join(map(str, pids))], check=False).stdout
    opened = sorted({line.split()[1] for line in held.splitlines()})
    wanted = set(opened) <= set(slot.nodes) and (not slot.nodes or slot.nodes[0] in opened)
    record.check(f"gpu{slot.gpu}: nodes that the engine holds open", wanted, opened=opened, granted=slot.nodes)

    properties = ("DevicePolicy", "DeviceAllow", "MemoryMax", "MemorySwapMax", "TasksMax", "CPUWeight", "AllowedCPUs")
    lines = world.box.run(["systemctl", "show", f"--property={','.join(properties)}", "--", name]).stdout.splitlines()
    unit = dict(line.split("=", 1) for line in lines if not line.startswith("DeviceAllow="))
    allowed = [line.removeprefix("DeviceAllow=") for line in lines if line.startswith("DeviceAllow=/")]
    files = ("memory.max", "memory.swap.max", "memory.current", "memory.peak", "pids.max", "cpu.max", "cpu.weight")
    read = {file: world.box.run(["cat", f"{group}/{file}"], check=False).stdout.strip() for file in files}
    good = unit["DevicePolicy"] == "closed" and entry["unknown_limits"] == []
    good = good and sorted(allowed) == sorted(f"{node} rw" for node in slot.nodes)
    whole_pages = str(entry["memory_max"] // mmap.PAGESIZE * mmap.PAGESIZE)
    good = good and unit["MemoryMax"] == str(entry["memory_max"]) and read["memory.max"] == whole_pages
    known = bool(world.box.controllers >= {"memory", "cpu", "pids"})
    record.check(
        f"gpu{slot.gpu}: limits read back", good if known else None, kernel=read,
        systemd=unit | {"DeviceAllow": allowed},
        launcher={key: entry[key] for key in ("memory_max", "unknown_limits", "problem")},
    )  # fmt: skip


def look(world: World, slot: Slot) -> dict[str, Any]:
    """What a process in the scope of `slot` is to try."""
    others = [other for other in world.slots if other != slot]
    tries: dict[str, dict[str, str | None]] = {
        "as the launcher starts it": {},
        "asking for nothing": {"CUDA_VISIBLE_DEVICES": None},
    }
    tries |= {f"asking for GPU {other.gpu}": {"CUDA_VISIBLE_DEVICES": other.uuid} for other in others}
    cuda = tries if slot.uuid.startswith("GPU-") else {}
    return {"nodes": [*world.nodes, "/dev/null"], "cuda": cuda}


def devices(record: Record, slot: Slot, found: dict[str, Any]) -> None:
    """A small program in a scope of its own, started as the launcher starts an engine (`found`: gpu_sandbox.probe)."""
    outside, inside = found["outside"], found.get("inside", {})
    record.check(
        f"gpu{slot.gpu}: a probe in its scope", outside["returncode"] == 0 and not outside["wrong"] and bool(inside),
        **outside, status=inside.get("status"), cgroup=inside.get("cgroup"), memlock=inside.get("memlock"),
    )  # fmt: skip
    opened = inside.get("nodes", {})
    through = ("opened",) if slot.uuid.startswith("GPU-") else ("ENXIO",)  # the filter let it through to no driver
    own = all(opened.get(node) in through for node in slot.nodes) and opened.get("/dev/null") == "opened"
    denied = [node for node in opened if node not in slot.nodes and node != "/dev/null"]
    foreign = all(opened[node] == "EPERM" for node in denied) and bool(denied)
    record.check(f"gpu{slot.gpu}: opens its own nodes, EPERM for the others", own and foreign, opened=opened)
    cuda = inside.get("cuda", {})
    if not slot.uuid.startswith("GPU-"):
        return
    seen = {name: value.get("uuids") for name, value in cuda.items()}
    good = seen["as the launcher starts it"] == seen["asking for nothing"] == [slot.uuid]
    good = good and all(not uuids for name, uuids in seen.items() if name.startswith("asking for GPU"))
    good = good and all(cuda[name].get("right") is True for name in ("as the launcher starts it", "asking for nothing"))
    record.check(f"gpu{slot.gpu}: CUDA sees exactly one GPU, its own", good, cuda=cuda)


def filter_bites(world: World, slot: Slot) -> tuple[bool, dict[str, str]]:
    """root, joined to the engine's own cgroup, opens nodes: only the device filter can say no to it."""
    join = 'echo $$ > "$1/cgroup.procs" && exec 3<> "$2"'
    said = {}
    for node in world.nodes:
        done = world.box.run(["sh", "-c", join, "join", world.scope(slot.gpu), node], check=False)
        said[node] = "opened" if done.returncode == 0 else done.stderr.strip().rpartition(": ")[2]
    good = bool(said) and all((text == "opened") == (node in slot.nodes) for node, text in said.items())
    return good and all(text in ("opened", "Operation not permitted") for text in said.values()), said


# -- under load
def daemon_reload(world: World, record: Record, reference: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    before = [world.engine(slot.gpu)["pid"] for slot in world.slots]
    with world.load(requests, 4.0) as result:
        for _ in range(5):
            world.box.run(["systemctl", "daemon-reload"])
            time.sleep(0.4)
    after = [world.engine(slot.gpu)["pid"] for slot in world.slots]
    same = same_texts(reference, result)
    record.check("daemon-reload under load", same and before == after, pids=[before, after], **shown(result))
    for slot in world.slots:
        bites, said = filter_bites(world, slot)
        record.check(f"gpu{slot.gpu}: the engine's filter after daemon-reload", bites, opened=said)


def kill(world: World, record: Record, reference: dict[str, Any], requests: list[dict[str, Any]]) -> None:
    """SIGKILL for one engine while streams run on both."""
    slot = world.slots[-1]
    before = {other.gpu: world.engine(other.gpu) for other in world.slots}
    with world.load(requests) as result:
        time.sleep(0.3)
        gateway = world.box.run([PYTHON, "-P", "-c", _GATEWAY_STATE]).stdout
        world.box.run(["sh", "-c", f"kill -KILL {before[slot.gpu]['pid']}"])
        killed = time.monotonic()
    entry = world.until_admitted(slot.gpu)
    back = time.monotonic() - killed
    counted = entry["restarts"] == before[slot.gpu]["restarts"] + 1 and entry["pid"] != before[slot.gpu]["pid"]
    counted = counted and "SIGKILL" in str(entry["last_exit"])
    others = all(world.engine(other.gpu)["pid"] == before[other.gpu]["pid"] for other in world.slots[:-1])
    metrics = world.ask(STABLE, ("/metrics", None))[0]["answer"]
    lines = [line for line in metrics.splitlines() if line.startswith("appliance_") and "repla" in line]
    same = same_texts(reference, result)
    record.check(
        "SIGKILL of one engine in mid-stream", same and counted and others, last_exit=entry["last_exit"],
        restarts=entry["restarts"], seconds_until_ready_again=round(back, 2), replays=lines,
        gateway_before=json.loads(gateway), **shown(result),
    )  # fmt: skip


_GATEWAY_STATE = """
import json
from pathlib import Path
from appliance.admin_http import get_json
print(json.dumps(get_json(Path("/run/appliance/gateway/stable.sock"), "/state")))
"""


def restart(
    world: World, record: Record, reference: dict[str, Any], requests: list[dict[str, Any]], seconds: float
) -> None:
    before = world.engine(world.slots[0].gpu)["pid"]
    with world.load(requests, seconds) as result:
        began = time.monotonic()
        world.box.run(["systemctl", "restart", f"appliance-gpu@{world.slots[0].gpu}.service"], timeout=120)
        took = time.monotonic() - began
    after = world.until_admitted(world.slots[0].gpu)["pid"]
    same = same_texts(reference, result)
    record.check(
        "systemctl restart appliance-gpu@0 under load", same and before != after, restart_seconds=round(took, 2),
        load_outlasted_it=result["seconds"] > took, **shown(result),
    )  # fmt: skip


# -- limits
def memory_of_a_probe(world: World, record: Record) -> None:
    """A program that takes memory in a scope with MemoryMax=256M: where it ends, and who counts it."""
    known = "memory" in world.box.controllers
    limit = 256 if known else 64
    found = probe(world, world.slots[-1], {"hog": 4 * limit if known else limit}, memory_max=limit << 20)
    outside, reached = found["outside"], found.get("hog_mib", 0)
    good = outside["returncode"] == -9 and outside["oom_kills"] == 1 and 0.5 * limit <= reached <= limit
    record.check("MemoryMax of a scope", good if known else None, limit_mib=limit, reached_mib=reached, **outside)


def memory_of_an_engine(
    world: World, record: Record, reference: dict[str, Any], requests: list[dict[str, Any]], engine: dict[str, Any],
    limit: str,
) -> None:  # fmt: skip
    """One launcher is restarted with a memory_max that no engine starts in; the other GPU and the gateway go on."""
    if "memory" not in world.box.controllers:
        record.check("MemoryMax of an engine", None, reason="no memory controller in cgroup v2 here")
        return
    victim, healthy = world.slots[-1], world.slots[0]
    unit, before = f"appliance-gpu@{victim.gpu}.service", world.engine(healthy.gpu)["pid"]
    world.configure(engine | {"memory_max": limit}, len(world.slots))
    slice_events = f"/sys/fs/cgroup/appliance.slice/appliance-gpu{victim.gpu}.slice/memory.events"
    events = world.box.read(slice_events)
    with world.load(requests, 6.0) as result:
        world.box.run(["systemctl", "restart", "--no-block", unit])
        entry = world.until(
            lambda: "MemoryMax" in str((found := world.engine(victim.gpu)).get("last_exit")) and found, 60,
            "the engine was not killed",
        )  # fmt: skip
    world.configure(engine, len(world.slots))
    after = world.engine(healthy.gpu)["pid"]
    record.check(
        "MemoryMax of an engine", same_texts(reference, result) and before == after, limit=limit,
        last_exit=entry["last_exit"], state=entry["state"], memory_events=[events, world.box.read(slice_events)],
        **shown(result),
    )  # fmt: skip
    world.box.run(["systemctl", "restart", unit], timeout=120)
    world.until_admitted(victim.gpu)


def cpu_quota(world: World, record: Record) -> None:
    """A busy loop with CPUQuota=20%, and the same one without."""
    known = "cpu" in world.box.controllers
    with_quota = probe(world, world.slots[0], {"spin": 5}, cpu_quota=20)["spin"]
    without = probe(world, world.slots[0], {"spin": 1})["spin"]
    good = 0.18 <= with_quota["share"] <= 0.22 and without["share"] > 0.5
    record.check("CPUQuota=20% of a scope", good if known else None, with_quota=with_quota, without=without)


# -- figures
def idle_memory(world: World, record: Record, when: str) -> None:
    """PSS of launchers and gateways, all their processes."""
    units = [f"appliance-gpu@{slot.gpu}.service" for slot in world.slots]
    units += [f"appliance-gateway@{name}.service" for name in ("stable", "canary")]
    groups = {unit: world.box.show(unit, "ControlGroup")["ControlGroup"] for unit in units}
    pss = {unit: round(sum(map(world.pss_mib, world.processes(f"/sys/fs/cgroup{g}"))), 2) for unit, g in groups.items()}
    launchers = [value for unit, value in pss.items() if "gpu@" in unit]
    first = sum(pss.values()) - sum(launchers[1:])
    good = first <= 100 and all(value <= 14 for value in launchers[1:])
    record.check(f"idle PSS, {when}", good, mib=pss, one_gpu_mib=round(first, 2), further_gpu_mib=launchers[1:])


def gateway_bench(world: World, record: Record, seconds: float) -> None:
    """tests/bench/bench_gateway.py with the installed code, on this machine's cores."""
    env = {"PYTHONPATH": "/opt/tests:/opt/extra", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [
        PYTHON,
        "-P",
        "-m",
        "tests.bench.bench_gateway",
        "--json",
        "--seconds",
        str(seconds),
        "--requests",
        "1000",
    ]
    done = world.box.run(command, env=env, timeout=120)
    result = json.loads(done.stdout.splitlines()[-1])
    added, relayed = result["added"], result["relay"]["4"]["tokens_per_second"]
    good = added["added_ms_p50"] <= 1 and added["added_ms_p99"] <= 5 and relayed >= 50_000
    told = result["cores"] >= 6  # engine, client and four workers
    record.check("gateway: added latency, relayed tokens", good if told or good else None, **result)


def operator_views(world: World, record: Record) -> None:
    """What an SRE would look at, kept as it is."""
    for words in (("status",), ("list",), ("gpus", "list"), ("release", "list"), ("doctor",)):
        done = world.appliance(*words, check=False)
        record.text(f"appliance {' '.join(words)}", f"exit {done.returncode}\n{done.stdout}{done.stderr}")
    status = world.appliance("status", check=False)
    report = json.loads(world.appliance("doctor", "--json", check=False).stdout)
    record.figure("doctor", report)
    record.check("appliance status", status.returncode == 0, exit_code=status.returncode)


def stop(world: World, record: Record) -> None:
    world.appliance("stop", check=False)
    units = [f"appliance-gpu@{slot.gpu}.service" for slot in world.slots] + ["appliance-gateway@stable.service"]
    states: dict[str, str] = {}

    def all_down() -> bool:
        states.update({unit: world.box.show(unit, "ActiveState")["ActiveState"] for unit in units})
        return set(states.values()) <= {"inactive", "failed"}

    try:
        world.until(all_down, 60, "still up")
    except HostError as error:
        record.text("stop", str(error))
    scopes = world.box.run(["systemctl", "list-units", "--plain", "--no-legend", "appliance-*.scope"]).stdout
    failed = world.box.run(["systemctl", "--failed", "--plain", "--no-legend"]).stdout
    good = set(states.values()) == {"inactive"} and not scopes and not failed
    record.check("stop leaves no scope and nothing failed", good, units=states, scopes=scopes, failed=failed)
