"""The two processes together: what a client and an operator see when one of them dies, drains or cannot start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from engine.spawn import python_env, python_module
from tests.serving import MODEL, Server
from tests.tiny import make_tiny_model

POISON = 7  # a token whose embedding is NaN

pytestmark = pytest.mark.xdist_group("processes")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / MODEL, poison_token=POISON)


@pytest.fixture(params=["1", "2"], ids=["one-plan", "two-plans"])
async def server(request: pytest.FixtureRequest, model_dir: Path) -> AsyncIterator[Server]:
    """As it is on the CPU, and with step n+1 launched before step n is collected, as on a GPU."""
    started = await Server.start(model_dir, "--kv-tokens", "16384", "--plans-in-flight", request.param)
    try:
        yield started
    finally:
        await started.stop()


async def complete(session: aiohttp.ClientSession, server: Server, **fields: Any) -> tuple[int, dict[str, Any]]:
    ban = {"logit_bias": {str(POISON): -100}}  # the model must not choose the poisoned token itself
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 8, "temperature": 0, **ban, **fields}
    async with session.post(server.url + "/v1/completions", json=body) as response:
        return response.status, await response.json()


def core_of(server: Server) -> psutil.Process:
    (core,) = [p for p in psutil.Process(server.process.pid).children() if "engine.core" in " ".join(p.cmdline())]
    return core


async def wait_for(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


async def test_core_killed_in_mid_stream_is_an_honest_error_and_a_failed_process(server: Server) -> None:
    """kill -9 of engine-core: the stream ends with an error event, no silent end, no [DONE]; exit status not 0."""
    body = {"model": MODEL, "prompt": "abc", "max_tokens": 1500, "stream": True, "ignore_eos": True, "temperature": 1,
            "logit_bias": {str(POISON): -100}}  # fmt: skip
    text = b""
    async with aiohttp.ClientSession() as session:
        async with session.post(server.url + "/v1/completions", json=body) as response:
            assert response.status == 200
            async for chunk in response.content.iter_any():
                if not text:
                    core_of(server).kill()
                text += chunk
    last = [line for line in text.decode().splitlines() if line.startswith("data: ")][-1]
    assert "[DONE]" not in text.decode()
    assert json.loads(last[6:])["error"]["type"]
    assert await asyncio.wait_for(server.process.wait(), 15) != 0


async def test_api_killed_takes_core_with_it(server: Server) -> None:
    """kill -9 of engine-api must not leave an engine that holds the GPU."""
    core = core_of(server)
    server.process.send_signal(signal.SIGKILL)
    await server.process.wait()
    await wait_for(lambda: not core.is_running() or core.status() == psutil.STATUS_ZOMBIE)


async def test_sigterm_finishes_what_is_in_flight(server: Server) -> None:
    """SIGTERM during a request: it is answered in full, new ones are refused, the exit status is 0."""
    async with aiohttp.ClientSession() as session:
        slow = asyncio.ensure_future(
            complete(session, server, max_tokens=600, ignore_eos=True, temperature=1.0, seed=1)
        )
        await asyncio.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        status, answer = await slow
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 600
    assert await asyncio.wait_for(server.process.wait(), 30) == 0


async def test_one_poisoned_request_fails_alone(server: Server) -> None:
    """Token 7's embedding is NaN: that request gets a 500 that says where; its neighbours' bits do not change."""
    async with aiohttp.ClientSession() as session:
        alone = await complete(session, server, logprobs=2, max_tokens=60, ignore_eos=True)
        neighbour, poisoned, other = await asyncio.gather(
            complete(session, server, logprobs=2, max_tokens=60, ignore_eos=True),
            complete(session, server, prompt=[1, 2, POISON, 3]),
            complete(session, server, prompt="xyz", max_tokens=40, ignore_eos=True),
        )
        assert poisoned[0] == 500
        assert "nan" in poisoned[1]["error"]["message"].lower()
        where = poisoned[1]["error"]["where"]
        assert where["position"] == 2  # that is where the poison sits
        on_cpu = os.environ.get("APPLIANCE_TEST_BACKEND", "cpu") == "cpu"
        assert where["op"] == ("embed" if on_cpu else "rope")  # on a GPU: the first op that looks
        assert other[0] == 200
        assert neighbour[0] == alone[0] == 200
        assert neighbour[1]["choices"] == alone[1]["choices"]
        # Pages of the poisoned prompt must not be found by others through the prefix cache.
        again = await complete(session, server, prompt=[1, 2] * 80 + [3], max_tokens=4)
        assert again[0] == 200
        assert await server.metric(session, "appliance_requests_running") == 0
        async with session.get(server.url + "/health") as response:
            told = (await response.json())["errors"]
        assert told["total"] == 1 and told["recent"][0]["kind"] == "nonfinite"
        assert told["recent"][0]["where"]["op"] == where["op"] and told["recent"][0]["where"]["position"] == 2


async def test_same_request_same_bits_whatever_else_runs(server: Server) -> None:
    """Text and logprobs of a seeded request, alone and among 24 others of mixed lengths, streamed prompts and all."""
    probe = {"prompt": "the quick brown fox " * 12, "max_tokens": 40, "temperature": 0.8, "seed": 11, "logprobs": 3}
    async with aiohttp.ClientSession() as session:
        expected = (await complete(session, server, **probe))[1]["choices"]
        noise = [
            complete(session, server, prompt="z" * (i * 37 % 700 + 1), max_tokens=30, temperature=1.0, ignore_eos=True)
            for i in range(24)
        ]
        answers = await asyncio.gather(*noise, *(complete(session, server, **probe) for _ in range(4)))
        for status, answer in answers[-4:]:
            assert status == 200
            assert answer["choices"] == expected


async def test_disconnected_clients_free_their_pages(server: Server) -> None:
    """A client that hangs up, streaming or not, frees its pages within two steps: here, at once when others run."""
    async with aiohttp.ClientSession() as session:
        free = await server.metric(session, "appliance_kv_pages_free")
        for stream in (False, True):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(
                    complete(session, server, max_tokens=1900, ignore_eos=True, temperature=1.0, stream=stream), 0.3
                )
        deadline = time.monotonic() + 10
        while await server.metric(session, "appliance_kv_pages_free") != free:
            assert time.monotonic() < deadline, "pages of a client that left were not freed"
            await asyncio.sleep(0.05)
        assert await server.metric(session, "appliance_requests_running") == 0


async def test_echo_scores_the_prompt_and_generates_nothing(server: Server) -> None:
    """echo + max_tokens 0 + logprobs (vllm#6521 crashed): one logprob a prompt token, the first null, none too many;
    the same bits as when each of those tokens is generated after its prefix (forced by logit_bias)."""
    prompt = [1, 2, 3, 200, 5, 99]
    async with aiohttp.ClientSession() as session:
        status, scored = await complete(session, server, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
        assert status == 200
        got = scored["choices"][0]["logprobs"]["token_logprobs"]
        forced = [
            await complete(
                session, server, prompt=prompt[:i], max_tokens=1, logprobs=1, logit_bias={str(prompt[i]): 100}
            )
            for i in range(1, len(prompt))
        ]
        expected = [answer["choices"][0]["logprobs"]["token_logprobs"][0] for _, answer in forced]
        assert got == [None, *expected]
        assert scored["usage"]["completion_tokens"] == 0
        assert scored["choices"][0]["finish_reason"] == "length"


BAD_GOLDEN = [
    {}, {"args": {}}, {"args": {"prompt_ids": None}}, {"args": {"prompt_ids": "abc"}}, {"args": {"prompt_ids": []}},
    {"args": {"prompt_ids": [1, -1]}}, {"args": {"prompt_ids": [1, 999_999]}}, {"args": {"prompt_ids": [1.5]}},
    {"args": {"prompt_ids": ["7"]}}, {"args": {"prompt_ids": [1e30]}}, {"args": {"prompt_ids": [2**70]}},
    {"args": {"prompt_ids": [1], "x": 1}}, {"args": {"prompt_ids": [1] * 3000}},
]  # fmt: skip


async def test_operators_questions_answer_or_refuse_and_never_kill(model_dir: Path, tmp_path: Path) -> None:
    """Malformed arguments of /admin are 400 and the engine lives; good ones give the same hash again and again."""
    socket_path = tmp_path / "admin.sock"
    async with await Server.start(model_dir, "--kv-tokens", "16384", "--host", "127.0.0.1", "--uds", str(socket_path)):
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(socket_path))) as session:

            async def ask(op: str, body: Any) -> tuple[int, Any]:
                async with session.post(f"http://engine/admin/{op}", json=body) as response:
                    return response.status, await response.json()

            for body in BAD_GOLDEN:
                status, answer = await ask("golden", body)
                assert status == 400, (body, answer)
                assert answer["error"]["param"]
            assert (await ask("checksum", {"args": {"x": 1}}))[0] == 400
            hashes = {
                (await ask("golden", {"args": {"prompt_ids": [1, 2, 3] * 100}}))[1]["result"]["sha256"] for _ in "ab"
            }
            assert len(hashes) == 1
            status, answer = await ask("checksum", {})
            assert status == 200 and answer["result"]["expected"] == answer["result"]["actual"]
            status, poisoned = await ask("golden", {"args": {"prompt_ids": [1, POISON, 2]}})
            assert status == 200 and poisoned["result"]["finite"] is False  # another hash, not a dead engine


async def test_a_long_question_of_an_operator_delays_nobody(model_dir: Path, tmp_path: Path) -> None:
    """Golden runs a chunk at a time between steps: a request that comes after it is answered before it, and when the
    operator leaves, its pages are free again."""
    path = tmp_path / "admin.sock"
    async with await Server.start(
        model_dir, "--kv-tokens", "16384", "--host", "127.0.0.1", "--uds", str(path)
    ) as server:
        connector = aiohttp.UnixConnector(str(path))
        async with aiohttp.ClientSession(connector=connector) as admin, aiohttp.ClientSession() as session:
            order: list[str] = []

            async def golden() -> None:
                body = {"args": {"prompt_ids": [1, 2, 3, 4] * 500}}
                async with admin.post("http://engine/admin/golden", json=body) as response:
                    assert response.status == 200
                order.append("golden")

            asked = asyncio.create_task(golden())
            await asyncio.sleep(0.002)
            assert (await complete(session, server, max_tokens=2))[0] == 200
            order.append("request")
            await asked
            assert order == ["request", "golden"]
            free = await server.metric(session, "appliance_kv_pages_total")
            leaving = asyncio.create_task(golden())
            await asyncio.sleep(0.005)
            leaving.cancel()
            deadline = time.monotonic() + 10
            await asyncio.sleep(1.1)  # a heartbeat later
            while await server.metric(session, "appliance_kv_pages_free") != free:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.1)


async def test_a_pool_smaller_than_the_context_is_the_context(model_dir: Path) -> None:
    """One page of KV: short requests are served, longer ones are the client's fault (413), never a 500."""
    async with await Server.start(model_dir, "--kv-tokens", "1") as server, aiohttp.ClientSession() as session:
        ban = {"logit_bias": {str(POISON): -100}}  # 126 drawn tokens would else meet the poisoned one now and then
        async with session.post(server.url + "/infer", json={"input": "hi", **ban}) as response:
            assert response.status in (200, 400)
        assert (await complete(session, server, max_tokens=100))[0] == 200
        assert (await complete(session, server, prompt="x" * 120))[0] == 200
        assert (await complete(session, server, prompt="x" * 128, max_tokens=1))[0] == 413
        assert (await complete(session, server, prompt="x" * 100, max_tokens=100))[0] == 413
        async with session.get(server.url + "/v1/models") as response:
            assert "128" in await response.text()


async def test_echoed_logprobs_of_several_choices(server: Server) -> None:
    """n choices share one scored prompt: each carries the same prompt logprobs, then its own."""
    async with aiohttp.ClientSession() as session:
        body = {"prompt": [1, 2, 3] * 60, "echo": True, "logprobs": 0, "max_tokens": 3, "temperature": 1.0}
        status, several = await complete(session, server, **body, n=3)
        one = (await complete(session, server, **{**body, "max_tokens": 0}))[1]["choices"][0]["logprobs"]
        assert status == 200
        for choice in several["choices"]:
            scores = choice["logprobs"]["token_logprobs"]
            assert len(scores) > 180 or choice["finish_reason"] == "stop"
            assert scores[:180] == one["token_logprobs"]


def start_and_fail(*arguments: str, status: int = 4) -> str:
    result = subprocess.run(
        [*python_module("engine"), *arguments], capture_output=True, text=True, timeout=60, env=python_env()
    )
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


def test_damaged_checkpoint_is_named_at_start(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / MODEL)
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in start_and_fail("--model-dir", str(directory), "--port", "0")


def test_context_that_does_not_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / MODEL, max_position=1 << 17)
    message = start_and_fail("--model-dir", str(directory), "--port", "0", "--memory-fraction", "0.0001")
    assert "MiB" in message and "--max-model-len" in message


@pytest.mark.parametrize(
    "options",
    [["--prefill-chunk", "100"], ["--prefill-chunk", "512"], ["--max-batch-seqs", "512"], ["--max-model-len", "1"],
     ["--max-model-len", "2049"], ["--threads", "2000"], ["--kv-tokens", "200000000000"]],
    ids=" ".join,
)  # fmt: skip
def test_sizes_that_do_not_go_together_are_refused_with_a_hint(model_dir: Path, options: list[str]) -> None:
    message = start_and_fail("--model-dir", str(model_dir), "--port", "0", *options)
    assert '"hint":"' in message


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """A tokenizer whose special tokens have no row in the embedding: every chat request would fail."""
    directory = make_tiny_model(tmp_path / MODEL, vocab_size=257, eos_token_id=256, bos_token_id=256)
    (directory / "generation_config.json").unlink()
    message = start_and_fail("--model-dir", str(directory), "--port", "0")
    assert "<|im_start|>" in message and "257 rows" in message


def test_a_model_of_nothing_but_nan_never_becomes_ready(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / MODEL, poison_token=0)
    message = start_and_fail("--model-dir", str(directory), "--port", "0")
    assert "warm-up" in message and "embed" in message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("after", [0.0, 0.3, 0.9])
def test_a_signal_at_any_moment_of_the_start_ends_cleanly(
    model_dir: Path, number: signal.Signals, after: float
) -> None:
    """To the whole process group, as a terminal and systemd send it: status 0, no traceback. `after` counts from our
    first line; what a signal does to the interpreter before that is Python's."""
    process = subprocess.Popen(
        [*python_module("engine"), "--model-dir", str(model_dir), "--port", "0"],
        env=python_env(), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not catches(process.pid, signal.SIGTERM):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(after)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in errors, errors


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for this signal (SigCgt of proc(5); SIGTERM's comes first)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def test_a_stray_module_in_the_current_directory_is_not_run(model_dir: Path, tmp_path: Path) -> None:
    """`python -m` would import uvloop.py of the directory one happens to stand in."""
    (tmp_path / "uvloop.py").write_text("raise SystemExit('stray code ran')")
    (tmp_path / "engine.py").write_text("raise SystemExit('stray code ran')")
    result = subprocess.run(
        [*python_module("engine"), "--model-dir", str(model_dir), "--port", "0", "--host", "0.0.0.0"],
        cwd=tmp_path, env=python_env(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 4 and "stray" not in result.stderr


async def test_hangup_of_the_whole_group_reloads_keys_and_ends_nobody(server: Server) -> None:
    """A closed terminal or `kill -HUP -PGID` reaches engine-core too."""
    core = core_of(server)
    for process in (core, psutil.Process(server.process.pid)):
        process.send_signal(signal.SIGHUP)
    async with aiohttp.ClientSession() as session:
        assert (await complete(session, server))[0] == 200
    assert core.is_running()


def test_closed_standard_files_are_no_reason_to_die_silently(model_dir: Path) -> None:
    """`2>&-` and some supervisors: without care the next descriptor becomes standard error."""
    command = [*python_module("engine"), "--model-dir", str(model_dir), "--port", "0", "--host", "0.0.0.0"]
    closed = ["/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert subprocess.run([*closed, *command], env=python_env(), timeout=60).returncode == 4


async def test_a_broken_chat_template_is_told_at_the_start(tmp_path: Path) -> None:
    """It is the operator's fault and must not wait for a client to find it; completions are served all the same."""
    directory = make_tiny_model(tmp_path / MODEL)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{% for m in messages %"}))
    async with await Server.start(directory, "--kv-tokens", "2048") as server, aiohttp.ClientSession() as session:
        assert any(json.loads(line)["event"] == "no_chat_template" for line in server.log_lines())
        assert (await complete(session, server))[0] == 200


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_ended_leaves_no_server_behind(model_dir: Path, number: signal.Signals) -> None:
    demo = subprocess.Popen(
        [*python_module("appliance"), "demo", "--model", str(model_dir), "--tokens", "2000"],
        env=python_env(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(family := psutil.Process(demo.pid).children(recursive=True)) < 2:  # engine-api and engine-core
        assert demo.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    demo.send_signal(number)
    assert demo.wait(60) != 0
    _, alive = psutil.wait_procs(family, 10)
    assert not alive


def test_port_in_use_and_public_bind_without_keys_are_refused(tmp_path: Path) -> None:
    import socket

    directory = make_tiny_model(tmp_path / MODEL)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert port in start_and_fail("--model-dir", str(directory), "--port", port, status=5)
    assert "key" in start_and_fail("--model-dir", str(directory), "--port", "0", "--host", "0.0.0.0").lower()
