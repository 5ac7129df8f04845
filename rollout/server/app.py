"""The HTTP application in front of an engine that coroutines share, in the form of OpenAI's API."""

import asyncio
import contextlib
import hmac
import math
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Hashable,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, Protocol, TypeVar

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import Receive, Scope, Send

from memsaver import StateError
from rollout.chats import SessionRecord
from rollout.loop import QueueFull, TokenStream
from rollout.loop.engine_loop import PauseMode
from rollout.requests import Completion, Output, SamplingParams
from rollout.server.answers import Asked, Json, event, is_empty
from rollout.server.bodies import ChatBody, CompletionBody, SampledBody, TokenBody
from rollout.server.server_figures import ServerFigures
from rollout.server.text import AnswerText, ChatFormat

KEEP_ALIVE = 60
"""Seconds for idle connections: longer than clients keep them, or both close them at once."""
_Value = TypeVar("_Value")
_RETRY_SECONDS = 1
_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What a server serves, and for whom.

    Attributes:
        model: Name of the model.
        max_context_len: Most tokens of prompt and answer together.
        adapters: Names of the adapters, each a model of its own.
        keys: Keys of which a request must have one; none: all requests are served.
        admin_keys: Keys of which a pause, or its end, must have one; none: these are refused.
        paused: Whether requests wait during a pause, or are refused with status 503.
        max_body_bytes: Largest body of a request.
    """

    model: str
    max_context_len: int
    adapters: Sequence[str] = ()
    keys: Collection[str] = field(default=(), repr=False)
    admin_keys: Collection[str] = field(default=(), repr=False)
    paused: Literal["wait", "refuse"] = "wait"
    max_body_bytes: int = 16 << 20


class ServedEngine(Protocol):
    """What a server asks: an `AsyncEngine`, `AsyncReplicas`, or anything like them."""

    @property
    def ended(self) -> bool:
        """Return whether it answers no requests any more."""

    def submit(
        self, token_ids: Sequence[int], params: SamplingParams, session: Hashable | None = None
    ) -> TokenStream:
        """Begin to answer a request."""

    async def pause_generation(self, mode: PauseMode = "keep") -> None:
        """Run no steps until `resume_generation`."""

    async def resume_generation(self) -> None:
        """Run steps again."""


def make_app(
    engine: ServedEngine,
    chat: ChatFormat,
    options: ServerOptions,
    records: Mapping[str, SessionRecord] | None = None,
) -> FastAPI:
    """Make the application, for uvicorn or any other ASGI server.

    Args:
        engine: The engine, which the application does not close.
        chat: The model's chat format.
        options: What it serves, and for whom.
        records: Sessions that are recorded, by the name in their routes; the caller adds and
            removes them, and there are no other routes for answers. None: nothing is recorded.

    Returns:
        The application.
    """
    server = _Server(engine, chat, options, records)
    off: Any = {"docs_url": None, "redoc_url": None, "openapi_url": None}
    app = FastAPI(title="memsaver", max_body_size=options.max_body_bytes, **off)
    expected = (RequestValidationError, StarletteHTTPException, ValueError, StateError, QueueFull)
    for error in (*expected, Exception):  # servers log the traceback of the last
        app.add_exception_handler(error, _failed)
    keyed = [Depends(_needs(options.keys))]
    if records is None:
        app.include_router(server.model_routes(), dependencies=keyed)
    app.include_router(server.model_routes(), prefix="/sessions/{session}", dependencies=keyed)
    if options.admin_keys:
        app.include_router(
            server.admin_routes(), dependencies=[Depends(_needs(options.admin_keys))]
        )
    app.add_api_route("/health", server.health)
    app.add_api_route("/metrics", server.metrics, dependencies=keyed)
    return app


class _Server:
    """The routes of one application."""

    def __init__(
        self,
        engine: ServedEngine,
        chat: ChatFormat,
        options: ServerOptions,
        records: Mapping[str, SessionRecord] | None,
    ) -> None:
        self._engine, self._chat, self._options = engine, chat, options
        self._records = records
        self._figures = ServerFigures()
        self._paused = False

    def model_routes(self) -> APIRouter:
        """Return the routes that answer requests."""
        router = APIRouter()
        router.add_api_route("/v1/models", self.models)
        post: Mapping[str, Any] = {"methods": ["POST"], "response_model": None}
        router.add_api_route("/v1/completions", self.completions, **post)
        router.add_api_route("/v1/chat/completions", self.chat, **post)
        router.add_api_route("/inference/v1/generate", self.tokens, **post)
        return router

    def admin_routes(self) -> APIRouter:
        """Return the routes that stop generation, and let it go on."""
        router = APIRouter()
        router.add_api_route("/pause", self.pause, methods=["POST"])
        router.add_api_route("/resume", self.resume, methods=["POST"])
        return router

    # ---------------------------------------------------------------- routes

    async def models(self) -> Json:
        names = [self._options.model, *self._options.adapters]
        fixed: Json = {"object": "model", "created": 0, "owned_by": "memsaver"}
        fixed |= {"max_model_len": self._options.max_context_len}  # as vLLM says it
        return {"object": "list", "data": [{"id": name, **fixed} for name in names]}

    async def completions(
        self, request: Request, body: CompletionBody, session: str | None = None
    ) -> Response:
        tokenizer = self._chat.tokenizer
        prompts = [tokenizer.encode(p) if isinstance(p, str) else p for p in body.prompts]
        return await self._answer(request, body, prompts, "text_completion", session)

    async def chat(self, request: Request, body: ChatBody, session: str | None = None) -> Response:
        encode = (self._record(session) or self._chat).encode
        ids = encode(body.messages, body.tools, body.chat_template_kwargs)
        return await self._answer(request, body, [ids], "chat.completion", session)

    async def tokens(
        self, request: Request, body: TokenBody, session: str | None = None
    ) -> Response:
        return await self._answer(request, body, [body.token_ids], "token_completion", session)

    async def pause(self, mode: PauseMode = "keep") -> Json:
        self._paused = True
        await self._engine.pause_generation(mode)
        return {"paused": True}

    async def resume(self) -> Json:
        await self._engine.resume_generation()
        self._paused = False
        return {"paused": False}

    async def health(self) -> Json:
        if self._engine.ended:
            raise HTTPException(503, "the engine has ended; its log says why")
        return {"status": "paused" if self._paused else "ok"}

    async def metrics(self) -> Response:
        text, kind = self._figures.text()
        return Response(text, headers={"content-type": kind})

    # ---------------------------------------------------------------- answers

    async def _answer(
        self,
        request: Request,
        body: SampledBody,
        prompts: Sequence[list[int]],
        kind: str,
        session: str | None,
    ) -> Response:
        if self._paused and self._options.paused == "refuse":
            late = {"retry-after": str(_RETRY_SECONDS)}
            raise HTTPException(503, "generation is paused; ask again later", headers=late)
        record, room = self._record(session), self._room(max(map(len, prompts)))
        params = [body.params(room, self._adapter(body.model))] * len(prompts)
        if record is not None:
            named = body.model_fields_set
            params = [record.params(prompt, params[0], named) for prompt in prompts]
        model = body.model or self._options.model
        asked = Asked(
            body=body, format=self._chat, model=model, prompts=prompts, kind=kind, record=record
        )
        streams = self._submit(prompts, params, session)
        try:
            if body.stream:
                choices = _choices(asked, streams)
                first = await _unless_gone(request, anext(choices))  # or what is wrong with it
                return _EventResponse(_events(asked, first, choices), streams, self._figures, asked)
            whole = await _unless_gone(request, _whole(asked, streams))
            self._figures.ended(asked)
            return JSONResponse(whole)
        except BaseException:
            _end(streams)
            raise

    def _room(self, prompt: int) -> int:
        """Return the most tokens of an answer; the error is in words by which harnesses know it."""
        longest = self._options.max_context_len
        if prompt >= longest:
            rule = f"the maximum context length is {longest} tokens, and the prompt has {prompt}"
            raise ValueError(f"{rule} (context_length_exceeded)")
        return longest - prompt

    def _record(self, session: str | None) -> SessionRecord | None:
        """Return the record of a session, if sessions are recorded."""
        if self._records is None:
            return None
        if (record := self._records.get(session or "")) is None:
            raise HTTPException(404, "this session has ended, or has never begun")
        return record

    def _adapter(self, model: str | None) -> str | None:
        if model in (None, self._options.model):
            return None
        if model in self._options.adapters:
            return model
        known = ", ".join([self._options.model, *self._options.adapters])
        raise HTTPException(404, f"model: {model} is not served here; {known} is")

    def _submit(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], session: str | None
    ) -> list[TokenStream]:
        """Submit all prompts or none."""
        streams: list[TokenStream] = []
        try:
            for prompt, how in zip(prompts, params, strict=True):
                streams.append(self._engine.submit(prompt, how, session))
        except BaseException:
            _end(streams)
            raise
        return streams


class _EventResponse(StreamingResponse):
    """The events of a stream; the requests end with it, whatever ends it."""

    def __init__(
        self,
        events: AsyncIterator[str],
        streams: Sequence[TokenStream],
        figures: ServerFigures,
        asked: Asked,
    ) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._streams, self._figures, self._asked = streams, figures, asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _end(self._streams)
            self._figures.ended(self._asked)


async def _whole(asked: Asked, streams: Sequence[TokenStream]) -> Json:
    """Return all answers, once they have ended."""
    answers = await asyncio.gather(*(_samples(asked, stream) for stream in streams))
    pairs = [zip(*pair, strict=True) for pair in zip(asked.samples, answers, strict=True)]
    choices = [sample.choice(answer, whole=True) for sample, answer in chain.from_iterable(pairs)]
    return asked.whole(choices)


async def _samples(asked: Asked, stream: TokenStream) -> list[Completion]:
    """Return the samples of a prompt; none goes on when each has ended or has a stop string."""
    if not asked.body.stops:
        return await stream.result()
    left = {at: AnswerText(asked.format.tokenizer, asked.body.stops) for at in range(asked.body.n)}
    async for output in stream:
        if output.sample in left:
            left[output.sample].add(output.token_ids)
            if left[output.sample].stopped or output.finish_reason:
                del left[output.sample]
        if not left:
            return await stream.abort()
    return await stream.result()


async def _choices(asked: Asked, streams: Sequence[TokenStream]) -> AsyncIterator[Json]:
    """Yield the pieces of all samples, as they come."""
    async for number, output in _merged(streams):
        samples = asked.samples[number]
        if samples[output.sample].ended:
            continue
        yield samples[output.sample].choice(output)
        if all(sample.ended for sample in samples):
            _end([streams[number]])


async def _merged(streams: Sequence[TokenStream]) -> AsyncIterator[tuple[int, Output]]:
    """Yield the outputs of several streams with the number of the stream."""
    if len(streams) == 1:  # no tasks, which would take as long as all else that an output needs
        with contextlib.suppress(CancelledError):  # by `_end`
            async for output in streams[0]:
                yield 0, output
        return
    reading = {asyncio.ensure_future(anext(stream)): at for at, stream in enumerate(streams)}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                number = reading.pop(read)
                with contextlib.suppress(StopAsyncIteration, CancelledError):  # the last: by `_end`
                    yield number, read.result()
                    reading[asyncio.ensure_future(anext(streams[number]))] = number
    finally:
        for read in reading:
            read.cancel()


async def _events(asked: Asked, first: Json, choices: AsyncIterator[Json]) -> AsyncIterator[str]:
    """Yield the events of a stream, at the end its error if it has one."""
    try:
        yield event(asked.chunk(first, first=True))
        async for choice in choices:
            if not is_empty(choice):
                yield event(asked.chunk(choice))
        if asked.body.stream_options.include_usage:
            yield event(asked.chunk(usage=True))
        yield event("[DONE]")
    except Exception as error:
        status, text, _ = _described(error)
        yield event(_error(status, text))


def _end(streams: Sequence[TokenStream]) -> None:
    """End requests; those that have ended are left alone."""
    for stream in streams:
        stream.future.cancel()


async def _unless_gone(request: Request, work: Awaitable[_Value]) -> _Value:
    """Wait for something, which is cancelled if the client goes."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(499, "the client has gone")
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ---------------------------------------------------------------- who may ask, and errors


def _needs(keys: Collection[str]) -> Callable[[Request], Awaitable[None]]:
    """Return a check that a request has one of the keys; no keys: any request passes."""

    async def check(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        known = [hmac.compare_digest(given, key.encode()) for key in keys]
        if keys and not any(known):
            raise HTTPException(
                401, "the key is missing or wrong", headers={"www-authenticate": "Bearer"}
            )

    return check


def _error(status: int, text: str) -> Json:
    name = re.match(r"(\w+)[=:]", text)
    kind = _KINDS.get(status, "server_error")
    param = name[1] if name else None
    return {"error": {"message": text, "type": kind, "param": param, "code": status}}


def _described(error: Exception) -> tuple[int, str, Mapping[str, str]]:
    """Return status, text and headers of an error."""
    if isinstance(error, StarletteHTTPException):
        return error.status_code, str(error.detail), error.headers or {}
    if isinstance(error, RequestValidationError):
        return 400, "; ".join(map(_invalid, error.errors())), {}
    if isinstance(error, QueueFull):
        return 429, str(error), {"retry-after": str(math.ceil(error.seconds or _RETRY_SECONDS))}
    if isinstance(error, ValueError):
        return 400, str(error), {}
    status = 503 if isinstance(error, StateError) else 500
    return status, f"{type(error).__name__}: {error}", {}


def _invalid(error: Mapping[str, Any]) -> str:
    """Return what is wrong with a field of a body."""
    place = ".".join(str(part) for part in error["loc"] if part != "body") or "the body"
    if error["type"] == "extra_forbidden":
        return f"{place}: is not served here; leave it out"
    return f"{place}: {error['msg'].removeprefix('Value error, ')}"


async def _failed(_: Request, error: Exception) -> JSONResponse:
    status, text, headers = _described(error)
    return JSONResponse(_error(status, text), status, headers)
