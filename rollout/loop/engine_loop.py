"""Loops of an engine: the first rank's steps it and decides, and those of the others follow."""

import contextlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Literal

from memsaver import StateError
from memsaver.types import check_choice
from rollout.engine.step_decisions import StepDecision
from rollout.engine.stepping import Asleep, SteppedEngine, joined
from rollout.loop.owner import OwnerThread, fail, settle, when_cancelled
from rollout.requests import Completion, Output, SamplingParams, for_each

OnOutput = Callable[[Output], None]
PauseMode = Literal["keep", "recompute", "abort", "wait"]
"""What a pause of generation means for unfinished requests.

With "keep" they wait with their keys and values, and go on over these. With "recompute" they keep
their tokens alone, and compute keys and values again. With "abort" they end with their present
answers. With "wait" the pause begins when they have ended.
"""
SHARED = {
    "abort_update", "alias_update", "begin_update", "commit_update", "forget_prefixes", "load",
    "load_adapter", "serve_update", "shrink", "sleep", "sync_weights", "unload_adapter", "wake_up",
}  # fmt: skip
"""Methods that change what a step computes: all ranks call them between the same two steps."""

_FOREVER = 10.0 * 365 * 24 * 3600  # seconds: an idle engine waits for its first rank
_CLOSE = "close"


def name_of_all(method: str) -> str:
    """Return the name of a call that all ranks make together; empty for other methods."""
    return method if method in SHARED else ""


@dataclass(eq=False)
class _Request:
    prompt: Sequence[int]
    params: SamplingParams
    name: str
    asleep: Asleep
    on_output: OnOutput | None = None
    future: Future[list[Completion]] = field(default_factory=Future)
    outputs: list[Output] = field(default_factory=list)
    ended: int = 0  # of its samples

    def add(self, output: Output) -> bool:
        """Take what is new, and return whether the request has ended."""
        self.outputs.append(output)
        if self.on_output is not None and (output.token_ids or output.error is None):
            self.on_output(output)
        if output.error is not None:
            fail(self.future, output.error)
            return True
        self.ended += output.finish_reason is not None
        if self.ended == self.params.n:
            settle(self.future, lambda: joined(self.outputs)[0])
        return self.ended == self.params.n

    def end_unbegun(self) -> None:
        """End a request that the engine does not know, with empty samples."""
        empty = Completion(token_ids=[], logprobs=[], finish_reason="abort", weight_versions=[])
        settle(self.future, lambda: [empty] * self.params.n)


class EngineLoop(OwnerThread):
    """Thread that steps an engine while requests are unfinished, whoever submitted them.

    All of its methods may be called by any thread. Requests and calls wait for the end of the
    present step, and are then taken in their order. While the engine cannot generate, because its
    memory sleeps or an update is open, requests wait for the call that ends this. An error of a
    step, other than those that the engine survives, ends all requests with it.

    Of ranks that share a model, the first has this loop, and the others a `FollowingLoop`.

    Args:
        engine: The engine, which no other thread may use until `close`.
        on_turn: Called after each step, and each request or call that was taken, in the loop's
            thread. It must be quick, and raise nothing.
        reading: Returns whether what was told before is still being read, so that the next step
            tells first tokens and ends only.

    Attributes:
        busy_seconds: Time of all steps.

    Raises:
        StateError: This is not the engine's first rank.
    """

    def __init__(
        self,
        engine: SteppedEngine,
        on_turn: Callable[[], None] = lambda: None,
        reading: Callable[[], bool] = lambda: False,
    ) -> None:
        engine.decisions.require_first("EngineLoop")
        self._open: dict[int, _Request] = {}
        self._stalled = False  # no step is possible until a call changes that
        self._paused, self._reading = False, reading
        self.busy_seconds = 0.0
        self._ending: list[Future[None]] = []  # pauses that wait for the ends of all requests
        self._held: list[list[_Request]] = []  # came since a pause
        super().__init__(engine, on_turn)

    @property
    def failed(self) -> bool:
        """Return whether the engine answers no more requests, in this loop or another one."""
        return self.ended or not self.engine.decisions.possible

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        on_output: OnOutput | None = None,
        asleep: Asleep = "refuse",
    ) -> Future[list[Completion]]:
        """Begin to answer a request, together with all others.

        Args:
            prompt: Token ids.
            params: Sampling parameters.
            on_output: Gets what is new, in the loop's thread: each token once, in the step that
                generates it, or later while `reading`. It must be quick. An error that it raises
                ends the request.
            asleep: Whether the request is queued or refused while the engine cannot generate.

        Returns:
            The samples, or the error of `Engine.submit` or of the request; a StateError once the
            loop is closed. To cancel the future ends the request, too.
        """
        return self._submit([_Request(prompt, params, "the prompt", asleep, on_output)])[0]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        asleep: Asleep = "refuse",
    ) -> list[list[Completion]]:
        """Continue every prompt `params.n` times, and wait for all of them.

        They are submitted between the same two steps, all or none of them. After any error, no
        request of this call is left.

        Args:
            prompts: Token ids.
            params: Sampling parameters, for all prompts or one per prompt.
            asleep: Whether the requests are queued or refused while the engine cannot generate.

        Returns:
            The samples, [prompt][sample].

        Raises:
            StateError: Names why the engine is unavailable, or the loop is closed.
            ValueError: Names a prompt that is invalid or can never fit.
            FloatingPointError: A log-probability is not finite.
            RankError: A tensor-parallel rank failed or did not answer; restart all ranks.
        """
        pairs = enumerate(zip(prompts, for_each(prompts, params), strict=True))
        requests = [_Request(*pair, f"prompt {number}", asleep) for number, pair in pairs]
        futures = self._submit(requests)
        try:
            return [future.result() for future in futures]
        except BaseException:
            self.abort(*futures)
            raise

    def abort(self, *futures: Future[list[Completion]]) -> None:
        """End requests with their present answers; those that have ended already are left alone.

        Args:
            futures: Results of `submit`.
        """
        self._put(partial(self._abort, {*futures}))

    def pause_generation(self, mode: PauseMode = "keep") -> Future[None]:
        """Run no steps until `resume_generation`; later requests wait for it.

        Calls go on, such as a sleep or a weight update. A request that is aborted meanwhile ends
        at once.

        Args:
            mode: What this means for unfinished requests.

        Returns:
            None, once no step runs. A StateError: the engine cannot do what `mode` says, and
            nothing changed; or with "wait", it cannot generate, or generation was resumed before
            all requests had ended.

        Raises:
            ValueError: The mode is unknown.
        """
        check_choice("mode", mode, PauseMode)
        future: Future[None] = Future()
        self._put(partial(self._pause, mode, future), future)
        return future

    def begin_call(self, name: str, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a method of the engine between two steps, without waiting for it.

        Args:
            name: Name of the method.
            *args: Its arguments.
            **kwargs: Its arguments by name.

        Returns:
            What it returns, or its error.
        """
        call = partial(getattr(self.engine, name), *args, **kwargs)
        return self.call(call, shared=name_of_all(name))

    def resume_generation(self) -> Future[None]:
        """Run steps again, and take the requests that have come meanwhile.

        Returns:
            None, once they are queued.
        """
        return self.call(self._resume)

    def close(self) -> None:
        """End all requests and the thread, and the loops of the other ranks.

        Then any thread may use the engine.
        """
        self._put(self._close)
        self._thread.join()

    def _submit(self, requests: Sequence[_Request]) -> list[Future[list[Completion]]]:
        futures = [request.future for request in requests]
        for request in requests:
            with contextlib.suppress(ValueError):  # raised in the loop's thread, too
                self.engine.prepare(request.params)
        self._put(partial(self._accept, requests), *futures)
        for future in futures:
            when_cancelled(future, self.abort)
        return futures

    # ---------------------------------------------------------------- in the thread

    def _turn(self) -> None:
        left = self._open or self.engine.unfinished
        if not left:
            self._end_waits(None)
        stopped = self._stalled or (self._paused and not self._ending)
        if left and not stopped and self._inbox.empty():
            self._step()
        else:
            super()._turn()
            self._stalled = False

    def _pause(self, mode: PauseMode, future: Future[None]) -> None:
        reason = self.engine.unavailable_reason()
        if mode != "wait":
            settle(future, partial(self._stop, mode))
        elif reason and self.engine.unfinished:
            fail(future, StateError(f"requests cannot end before the pause: {reason}"))
        else:
            self._paused = True
            self._ending.append(future)

    def _stop(self, mode: PauseMode) -> None:
        """Pause at once, after all that `mode` asks for."""
        if mode == "recompute":
            self.engine.requeue()
        elif mode == "abort":
            self._end_requests(self.engine.unfinished)
        self._paused = True

    def _resume(self) -> None:
        self._paused = False
        self._end_waits(StateError("generation was resumed before all requests had ended"))
        held, self._held = self._held, []
        for requests in held:
            self._accept(requests)

    def _end_waits(self, error: Exception | None) -> None:
        """Settle the pauses that wait for the ends of all requests."""
        ending, self._ending = self._ending, []
        for future in ending:
            if error is None:
                settle(future, lambda: None)
            else:
                fail(future, error)

    def _end_requests(self, ids: Sequence[int]) -> None:
        """End requests, and tell so in a step that runs nothing."""
        for id in ids:
            self.engine.abort(id)
        if ids:
            self._step()

    def _accept(self, requests: Sequence[_Request]) -> None:
        if self._paused:
            self._held.append([*requests])
            return
        accepted: dict[int, _Request] = {}
        try:
            for request in requests:
                id = self.engine.submit(
                    request.prompt,
                    request.params,
                    stream=request.on_output is not None,
                    asleep=request.asleep,
                    name=request.name,
                )
                accepted[id] = request
        except Exception as error:
            for id in accepted:
                self.engine.abort(id)
            for request in requests:
                fail(request.future, error)
        else:
            self._open |= accepted

    def _abort(self, futures: set[Future[list[Completion]]]) -> None:
        self._end_requests([id for id, request in self._open.items() if request.future in futures])
        for batch in self._held:
            for request in [request for request in batch if request.future in futures]:
                request.end_unbegun()
                batch.remove(request)

    def _step(self) -> None:
        self.engine.ends_only, began = self._reading(), time.monotonic()
        try:
            outputs = self.engine.step()
        except Exception as error:
            self._stalled = True
            if self._ending:
                self._end_waits(error)
                self._resume()
            if not (isinstance(error, StateError) and self.engine.unavailable_reason()):
                self._fail_all(error)
        else:
            for output in outputs:
                self._deliver(output)
        self.busy_seconds += time.monotonic() - began

    def _deliver(self, output: Output) -> None:
        request = self._open.get(output.id)
        if request is None:  # a sibling had an error
            return
        try:
            ended = request.add(output)
        except Exception as error:  # of the callback
            fail(request.future, error)
            if output.id in self.engine.unfinished:
                self.engine.abort(output.id)
            ended = True
        if ended:
            del self._open[output.id]

    def _fail_all(self, error: Exception) -> None:
        for request in self._open.values():
            fail(request.future, error)
        self._open.clear()
        for id in self.engine.unfinished:
            self.engine.abort(id)  # the next step tells the ends, and runs nothing

    def _call(self, future: Future[Any], function: Callable[[], Any], shared: str) -> None:
        def call() -> Any:
            if shared:
                self.engine.decisions.call(shared)
            return function()

        settle(future, call)

    def _close(self) -> None:
        error = StateError("the request ended with the loop of its engine, which is closed")
        self._fail_all(error)
        for request in chain.from_iterable(self._held):
            fail(request.future, error)
        self.engine.step()
        self.engine.ends_only = False
        self.engine.decisions.call(_CLOSE)
        self._closing = True


class FollowingLoop(OwnerThread):
    """Thread of another rank than the first: it runs the steps that the first decides.

    Its own calls run between two of them, the shared ones where the first rank's loop makes them.

    Args:
        engine: The engine, which no other thread may use until `close`.

    Raises:
        StateError: This is the engine's first rank.
    """

    def __init__(self, engine: SteppedEngine) -> None:
        engine.decisions.require_following()
        self._heard = deque[StepDecision]()
        self._calls: defaultdict[str, deque[Callable[[], None]]] = defaultdict(deque)
        super().__init__(engine)
        threading.Thread(target=self._hear, daemon=True, name="decisions").start()

    def close(self) -> None:
        """Wait until the first rank's loop is closed. Then any thread may use the engine."""
        self._thread.join()

    def _hear(self) -> None:
        """Pass the first rank's decisions on to the thread, which takes calls meanwhile."""
        last = False
        while not last:
            try:
                decision = self.engine.decisions.receive(_FOREVER)
                last = decision.call == _CLOSE
                self._put(partial(self._follow, decision))
            except Exception as error:
                last = True
                self._put(partial(self._lost, error))

    # ---------------------------------------------------------------- in the thread

    def _call(self, future: Future[Any], function: Callable[[], Any], shared: str) -> None:
        if shared:
            self._calls[shared].append(partial(settle, future, function))
            self._go_on()
        else:
            settle(future, function)

    def _follow(self, decision: StepDecision) -> None:
        self._heard.append(decision)
        self._go_on()

    def _go_on(self) -> None:
        """Do what the first rank has decided, until it is a call that has not come here yet."""
        while self._heard:
            decision = self._heard[0]
            if decision.call not in ("", _CLOSE) and not self._calls[decision.call]:
                return
            self._heard.popleft()
            with contextlib.suppress(StateError):  # the first rank got one, too
                self.engine.obey(decision)
            if decision.call == _CLOSE:
                self._closing = True
            elif decision.call:
                self._calls[decision.call].popleft()()

    def _lost(self, error: Exception) -> None:
        """End the loop with an error: the first rank does not decide any more."""
        raise error
