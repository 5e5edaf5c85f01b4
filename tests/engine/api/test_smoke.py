async def test_smoke(endpoint):
    oa = endpoint.openai()
    r = await oa.completions.create(model="tiny", prompt="hi", max_tokens=5, seed=1, logprobs=2)
    print(r)
    r = await oa.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=5, logprobs=True, top_logprobs=2
    )
    print(r)
    s = await oa.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=5,
        stream=True,
        stream_options={"include_usage": True},
    )
    async for c in s:
        print(c)
    for p in [
        "/livez",
        "/readyz",
        "/health",
        "/v1/models",
        "/v1/models/tiny",
        "/v1/models/a/b",
        "/openapi.json",
        "/admin/state",
        "/nope",
    ]:
        x = await endpoint.get(p)
        print(p, x[0], str(x[1])[:300])
    print(await endpoint.post("/infer", {"input": "hello", "max_tokens": 4}))
    print(await endpoint.post("/generate", {"prompt": "hello", "max_tokens": 4}))
    print(await endpoint.post("/tokenize", {"prompt": "hello"}))
    print(await endpoint.post("/detokenize", {"tokens": [256, 104]}))
    print(await endpoint.post("/encoding/detect", b"d\xe9j\xe0 vu, \xe7a va tr\xe8s bien l'\xe9t\xe9"))
    async with endpoint.http.get(endpoint.url + "/metrics") as r:
        print((await r.text())[-1500:])
