"""An endpoint of the real server code on a loopback port, with a fake engine behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import uvloop
from aiohttp import web

from engine.api.app import build_app
from engine.api.config import ApiConfig, Limits, Timeouts
from engine.api.server import listening
from engine.api.service import SERVICE, Service

from .fakes import EOS, IM_END, ByteDetokenizer, ByteTokenizer, FakeClient, NaiveStopMatcher, Script

if TYPE_CHECKING:
    import openai


@dataclass
class Endpoint:
    client: FakeClient
    tokenizer: ByteTokenizer
    service: Service
    address: tuple[str, int]
    http: aiohttp.ClientSession
    service_app: web.Application

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def openai(self, key: str = "none", **kwargs: Any) -> openai.AsyncOpenAI:
        import openai  # takes seconds: only where it is used

        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=10, **kwargs)

    async def post(self, path: str, body: Any = None, **kwargs: Any) -> tuple[int, Any]:
        """(status, JSON) of a POST; `body` may be raw bytes (then sent as application/json)."""
        if isinstance(body, bytes):
            kwargs.setdefault("headers", {"Content-Type": "application/json"})
            kwargs["data"] = body
        elif body is not None:
            kwargs["json"] = body
        async with self.http.post(self.url + path, **kwargs) as response:
            return response.status, await response.json()

    async def get(self, path: str, **kwargs: Any) -> tuple[int, Any]:
        async with self.http.get(self.url + path, **kwargs) as response:
            return response.status, await response.json()


def make_config(**kwargs: Any) -> ApiConfig:
    limits, timeouts = kwargs.pop("limits", {}), kwargs.pop("timeouts", {})
    return ApiConfig(
        **{"model": "tiny", "max_model_len": 512, "eos_token_ids": (EOS, IM_END)} | kwargs,
        limits=Limits(**limits),
        timeouts=Timeouts(**{"linger": 0.1} | timeouts),
    )


FACTORIES: dict[str, Any] = {"make_detokenizer": ByteDetokenizer, "make_stop_matcher": NaiveStopMatcher}
MakeEndpoint = Callable[..., contextlib.AbstractAsyncContextManager[Endpoint]]


@contextlib.asynccontextmanager
async def running(
    script: Script | None = None, *, bos: bool = True, max_model_len: int = 512, **config: Any
) -> AsyncIterator[Endpoint]:
    client, tokenizer = FakeClient(script, max_model_len=max_model_len), ByteTokenizer(bos=bos)
    app = build_app(client, tokenizer, make_config(**config), **FACTORIES)
    async with (
        listening(app, host="127.0.0.1") as addresses,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http,
    ):
        yield Endpoint(client, tokenizer, app[SERVICE], addresses[0], http, app)


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Tests run on the loop that the product runs on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def make_endpoint() -> AsyncIterator[Callable[..., Any]]:
    """`await make_endpoint(Script(...), **config)`; all are closed at the end of the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(script: Script | None = None, **kwargs: Any) -> Endpoint:
            return await stack.enter_async_context(running(script, **kwargs))

        yield make


@pytest.fixture
async def endpoint(make_endpoint: Callable[..., Any]) -> Endpoint:
    return await make_endpoint()
