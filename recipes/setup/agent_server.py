"""The server through which agents ask the engine of a run, and which records what it answers."""

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from memsaver import StateError
from recipes.setup.chat_turns import chat_of
from recipes.setup.prompts import PromptFormat
from rollout import Completion, Output, SamplingParams, TokenStream
from rollout.chats import SessionRecord

Submit = Callable[[Sequence[int], SamplingParams], Future[list[Completion]]]
"""Begins to answer a prompt, together with all other requests."""
MODEL = "policy"
"""Name of the model for agents."""
_GRACE = 1  # seconds for open connections at the end
_STALE = "no engine answers now: the step that this session belongs to has ended"


class AgentServer:
    """An HTTP server of this machine alone, in a thread of its own.

    Args:
        form: Format of the prompts.
        longest: Most tokens of a conversation.
    """

    def __init__(self, form: PromptFormat, longest: int) -> None:
        import uvicorn

        from rollout.server import KEEP_ALIVE, ServerOptions, make_app

        self._chat = chat_of(form, "task.agent")
        self._longest, self._key = longest, secrets.token_hex()
        self._records: dict[str, SessionRecord] = {}
        self._engine = WholeAnswers()
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=2048)
        options = ServerOptions(model=MODEL, max_context_len=longest, keys=[self._key])
        app = make_app(self._engine, self._chat, options, self._records)
        how: Any = {"log_level": "critical", "timeout_graceful_shutdown": _GRACE}
        how["timeout_keep_alive"] = KEEP_ALIVE
        self._server = uvicorn.Server(uvicorn.Config(app, **how))
        run = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=run, name="agent server")
        self._thread.start()

    @contextlib.contextmanager
    def session(
        self, params: SamplingParams, seed: int
    ) -> Iterator[tuple[Mapping[str, str], SessionRecord]]:
        """Yield how an agent reaches the model, and the record of what it asks.

        Args:
            params: How answers are sampled.
            seed: Decides the seeds of the answers.
        """
        name = secrets.token_hex(16)
        record = SessionRecord(self._chat, params, self._longest, seed)
        url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/sessions/{name}/v1"
        self._records[name] = record
        try:
            yield {"base_url": url, "api_key": self._key, "model": MODEL}, record
        finally:
            del self._records[name]

    @contextlib.contextmanager
    def answering(self, submit: Submit) -> Iterator[None]:
        """Let an engine answer what is asked inside of the block.

        Blocks of an evaluation and of a step that is sampled ahead may overlap.
        """
        self._engine.owners.append(submit)
        try:
            yield
        finally:
            self._engine.owners.remove(submit)

    def close(self) -> None:
        """End the server and its thread."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


class WholeAnswers:
    """The engine of a step as a server asks it: streams get their answer in one piece.

    Attributes:
        owners: Begin to answer a prompt, on the same engines; empty: no engine generates.
    """

    ended = False

    def __init__(self) -> None:
        self.owners: list[Submit] = []

    def submit(
        self, token_ids: Sequence[int], params: SamplingParams, session: Hashable | None = None
    ) -> TokenStream:
        """Begin to answer a request, see `AsyncEngine.submit`."""
        if not (owners := self.owners[:]):
            raise StateError(_STALE)
        stream = TokenStream(_cancel)
        stream.future = Future()
        answering = owners[-1](token_ids, params)
        stream.future.add_done_callback(lambda _: _cancel(answering))
        answering.add_done_callback(lambda done: _tell(stream, done))
        return stream

    async def pause_generation(self, mode: str = "keep") -> None:
        raise StateError("the run decides when its engine sleeps")

    async def resume_generation(self) -> None:
        raise StateError("the run decides when its engine wakes up")


def _tell(stream: TokenStream, done: Future[list[Completion]]) -> None:
    """Give an answer to the readers of a stream, in the engine's thread."""
    if done.cancelled() or not stream.future.set_running_or_notify_cancel():
        stream.future.cancel()
    elif error := done.exception():
        stream.future.set_exception(error)
    else:
        for at, sample in enumerate(done.result()):
            numbers = sample.token_ids, sample.logprobs, sample.weight_versions
            names = "top_logprobs", "prompt_logprobs", "cached_tokens"
            more = {name: getattr(sample, name) for name in names}
            stream.arrived.append(Output(0, at, *numbers, sample.finish_reason, **more))
        stream.future.set_result(done.result())
    with contextlib.suppress(RuntimeError):  # the server's event loop has ended
        stream.events.call_soon_threadsafe(stream.wake)


def _cancel(future: Future[list[Completion]]) -> None:
    future.cancel()
