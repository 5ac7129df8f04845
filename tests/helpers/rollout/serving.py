"""A server on a port of this machine, in a thread of this process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import openai
import uvicorn

from rollout import AsyncEngine, Engine
from rollout.server import ChatFormat, ServerOptions, make_app
from tests.helpers.memsaver.savers import until

API, ADMIN = "key of users", "key of admins"


class Served(NamedTuple):
    """A server, and what is behind it."""

    engine: Engine
    shared: AsyncEngine
    url: str

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=API, max_retries=0, **options)

    def idle(self) -> None:
        """Wait until no request is left in the engine."""
        until(lambda: not self.shared.engine.unfinished)


@contextlib.contextmanager
def serving(path: Path, forced: list[int] | None = None, **options: Any) -> Iterator[Served]:
    """Serve a model; with `forced`, all answers are these tokens."""
    engine = Engine.from_pretrained(path, kv_tokens=8192, max_running=16)
    if forced is not None:
        enqueue = engine.submit
        engine.submit = lambda prompt, params, **how: enqueue(  # type: ignore[method-assign]
            prompt, replace(params, forced=tuple(forced), max_tokens=len(forced)), **how
        )
    given = {
        "model": "m",
        "keys": [API],
        "admin_keys": [ADMIN],
        "max_context_len": engine.max_context_len,
    }
    waiting = options.pop("max_waiting", 64)
    ready, servers = threading.Event(), list[Served]()

    async def serve() -> None:
        async with AsyncEngine(engine, waiting) as shared:
            app = make_app(shared, ChatFormat.of(path), ServerOptions(**given | options))
            config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            running = asyncio.create_task(server.serve())
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            servers.append(Served(engine, shared, f"http://127.0.0.1:{port}"))
            ready.set()
            await asyncio.to_thread(ended.wait)
            server.should_exit = True
            await running

    ended = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield servers[0]
    finally:
        ended.set()
        thread.join(60)
