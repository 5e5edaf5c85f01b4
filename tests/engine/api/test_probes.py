"""Probes, health, metrics, the OpenAPI document, and the small routes."""

from __future__ import annotations

import asyncio
import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.api.routes import ROUTES
from engine.messages import Fault, Loading

from .fakes import IM_END, Script


async def test_loading(endpoint):
    client = endpoint.client
    client.state, client.ready, client.stats, client.last_step_at = "loading", None, None, None
    client.loading = Loading(phase="weights", done=25, total=100)
    assert (await endpoint.get("/livez"))[0] == 200
    async with endpoint.http.get(endpoint.url + "/readyz") as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "5"
        error = (await response.json())["error"]
        assert (error["code"], error["message"]) == ("loading", "the model is loading (20 %)")
    status, health = await endpoint.get("/health")
    assert (status, health["status"]) == (503, "loading")
    assert health["loading"] == 0.2
    assert health["load"] == {"phase": "weights", "done": 25, "total": 100}
    assert health["device"] is health["weights_checksum"] is health["progress"]["last_step_age_seconds"] is None
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/infer", {"input": "x"}), ("/generate", {"prompt": "x"}),
                       ("/v1/chat/completions", {"messages": []})):  # fmt: skip
        status, answer = await endpoint.post(path, body)
        assert (status, answer["error"]["code"]) == (503, "loading")
    assert (await endpoint.get("/v1/models"))[1]["data"][0]["max_model_len"] == 512


async def test_errors_of_the_device_are_told_with_their_place(endpoint):
    where = {"op": "attention", "layer": 3, "head": 5, "position": 17}
    endpoint.client.faults = [
        Fault(number=n, kind="nonfinite", error="NaN", where=where, at=time.monotonic() - 60) for n in (41, 42)
    ]
    errors = (await endpoint.get("/health"))[1]["errors"]  # /admin/state says the same
    assert errors["total"] == 42 and [entry["number"] for entry in errors["recent"]] == [41, 42]
    assert errors["recent"][1]["where"] == where and 60 <= errors["recent"][1]["age_seconds"] < 90


async def test_loading_only_goes_up(endpoint):
    """A launcher lengthens the time a start may take as long as this number rises."""
    client = endpoint.client
    ready, client.ready, client.state = client.ready, None, "loading"
    seen = []
    for phase in ("weights", "checksum", "warm-up"):
        for done in (0, 1, 2, 3):
            client.loading = Loading(phase=phase, done=done, total=3)
            seen.append((await endpoint.get("/health"))[1]["loading"])
    assert seen == sorted(seen)
    assert len(set(seen)) == 10  # the end of a phase is the beginning of the next
    assert seen[0] == 0 and seen[-1] < 1
    client.ready, client.state = ready, "ready"
    assert (await endpoint.get("/health"))[1]["loading"] == 1.0


async def test_progress_of_the_steps(make_endpoint):
    endpoint = await make_endpoint(Script(never_answer=True))
    task = asyncio.create_task(endpoint.post("/v1/completions", {"prompt": ["x", "y"]}))
    while len(endpoint.client.running) < 2:
        await asyncio.sleep(0.001)
    endpoint.client.last_step_at = time.monotonic() - 7
    progress = (await endpoint.get("/health"))[1]["progress"]
    assert (progress["steps"], progress["queued"], progress["running"], progress["waiting"]) == (1, 2, 1, 0)
    assert 7 <= progress["last_step_age_seconds"] < 9
    task.cancel()


@pytest.mark.parametrize(("state", "code"), [("dead", "engine_dead"), ("draining", "draining")])
async def test_not_ready_states(endpoint, state, code):
    endpoint.client.state = state
    status, answer = await endpoint.get("/readyz")
    assert (status, answer["error"]["code"]) == (503, code)
    assert (await endpoint.get("/health"))[1]["status"] == code
    assert (await endpoint.get("/livez"))[0] == 200


async def test_a_silent_engine_is_not_ready(endpoint):
    endpoint.client.last_stats_at = time.monotonic() - 9
    assert (await endpoint.get("/readyz"))[0] == 200
    endpoint.client.last_stats_at = time.monotonic() - 11
    status, answer = await endpoint.get("/readyz")
    assert (status, answer["error"]["code"]) == (503, "engine_silent")
    assert (await endpoint.post("/v1/completions", {"prompt": "x"}))[0] == 503
    endpoint.client.stats.longest_step_seconds = 5.0  # slow, not stuck: a step of this engine takes that long
    assert (await endpoint.get("/readyz"))[0] == 200
    endpoint.client.last_stats_at = time.monotonic() - 21
    assert (await endpoint.get("/readyz"))[0] == 503


async def test_health(endpoint):
    status, health = await endpoint.get("/health")
    assert status == 200
    assert health["status"] == "ready"
    assert health["model"] == "tiny"
    assert health["kv"]["pages_free"] == 60
    assert health["weights_checksum"] == health["engine"]["weights_checksum"] == "c0ffee" * 10
    assert health["device"] == {"backend": "fake", "uuid": "GPU-fake", "name": "Fake 1"}
    assert 0 < health["memory"]["host_available_bytes"] < health["memory"]["host_total_bytes"]
    with open("/proc/self/status") as file:
        resident = int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) * 1024
    assert health["memory"]["api_resident_bytes"] == pytest.approx(resident, rel=0.2)


async def metric_values(endpoint):
    async with endpoint.http.get(endpoint.url + "/metrics") as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await response.text()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics(make_endpoint):
    endpoint = await make_endpoint(Script(token_delay=0.002))
    await endpoint.post("/v1/completions", {"prompt": "abc", "max_tokens": 10, "n": 2})
    await endpoint.post("/v1/completions", {"prompt": "abc", "max_tokens": 0})
    await endpoint.get("/nope/1")
    await endpoint.get("/nope/2")
    values = await metric_values(endpoint)
    assert values[("appliance_kv_pages_free",)] == 60
    assert values[("appliance_kv_pages_total",)] == 64
    assert values[("appliance_requests_running",)] == 1
    assert values[("appliance_requests_waiting",)] == 0
    assert values[("appliance_prompt_tokens_total",)] == 4
    assert values[("appliance_generation_tokens_total",)] == 20
    assert values[("appliance_time_to_first_token_seconds_count",)] == 1
    assert values[("appliance_inter_token_latency_seconds_count",)] == 18  # nine gaps in each of two choices
    assert values[("appliance_requests_finished_total", ("reason", "length"))] == 2
    route = ("route", "/v1/completions")
    assert values[("appliance_request_latency_seconds_count", route)] == 1
    assert values[("appliance_http_responses_total", ("code", "200"), ("method", "POST"), route)] == 1
    assert values[("appliance_http_responses_total", ("code", "400"), ("method", "POST"), route)] == 1
    unknown = ("appliance_http_responses_total", ("code", "404"), ("method", "GET"), ("route", "unknown"))
    assert values[unknown] == 2  # one label for all of them: a scanner cannot fill the registry


@pytest.mark.parametrize("name", ["inter_token_latency", "time_to_first_token", "request_latency"])
async def test_histograms_have_an_edge_at_80_ms(endpoint, name):
    await endpoint.post("/infer", {"input": "x", "max_tokens": 3})
    names = {key for key in await metric_values(endpoint) if key[0] == f"appliance_{name}_seconds_bucket"}
    assert any(("le", "0.08") in key for key in names)


async def test_several_tokens_in_one_message_are_several_gaps(make_endpoint):
    endpoint = await make_endpoint(Script(tokens_per_message=5, token_delay=0.002))
    await endpoint.post("/generate", {"prompt": "x", "max_tokens": 15})
    assert (await metric_values(endpoint))[("appliance_inter_token_latency_seconds_count",)] == 10


async def test_openapi_has_every_route_and_its_fields(endpoint):
    _, document = await endpoint.get("/openapi.json")
    for route in ROUTES:
        operation = document["paths"][route.path.replace(":.+", "")][route.method.lower()]
        assert operation["summary"].startswith(f"{route.method} {route.path.replace(':.+', '')}")
        if route.body is not None:
            reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
            assert set(document["components"]["schemas"][reference]["properties"]) == set(route.body.__struct_fields__)
    registered = {
        (route.method, route.resource.canonical)
        for route in endpoint.service_app.router.routes()
        if route.method != "HEAD"
    }
    assert registered == {(route.method, route.path.replace(":.+", "")) for route in ROUTES}


async def test_head_works_like_get(endpoint):
    async with endpoint.http.head(endpoint.url + "/livez") as response:
        assert response.status == 200
        assert await response.read() == b""


# ---- small routes ----------------------------------------------------------------------------------------------------


async def test_infer(make_endpoint):
    endpoint = await make_endpoint(Script(reply=lambda msg, index: [*b"Paris", IM_END]))
    status, answer = await endpoint.post("/infer", {"input": "Capital of France?", "system": "brief"})
    assert status == 200
    assert answer["output"] == "Paris"
    assert answer["latency_ms"] > 0
    assert answer["finish_reason"] == "stop"
    msg = endpoint.client.submitted[0]
    assert msg.params.temperature == 0
    assert endpoint.tokenizer.decode(msg.prompt_ids, skip_special_tokens=False).startswith("<|im_start|>system\nbrief")
    await endpoint.post("/infer", {"input": "x", "temperature": 0.5, "seed": 3})
    assert (endpoint.client.submitted[1].params.temperature, endpoint.client.submitted[1].params.seed) == (0.5, 3)
    assert (await endpoint.post("/infer", {"input": "x", "stream": True}))[1]["error"]["code"] == "unsupported_field"
    assert (await endpoint.post("/infer", {}))[1]["error"]["param"] == "input"


async def test_generate(make_endpoint):
    endpoint = await make_endpoint(Script(reply=lambda msg, index: [*"é!".encode(), IM_END]))
    status, answer = await endpoint.post("/generate", {"prompt": "hi"})
    assert (status, answer["text"]) == (200, "é!")
    assert endpoint.client.submitted[0].prompt_ids == [256, 104, 105]
    request = endpoint.http.post(endpoint.url + "/generate", json={"prompt": "hi"}, headers={"Accept": "text/plain"})
    async with request as response:
        assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert await response.text() == "é!"


async def test_tokenize_and_back(endpoint):
    text = "<s> héllo 🫠 <|im_end|>"
    _, answer = await endpoint.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert answer["tokens"][0] == 256
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 512
    assert (await endpoint.post("/detokenize", {"tokens": answer["tokens"]}))[1] == {"prompt": text}
    skipped = await endpoint.post("/detokenize", {"tokens": answer["tokens"], "skip_special_tokens": True})
    assert skipped[1] == {"prompt": " héllo 🫠 "}
    _, answer = await endpoint.post("/tokenize", {"prompt": "a€", "return_token_strs": True})
    assert answer["token_strs"] == ["<s>", "a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    messages = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    _, answer = await endpoint.post("/tokenize", messages)
    assert endpoint.tokenizer.decode(answer["tokens"], skip_special_tokens=False) == "<|im_start|>user\nx<|im_end|>\n"
    assert (await endpoint.post("/tokenize", {"prompt": ""}))[1]["tokens"] == [256]
    assert (await endpoint.post("/detokenize", {"tokens": []}))[1] == {"prompt": ""}


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": []}, "prompt"),
    ("/tokenize", {"messages": []}, "messages"),
    ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
    ("/tokenize", {"prompt": ["x"]}, "prompt"),
    ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ("/detokenize", {"tokens": [0, 272]}, "tokens[1]"),
    ("/detokenize", {"tokens": [True]}, "tokens[0]"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/detokenize", {}, "tokens"),
])  # fmt: skip
async def test_tokenize_errors(endpoint, path, body, param):
    status, answer = await endpoint.post(path, body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_models_404(endpoint):
    for path in ("/tokenize", "/detokenize", "/v1/completions"):
        status, answer = await endpoint.post(path, {"model": "other"} | _needed(path))
        assert (status, answer["error"]["code"]) == (404, "model_not_found")


def _needed(path):
    return {"tokens": [1]} if path == "/detokenize" else {"prompt": "x"}


TEXTS = {
    "shift_jis": "これは日本語のテキストです。文字コードを判定するための長めの文章をここに書いておきます。",
    "koi8_r": "Привет, мир! Это довольно длинный текст на русском языке, чтобы угадать его кодировку. "
    "Он рассказывает о том, как утром шёл снег, а вечером дети играли во дворе.",
    "utf_16": "The quick brown fox jumps over the lazy dog, and then it does so again.",
}


@pytest.mark.parametrize("encoding", TEXTS)
async def test_detect_encoding(endpoint, encoding):
    raw = TEXTS[encoding].encode(encoding)
    headers = {"Content-Type": "application/octet-stream"}
    status, answer = await endpoint.post("/encoding/detect", raw, headers=headers)
    assert status == 200
    assert answer["valid_utf8"] is False
    decoded = raw.decode(answer["encoding"])
    assert decoded.lstrip("\ufeff") == TEXTS[encoding]


async def test_detect_utf8_and_positions(endpoint):
    async def detect(raw):
        return (await endpoint.post("/encoding/detect", raw, headers={"Content-Type": "text/plain"}))[1]

    assert (await detect(b"plain"))["encoding"] == "ascii"
    assert (await detect("é".encode()))["encoding"] == "utf_8"
    answer = await detect(b"a" * 100_000 + b"\xe9t\xe9 d\xe9j\xe0 vu " * 50)
    assert answer["error_position"] == 100_000
    assert answer["error_byte"] == "0xe9"
    assert answer["judged_bytes"] < 70_000
    status, answer = await endpoint.post("/encoding/detect", b"", headers={"Content-Type": "text/plain"})
    assert (status, answer["error"]["code"]) == (400, "empty_body")
