"""A `sglang.Engine` with memory on memsaver's tags, and the calls to its schedulers' processes.

The schedulers have the weights, one scheduler per tensor-parallel rank. SGLang starts them by
`Engine.run_scheduler_process_func`, and calls `Scheduler.answer_memsaver` of all of them for
`collective_rpc` between two steps. Both are SGLang's own extension points; nothing of SGLang is
changed.
"""

import asyncio
import atexit
import contextlib
import functools
import importlib
import inspect
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from torch import nn

import memsaver.compat
from memsaver import MemorySaver, StateError
from memsaver.compat import require
from rollout import channel
from rollout.actor_base import ActorBase
from rollout.hosted.base import HostedEngine, HostedRollout, Request

_SIGNALS = (signal.SIGTERM, signal.SIGQUIT)
_NEVER = 1 << 30  # tokens: an answer is streamed only at its beginning and at its end
Outputs = asyncio.Future[list[dict[str, Any]]]
Answers = Iterable[tuple[int, Any]]
"""Pairs of a request's number and the outputs of its samples."""
OnStep = Callable[[Answers], None]
Prompts = Sequence[Sequence[int]]
_IO = "sglang.srt.managers.io_struct"
ANSWER = "answer_memsaver"
_SCHEDULER = "sglang.srt.managers.scheduler"
# These methods leave the weights where `load_weights` puts them.
_PLAIN_METHODS = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
_EXPERTS = "UnquantizedFusedMoEMethod"
_REPACKING = ("use_flashinfer_trtllm_moe", "use_triton_kernels")


class SglangEngine:
    """A `sglang.Engine` with one scheduler per tensor-parallel rank, in other processes.

    Attributes:
        size: Number of schedulers.
        seeded: Whether a request's seed has an effect.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        """Start the engine and its schedulers, with options of `sglang.Engine`.

        Raises:
            ValueError: The package is not installed, or the options divide the engine by other
                means than tensor parallelism.
            RuntimeError: A scheduler ended during its start.
        """
        require("sglang")
        _require_one_replica(options)
        self.size: int = options.get("tp_size", 1)
        memsaver.compat.hook_sglang()
        # sglang.Engine is a lazy proxy of this class, and cannot be subclassed.
        engine = importlib.import_module("sglang.srt.entrypoints.engine").Engine
        self._io = importlib.import_module(_IO)
        pipes = [multiprocessing.get_context("spawn").Pipe() for _ in range(self.size)]
        self._channels, theirs = [own for own, _ in pipes], [their for _, their in pipes]
        start = staticmethod(functools.partial(run_scheduler, theirs))
        kind = type("Engine", (engine,), {"run_scheduler_process_func": start})
        with _own_signals():
            own = {"enable_memory_saver": True, "custom_sigquit_handler": _ignore_end}
            self.engine: Any = kind(**own, **options)
            for end in theirs:  # only its scheduler keeps it open, so its end closes the pipe
                end.close()
            self._manager: Any = self.engine.tokenizer_manager
            self.engine.loop.run_until_complete(self._listen())
        # Readable when a scheduler has ended. The loop needs descriptors that are not the
        # channels', because it makes the descriptors that it watches non-blocking.
        pids = self.engine.get_all_child_pids()[: self.size]
        self._processes = [os.pidfd_open(pid) for pid in pids]
        # SGLang's handler would end this process, with the trainer in it, when a scheduler ends.
        self._before = signal.signal(signal.SIGQUIT, _ignore_end)
        self.seeded = bool(options.get("enable_deterministic_inference"))

    async def _listen(self) -> None:
        """Start the engine's loop that receives answers, without SGLang's signal handlers."""
        self._manager.auto_create_handle_loop()
        for number in _SIGNALS:
            self.engine.loop.remove_signal_handler(number)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of every scheduler, and return the result of rank 0; see `exchange`."""
        return self.call_all(method, *args, **kwargs)[0]

    def call_all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every scheduler, and return the results by rank; see `exchange`."""
        return self.exchange([(method, args, kwargs)] * self.size)

    def call_rank(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one scheduler, and return its result; see `exchange`."""
        calls: list[channel.Call | None] = [None] * self.size
        calls[rank] = method, args, kwargs
        return self.exchange(calls)[rank]

    def exchange(self, calls: Sequence[channel.Call | None]) -> list[Any]:
        """Make one call per scheduler, or none, together between two steps of the engine.

        The methods are those of a scheduler's `SchedulerSide`, or of its `HostedRollout`. Arguments
        are pickled. The first error of a method is raised here once all have returned. A StateError
        says that a scheduler has ended.
        """
        try:
            for end, call in zip(self._channels, calls, strict=True):
                channel.send_call(end, call)
            self._io.sock_send(self.engine.send_to_rpc, self._io.RpcReqInput(method=ANSWER))
            answers = [self._received(end) for end in self._channels]
            while not self.engine.send_to_rpc.poll(1000):  # ms, until all have passed a barrier
                self._check_processes()
        except (EOFError, OSError) as error:
            raise _ended_error() from error
        self._io.sock_recv(self.engine.send_to_rpc)
        failed = [(rank, answer) for rank, (good, answer) in enumerate(answers) if not good]
        if failed:
            rank, first = failed[0]
            if self.size > 1:
                first.add_note(f"raised by the scheduler of rank {rank} of {self.size}")
            raise first
        return [answer for _, answer in answers]

    def _received(self, end: Connection) -> tuple[bool, Any]:
        if end not in wait([end, *self._processes]):
            self._check_processes()
        return channel.receive_answer(end)

    def _check_processes(self) -> None:
        if wait(self._processes, 0):
            raise EOFError("a scheduler has ended")

    def run(self, prompts: Prompts, params: Sequence[Request], on_step: OnStep) -> None:
        """Answer the prompts. After an error, no request is left in the engine.

        `params` has the sampling parameters of one SGLang request per prompt. `on_step` receives
        (number, outputs of all samples) of the prompts that have ended. A StateError says that the
        scheduler has ended.
        """
        loop = self.engine.loop
        ended = loop.create_future()
        for process in self._processes:
            loop.add_reader(process, ended.cancel)
        answers: list[Outputs] = [loop.create_future() for _ in prompts]
        waiting = {answer: number for number, answer in enumerate(answers)}
        left = {loop.create_task(task) for task in self._requests(prompts, params, answers)}
        try:
            while waiting:
                either = asyncio.wait({*waiting, *left, ended}, return_when=asyncio.FIRST_COMPLETED)
                done, _ = loop.run_until_complete(either)
                if ended in done:
                    raise _ended_error()
                for task in done & left:
                    task.result()  # raises the task's error, if any
                left -= done
                ended_now = done & waiting.keys()
                on_step([(waiting.pop(answer), answer.result()) for answer in ended_now])
        except BaseException:
            loop.run_until_complete(self._abort(left, ended))
            raise
        finally:
            for process in self._processes:
                loop.remove_reader(process)
            while not ended.done() and not all(self.call_all("is_idle")):
                time.sleep(0.001)  # a scheduler runs one more step after the last answer

    def _requests(
        self, prompts: Prompts, params: Sequence[Request], answers: Sequence[Outputs]
    ) -> Iterable[Coroutine[Any, Any, None]]:
        """Return the coroutines that request all answers.

        If each prompt has one sample, all prompts go in one message, so that the first batch does
        not depend on their arrival times. With several samples per prompt, SGLang first caches each
        prompt's prefix and then schedules its samples.
        """
        if all(request["n"] == 1 for request in params):
            return [self._generate_together(prompts, params, answers)]
        return map(self._generate_one, prompts, params, answers)

    async def _generate_one(
        self, prompt: Sequence[int], params: dict[str, Any], answer: Outputs
    ) -> None:
        output = await self.engine.async_generate(
            input_ids=list(prompt), sampling_params=params, return_logprob=True
        )
        answer.set_result(output if isinstance(output, list) else [output])

    async def _generate_together(
        self, prompts: Prompts, params: Sequence[Request], answers: Sequence[Outputs]
    ) -> None:
        outputs = await self.engine.async_generate(
            input_ids=list(map(list, prompts)),
            sampling_params=[{**request, "stream_interval": _NEVER} for request in params],
            return_logprob=True,
            stream=True,
        )
        async for output in outputs:
            if output["meta_info"]["finish_reason"] is not None:
                answers[output["index"]].set_result([output])

    async def _abort(self, left: set[asyncio.Task[Any]], ended: asyncio.Future[None]) -> None:
        if ended.done():
            for task in left:
                task.cancel()
        else:
            self._manager.abort_request(abort_all=True)
        await asyncio.gather(*left, return_exceptions=True)

    def close(self) -> None:
        """End SGLang's processes, which releases their memory."""
        atexit.unregister(self.engine.shutdown)  # that would end all children of this process
        utils = importlib.import_module("sglang.srt.utils")
        self._manager._subprocess_watchdog.stop()
        for pid in self.engine.get_all_child_pids():
            utils.kill_process_tree(pid, wait_timeout=60)
        self.engine.send_to_rpc.close(linger=0)
        for end in self._channels:
            end.close()
        for process in self._processes:
            os.close(process)
        signal.signal(signal.SIGQUIT, self._before)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restore this process's signal handlers after the block, in which SGLang replaces them.

    Inside the block, the end of a scheduler raises an error and does not end this process.
    """
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_end(number: int, frame: object) -> None:
    """Ignore SGLang's signal that one of its processes has ended, which `call` and `run` detect."""


def _ended_error() -> StateError:
    return StateError(
        "SGLang's scheduler has ended, and its weights with it; its log says why (log_level='info')"
        "; build a new engine"
    )


def _require_one_replica(options: dict[str, Any]) -> None:
    for name in ("dp_size", "pp_size", "nnodes"):
        if options.get(name, 1) != 1:
            raise ValueError(
                f"{name}={options[name]}: only tensor parallelism divides the weights; use 1, and "
                "tp_size"
            )


def run_scheduler(channels: Sequence[Connection], *args: Any, **kwargs: Any) -> None:
    """Run SGLang's `run_scheduler_process` with memory on tags and calls from this rank's channel.

    `channels` are those of all ranks. Other arguments are those of SGLang's function.
    """
    os.environ["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    memsaver.compat.hook_sglang()
    module = importlib.import_module(_SCHEDULER)
    bound = inspect.signature(module.run_scheduler_process).bind(*args, **kwargs)
    rank = bound.arguments["tp_rank"]
    for number, other in enumerate(channels):
        if number != rank:  # a channel must close when its scheduler ends
            other.close()
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    own = answering(module.Scheduler, channels[rank])
    hooks.HookRegistry.register(f"{_SCHEDULER}.Scheduler", own, hooks.HookType.REPLACE)
    module.run_scheduler_process(*args, **kwargs)


def answering(scheduler: type, calls: Connection) -> type:
    """Return a subclass of SGLang's scheduler whose method `answer_memsaver` answers one call."""

    def answer_memsaver(self: Any) -> None:
        if not hasattr(self, "memsaver_side"):
            self.memsaver_side = SchedulerSide(self)
        channel.answer_call(calls, self.memsaver_side)

    return type("Scheduler", (scheduler,), {ANSWER: answer_memsaver})


class SchedulerSide(ActorBase):
    """The scheduler's end of the channel; from `build` on, `held` is a rollout over its model."""

    held: HostedRollout

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def build(self, path: str, loaded: bool) -> tuple[int, int]:
        """Build the `HostedRollout`; its weights are version 0 if the engine has `loaded` them.

        Return the tokens of the KV cache, and the maximum tokens of prompt and answer together.
        """
        self.held = HostedRollout(HostedScheduler(self._scheduler), path)
        if loaded:
            self.held.store.define(0)
        return self._scheduler.max_total_num_tokens, self._scheduler.max_req_len - 1

    def is_idle(self) -> bool:
        return bool(self._scheduler.is_fully_idle())


class HostedScheduler(HostedEngine):
    """SGLang's scheduler as a `HostedEngine`, in the scheduler's process."""

    name = "SGLang"
    experts_option = "moe_runner_backend"
    graphs_need_content = False  # SGLang's own release of memory discards it, too

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        adapter = scheduler.memory_saver_adapter
        if not isinstance(saver := getattr(adapter, "saver", None), MemorySaver):
            raise StateError(
                f"SGLang's memory belongs to {type(adapter).__name__} and is not on memsaver's "
                "tags; pass enable_memory_saver=True, and disable plugins that replace the adapter"
            )
        self.saver = saver
        if scheduler.server_args.tp_size > 1:
            self.group = scheduler.tp_cpu_group
        self.model = scheduler.tp_worker.model_runner.model

    def tags_behind(self, tag: str) -> list[str]:
        """Return the saver's tags that make up an engine tag, one for each kind of content."""
        return [name for name in self.saver.tags if name.rpartition(":")[0] == tag]

    def is_plain(self, module: nn.Module) -> bool:
        method = getattr(module, "quant_method", None)
        kind, repacks = type(method).__name__, any(getattr(method, n, False) for n in _REPACKING)
        plain = kind in _PLAIN_METHODS or (kind == _EXPERTS and not repacks)
        return (method is None or plain) and not hasattr(module, "w_kc")

    def reset_prefix_cache(self) -> None:
        if not self._scheduler.flush_cache(empty_cache=False):
            raise StateError("SGLang's requests use keys of the present weights; let them finish")
