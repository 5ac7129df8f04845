"""Ranks of a prefill and a decode engine in separate processes over one gloo group."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from rollout import Completion, Engine, Output, SamplingParams
from rollout.engine.stepping import joined
from rollout.split import (
    GroupTransport,
    MappedTransport,
    PromptServer,
    RemotePrompts,
    Transport,
)

KEY = b"tests"
MODEL: dict[str, Any] = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}
TOKEN = 2 * 2 * 4 * 16 * 4  # bytes: keys and values of 2 layers, 4 KV heads of 16 fp32 elements
CONFIG: dict[str, Any] = {"kv_tokens": 512, "max_running": 32, "max_prefill_tokens": 48}


@dataclass(frozen=True, kw_only=True)
class Split:
    """One topology: the first processes are `prefill` ranks, the next ones `decode` ranks.

    The decode side's rings hold 40 tokens together, so that longer prompts come in parts.

    Attributes:
        path: Model directory.
        calls: (prompts, params) of each `generate`.
        prefill: Number of prefill ranks.
        decode: Number of decode ranks.
        mapped: Whether ranks write into mapped memory; otherwise they send by the group.
        prefill_config: Arguments of the prefill engine.
        decode_config: Arguments of the decode engine.
        on_loss: The decode engine's policy for lost prompts.
        nap: Whether the decode engine's cache sleeps once, with prompts under way.
        meddled: Whether another user of the saver discards the cache at that time.
        stepped: Whether prompts are submitted one by one between steps.
    """

    path: str
    calls: Sequence[tuple[list[list[int]], SamplingParams | list[SamplingParams]]]
    prefill: int = 1
    decode: int = 2
    mapped: bool = True
    prefill_config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    decode_config: dict[str, Any] = field(default_factory=lambda: CONFIG)
    on_loss: Any = "recompute"
    nap: bool = False
    meddled: bool = False
    stepped: bool = False


def run(rank: int, splits: list[Split], sockets: str) -> list[Any]:
    """Run all topologies; return this rank's results, None where it had no part."""
    groups: dict[tuple[int, int], Any] = {}  # of each pair of sizes; creating groups takes long
    for split in splits:
        if (split.prefill, split.decode) not in groups:
            groups[split.prefill, split.decode] = _groups(split)
    return [
        _take_part(rank, split, *groups[split.prefill, split.decode], f"{sockets}/{i}")
        for i, split in enumerate(splits)
    ]


def run_placed(rank: int, split: Split, sockets: str, devices: list[str], backend: str) -> Any:
    """Run one topology with each rank on its device; two sides may share a device."""
    device = torch.device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)  # before NCCL starts, which uses the current device
    placed = replace(
        split,
        prefill_config=split.prefill_config | {"device": device},
        decode_config=split.decode_config | {"device": device},
    )
    return _take_part(rank, placed, *_groups(split, backend), f"{sockets}/0")


def _take_part(rank: int, split: Split, prefill: Any, decode: Any, sockets: str) -> Any:
    addresses = [f"ipc://{sockets}.{peer}" for peer in range(split.decode)]
    if rank < split.prefill:
        ranks = list(range(split.prefill, split.prefill + split.decode))
        return serve(split, prefill, addresses, make_transport(split, ranks))
    if rank < split.prefill + split.decode:
        return generate(split, decode, addresses[rank - split.prefill])
    return None


def _groups(split: Split, backend: str = "gloo") -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    prefill = dist.new_group(list(range(split.prefill)), backend=backend)
    decode = dist.new_group(
        list(range(split.prefill, split.prefill + split.decode)), backend=backend
    )
    return prefill, decode  # type: ignore[return-value]


class Counted(Transport):
    """A transport that counts what its rank has sent to all peers."""

    requests = nbytes = 0

    def put(self, peer: int, staged: torch.Tensor, offset: int) -> None:
        self.requests += 1
        self.nbytes += staged.numel()
        super().put(peer, staged, offset)  # type: ignore[safe-super]


class CountedMapped(Counted, MappedTransport):
    pass


class CountedGroup(Counted, GroupTransport):
    pass


def make_transport(split: Split, peers: list[int]) -> Counted:
    return CountedMapped() if split.mapped else CountedGroup(peers)


def serve(
    split: Split, group: Any, addresses: list[str], transport: Counted, version: int = 0
) -> dict[str, Any]:
    engine = Engine.from_pretrained(
        split.path, tensor_parallel_size=split.prefill, group=group, **split.prefill_config
    )
    engine.store.define(version)
    PromptServer(engine, addresses, KEY, transport).serve()
    engine.check_integrity()
    return {
        "requests": transport.requests,
        "bytes": transport.nbytes,
        "stats": asdict(engine.stats),
    }


def generate(
    split: Split, group: Any, address: str, sources: list[int] | None = None, timeout: float = 60.0
) -> dict[str, Any]:
    """Run a decode rank through all calls.

    Args:
        split: The topology.
        group: Group of the decode ranks.
        address: Address of this rank's control socket.
        sources: The prefill ranks' numbers among all processes; None: the first ones.
        timeout: Seconds before a silent prefill rank counts as lost.
    """
    engine = Engine.from_pretrained(
        split.path, tensor_parallel_size=split.decode, group=group, **split.decode_config
    )
    prompts = RemotePrompts(
        engine,
        address,
        KEY,
        make_transport(split, sources or list(range(split.prefill))),
        prefill_ranks=split.prefill,
        ring_bytes=40 * TOKEN // split.decode,
        on_loss=split.on_loss,
        timeout=timeout,
    )
    error = None
    answers = []
    try:
        for batch, params in split.calls:
            if split.nap or split.meddled or split.stepped:
                answers.append(by_steps(engine, batch, params, split))
            else:
                answers.append(engine.generate(batch, params))
            engine.check_integrity()
    except RuntimeError as raised:
        error = f"{type(raised).__name__}: {raised}"
    reason = engine.unavailable_reason()
    prompts.close()
    return {
        "answers": answers, "split": prompts.stats, "stats": asdict(engine.stats),
        "error": error, "reason": reason, "outstanding": prompts.inbox.allocator.outstanding,
        "preemptions": engine.scheduler.preemptions,
    }  # fmt: skip


def by_steps(
    engine: Engine, prompts: list[list[int]], params: Any, split: Split
) -> list[list[Completion]]:
    """Submit a prompt before each step, or all at once and disturb the engine after a step."""
    outputs, waiting, rank = list[Output](), deque(prompts), engine.runner.ranks.rank
    if not split.stepped:
        while waiting and not rank:
            engine.submit(waiting.popleft(), params)
        outputs += engine.follow() if rank else engine.step()
    if split.nap:
        engine.sleep(unfinished="recompute", tags=["kv_cache"])
        engine.wake_up()
    if split.meddled:
        engine.saver.pause("kv_cache")
        engine.saver.resume("kv_cache")
    if rank:
        return joined([*outputs, *engine.follow()])
    with engine.leading():
        while waiting or engine.unfinished:
            if waiting:
                engine.submit(waiting.popleft(), params)
            outputs += engine.step()
            running = engine.scheduler.running
            assert not any(s.remote and s.output for s in running), "their prompts are here"
    return joined(outputs)


def tokens(answers: list[list[list[Completion]]]) -> list[Any]:
    """Return token ids as [call][prompt][sample]."""
    return [[[sample.token_ids for sample in request] for request in call] for call in answers]
