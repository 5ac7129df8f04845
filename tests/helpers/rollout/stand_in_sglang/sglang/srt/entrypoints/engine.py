import asyncio
import signal
import tempfile
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from sglang.srt.managers.io_struct import Socket
from sglang.srt.managers.scheduler import run_scheduler_process
from sglang.srt.plugins import load_plugins
from tests.helpers.peers import server


class Engine:
    run_scheduler_process_func: Callable[..., None] = staticmethod(run_scheduler_process)

    def __init__(self, **kwargs: Any) -> None:
        load_plugins()
        signal.signal(signal.SIGQUIT, kwargs.get("custom_sigquit_handler", signal.SIG_DFL))
        options, ports = SimpleNamespace(**{"tp_size": 1, **kwargs}), SimpleNamespace()
        ports.meeting = f"file://{tempfile.mkdtemp()}/meet"
        self.processes, ready = [], []
        for rank in range(options.tp_size):
            pipes = server.Pipe(), server.Pipe()
            process = server.Process(
                target=self.run_scheduler_process_func,
                args=(options, ports, 0, rank, pipes[0][1], pipes[1][1]),
                daemon=True,
            )
            process.start()
            self.processes.append(process)
            for _, theirs in pipes:
                theirs.close()
            ready.append(pipes[1][0])
            if rank == 0:
                rpc, self.requests = pipes[0][0], pipes[1][0]
        try:
            for work in ready:
                work.recv()
        except EOFError:
            raise RuntimeError("Rank 0 scheduler died during initialization") from None
        self.others = ready[1:]
        self.send_to_rpc: Any = Socket(rpc)
        self.loop = asyncio.new_event_loop()
        self.tokenizer_manager = SimpleNamespace(
            auto_create_handle_loop=self.handle,
            abort_request=self.abort,
            _subprocess_watchdog=SimpleNamespace(stop=lambda: None),
        )
        self.aborted, self.turn = asyncio.Event(), asyncio.Lock()

    def handle(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        for number in (signal.SIGTERM, signal.SIGQUIT):
            self.loop.add_signal_handler(number, lambda: None)

    def abort(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborted.set()

    async def async_generate(
        self,
        prompt: Any = None,
        sampling_params: Any = None,
        input_ids: Any = None,
        return_logprob: bool = False,
        stream: bool = False,
    ) -> Any:
        """Answer a prompt; requests for 100 tokens or more wait until they are aborted."""
        if stream:
            return self.stream(input_ids, sampling_params)
        params = dict(sampling_params)
        if params["max_new_tokens"] >= 100:
            await self.aborted.wait()
            params["max_new_tokens"] = 1
        async with self.turn:
            self.requests.send(("answer", input_ids, params))
            while not self.requests.poll():
                await asyncio.sleep(0.001)
            answer = self.requests.recv()
        return answer if params["n"] == 1 else [answer] * params["n"]

    async def stream(self, prompts: list[list[int]], params: list[dict[str, Any]]) -> Any:
        """Yield the beginning of every answer, then each answer when it ends."""
        tasks: dict[asyncio.Task[Any], int] = {}
        try:
            for index, (prompt, fields) in enumerate(zip(prompts, params, strict=True)):
                yield {"index": index, "meta_info": {"finish_reason": None}}
                request = self.async_generate(input_ids=prompt, sampling_params=fields)
                tasks[asyncio.create_task(request)] = index
            while tasks:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield {**task.result(), "index": tasks.pop(task)}
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def get_all_child_pids(self) -> list[int]:
        return [process.pid or 0 for process in self.processes]

    def update_weights_from_tensor(self, tensors: list[tuple[str, Tensor]]) -> tuple[bool, str]:
        self.requests.send(("load", tensors))
        return self.requests.recv(), ""

    def shutdown(self) -> None:
        for process in self.processes:
            process.kill()
