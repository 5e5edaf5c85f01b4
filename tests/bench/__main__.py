"""`make bench`: our figures beside the peers', all in one run on this machine. Prints a table and one JSON line.

The peers that are too big for the test environment (torch, transformers) run from .venv-bench.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from appliance.models import ModelStore
from tests.bench import bench_gateway, bench_host, watchdog_idle

ROOT = Path(__file__).parents[2]
PEER_PYTHON = ROOT / ".venv-bench/bin/python"
THREADS = len(os.sched_getaffinity(0))


def run(*command: str | Path) -> Any:
    """The last JSON line that the benchmark printed."""
    print("+ " + " ".join(map(str, command)), file=sys.stderr, flush=True)
    result = subprocess.run([str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise SystemExit(f"bench: {command[0]} ended with {result.returncode}:\n{result.stdout}")
    return json.loads(result.stdout.strip().splitlines()[-1])


def main() -> int:
    store = ModelStore()
    store.pull("smollm2")
    model = store.path("smollm2")
    machine = {"cpu": _cpu_name(), "cpus": THREADS, "python": platform.python_version(), "commit": _commit()}
    print(f"machine: {machine['cpu']}, {THREADS} CPUs, Python {machine['python']}, commit {machine['commit']}\n")
    results: dict[str, Any] = {"machine": machine}

    results["tokenizer"] = run(sys.executable, "-m", "tests.bench.bench_tokenizer", "--json")
    _tokenizer_table(results["tokenizer"])
    results["load"] = run(sys.executable, "-m", "tests.bench.bench_load", model, "--json")
    seconds = results["load"]["seconds"]
    print("\nload (SmolLM2, page cache warm)")
    for name, value in seconds.items():
        print(f"  {name:28} {value * 1e3:8.1f} ms  {results['load']['peer_seconds'] / value:5.2f} x safetensors")

    results["decode"] = run(sys.executable, "-m", "tests.bench.bench_decode", model, "--json")
    results["transformers"] = run(
        PEER_PYTHON, "tests/bench/bench_transformers_peer.py", "--model", model, "--threads", str(THREADS)
    )
    ours, peer = results["decode"], results["transformers"]
    print("\nCPU, SmolLM2-135M fp32, batch 1 (tokens/s)   ours   transformers   ratio")
    for name in ("decode_tokens_per_second", "prefill_tokens_per_second"):
        print(f"  {name:40} {ours[name]:8.1f} {peer[name]:12.1f} {ours[name] / peer[name]:9.2f}")

    results["http"] = run(sys.executable, "-m", "tests.bench.bench_http", "--json")
    print("\nHTTP, 64 concurrent streams")
    for part in ("ours", "engine", "peer"):
        print(f"  {part:8} " + "  ".join(f"{name} {value}" for name, value in results["http"][part].items()))
    results["gateway"] = run(sys.executable, "-m", "tests.bench.bench_gateway", "--json")
    print()
    bench_gateway.show(results["gateway"])
    results["host"] = run(sys.executable, "-m", "tests.bench.bench_host", "--json")
    print()
    bench_host.show(results["host"])
    results["watchdog_idle"] = run(sys.executable, "-m", "tests.bench.watchdog_idle", "--json")
    print()
    watchdog_idle.show(results["watchdog_idle"])
    print("\n" + json.dumps(results))
    return 0


def _tokenizer_table(result: Any) -> None:
    print("tokenizer, one thread (MB/s)")
    for row in result["rows"]:
        print("  " + "  ".join(f"{key} {value}" for key, value in row.items()))


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """Of the checkout; of an archive of it (`git archive`), what git wrote into tests/bench/COMMIT."""
    if (ROOT / ".git").exists():
        result = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
        return result.stdout.strip() or "unknown"
    archived = (ROOT / "tests/bench/COMMIT").read_text().strip()
    return "unknown" if "$" in archived else archived


if __name__ == "__main__":
    sys.exit(main())
