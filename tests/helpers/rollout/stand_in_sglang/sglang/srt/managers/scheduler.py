import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig

from sglang.srt.managers.io_struct import RpcReqInput, RpcReqOutput
from sglang.srt.plugins import load_plugins
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from tests.helpers.rollout.fused import FusedModel, Share


class Scheduler:
    def __init__(self, server_args: Any, tp_rank: int) -> None:
        self.server_args, self.tp_cpu_group = server_args, dist.group.WORLD
        if server_args.load_format == "broken":
            raise RuntimeError("no such weights")
        self.memory_saver_adapter: Any = TorchMemorySaverAdapter.create(
            enable=server_args.enable_memory_saver
        )
        self.max_total_num_tokens = min(server_args.max_total_tokens, 4096)
        self.max_req_len = min(server_args.context_length, self.max_total_num_tokens) - 1
        self.resets, self.busy = 0, 0

        def make(shape: tuple[int, ...]) -> nn.Parameter:
            drawn = torch.empty(shape, dtype=torch.bfloat16).normal_()
            return nn.Parameter(drawn, requires_grad=False)

        config = AutoConfig.from_pretrained(server_args.model_path)
        with self.memory_saver_adapter.region("weights", enable_cpu_backup=False):
            model = FusedModel(config, False, True, make, Share(tp_rank, server_args.tp_size))
        with self.memory_saver_adapter.region("kv_cache"):
            self.kv_cache = torch.empty(1 << 16, dtype=torch.uint8)
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))

    def is_fully_idle(self) -> bool:
        self.busy -= self.busy > 0
        return not self.busy

    def flush_cache(self, empty_cache: bool = True) -> bool:
        self.resets += 1
        return not self.busy

    def handle_rpc_request(self, recv_req: RpcReqInput) -> RpcReqOutput:
        getattr(self, recv_req.method)(**(recv_req.parameters or {}))
        if self.server_args.tp_size > 1:
            dist.barrier(self.tp_cpu_group)
        return RpcReqOutput(success=True, message="")

    def load(self, tensors: list[tuple[str, torch.Tensor]]) -> bool:
        self.tp_worker.model_runner.model.load_weights(tensors)
        return True

    def answer(self, prompt: list[int], params: dict[str, Any]) -> dict[str, Any]:
        self.busy = 3
        first = next(self.tp_worker.model_runner.model.parameters()).view(torch.int16)
        tokens = [
            int(first.view(-1)[at + sum(prompt)]) % 100 for at in range(params["max_new_tokens"])
        ]
        reason = {"type": "length"}
        for at, token in enumerate(tokens):
            if token in params["stop_token_ids"] and not params["ignore_eos"]:
                tokens, reason = tokens[: at + 1], {"type": "stop", "matched": token}
                break
        info = {"finish_reason": reason, "output_token_logprobs": [(-1.0, t, None) for t in tokens]}
        return {"output_ids": tokens, "meta_info": info}


def run_scheduler_process(
    server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, rpc: Connection, work: Connection
) -> None:
    """Serve (method, arguments) from `work` and requests from `rpc`, which rank 0 broadcasts."""
    load_plugins()
    ranks = server_args.tp_size
    if ranks > 1:
        dist.init_process_group(
            "gloo", init_method=port_args.meeting, rank=tp_rank, world_size=ranks
        )
    try:
        scheduler = Scheduler(server_args, tp_rank)
    except Exception:
        parent = multiprocessing.parent_process()
        assert parent is not None and parent.pid is not None
        os.kill(parent.pid, signal.SIGQUIT)
        raise
    work.send("ready")
    from multiprocessing.connection import wait

    while True:
        received: list[Any] = []
        if tp_rank == 0:
            received = [(ready is rpc, ready.recv()) for ready in wait([rpc, work])]
        if ranks > 1:
            everywhere = [received]
            dist.broadcast_object_list(everywhere)
            (received,) = everywhere
        for is_rpc, message in received:
            if is_rpc:
                answer: Any = scheduler.handle_rpc_request(message)
            else:
                answer = getattr(scheduler, message[0])(*message[1:])
            if tp_rank == 0:
                (rpc if is_rpc else work).send(answer)
