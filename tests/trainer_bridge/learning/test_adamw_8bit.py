"""AdamW with moments in 8 bits: against bitsandbytes' own, fp64 bounds, offloads, checkpoints."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from memsaver import StateError
from memsaver.ops.layout import round_up
from tests.helpers.trainer_bridge.models import config, make_batch, value_batch, write_model
from tests.helpers.trainer_bridge.states import assert_same_bits, copied
from trainer_bridge import CriticConfig, LoraConfig, Trainer, TrainerConfig
from trainer_bridge.learning import adamw_8bit
from trainer_bridge.models.files.moments_8bit import (
    code_tables,
    moment_specs,
    requantize,
    zero_code,
)
from trainer_bridge.offload import offloaded_bytes
from trainer_bridge.sync.shards import local_shard

EIGHT: dict[str, Any] = {"optimizer": "adamw_8bit"}
# Matrices of 128 x 64 and 64 x 64, whose halves begin at a block; those of the MLP, of 101 rows or
# columns, whose last block and halves are odd; and two that are too small.
SHAPE = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 101, "num_hidden_layers": 1}
Make = Callable[..., Trainer]


@pytest.fixture(scope="module", autouse=True)
def bitsandbytes() -> Any:
    """Import the library here, which takes 4 s, not in each process that collects this file."""
    return pytest.importorskip("bitsandbytes")  # GPU machines may lack it


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(Path(tmp_path_factory.mktemp("model")), **SHAPE)


def state(side: Any) -> dict[str, Tensor]:
    """Copy this rank's trained shards and moments of a policy or a critic to the CPU."""
    held, model = {}, getattr(side, "policy", side)
    for name, param in model.module.named_parameters():
        if param.requires_grad:
            moments = model.optimizer.state[param].items()
            held |= {f"{name}.{key}": tensor for key, tensor in moments if key != "step"}
            held[name] = param
    return {name: local_shard(tensor).cpu().clone() for name, tensor in held.items()}


def dequantized(codes: Tensor, scales: Tensor, moment: str) -> tuple[Tensor, Tensor]:
    """Return the values of a shard's codes, and the scale of each."""
    of_elements = scales.flatten().repeat_interleave(256)[: codes.numel()].view(codes.shape)
    return torch.tensor(code_tables()[moment])[codes.int()] * of_elements, of_elements


def half_gap(moment: str) -> float:
    """Return the largest distance to the nearest value of a table, as a share of the scale.

    The table of the first moment ends before -1. On the CPU, the value that bitsandbytes chooses is
    the nearest one within 3e-5, as measured.
    """
    values = torch.tensor(code_tables()[moment], dtype=torch.float64)
    ends = [float(values[0]) + 1] if moment == "exp_avg" else []
    return max([float(values.diff().max()) / 2, *ends]) + 5e-5


def all_states(trainer: Trainer) -> dict[str, Tensor]:
    critic = {} if trainer.critic is None else state(trainer.critic)
    return state(trainer) | {f"critic.{name}": value for name, value in critic.items()}


def quantized(trainer: Trainer) -> dict[str, bool]:
    params: Any = trainer.model.named_parameters()
    return {name: param.ndim > 1 and param.numel() >= 4096 for name, param in params}


def draws(trainer: Trainer, steps: int) -> Iterator[dict[str, Tensor]]:
    """Set drawn gradients, of magnitudes from 0.5 to 1.5, step by step, and yield copies."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(steps):
        grads = {}
        for name, param in trainer.model.named_parameters():
            noise = torch.rand(local_shard(param).shape, generator=draw, dtype=torch.float64)
            sign = torch.randint(0, 2, noise.shape, generator=draw) * 2 - 1
            grads[name] = ((noise + 0.5) * sign).to(param.dtype)
            given = grads[name].to(trainer.device)
            places = param.device_mesh, param.placements
            param.grad = DTensor.from_local(given, *places, run_check=False)
        yield grads
        trainer.optimizer.step()


@pytest.mark.parametrize("chunk", [1024, adamw_8bit.CHUNK])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_updates_equal_those_of_bitsandbytes_own_optimizer(
    bitsandbytes: Any,
    chunk: int,
    dtype: str,
    device: str,
    path: str,
    make_trainer: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adamw_8bit, "CHUNK", chunk)
    betas = (0.8, 0.9)
    how = {"betas": betas, "weight_decay": 0.1}
    trainer = make_trainer(path, dtype=dtype, device=device, **EIGHT, **how)
    params = {
        name: torch.nn.Parameter(local_shard(param).clone())
        for name, param in trainer.model.named_parameters()
    }
    groups = [
        {"params": [p for p in params.values() if (p.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    library = bitsandbytes.optim.AdamW8bit(groups, lr=1e-2, eps=1e-8, betas=betas)
    for number, grads in enumerate(draws(trainer, 4)):
        for name, param in params.items():
            param.grad = grads[name].to(device, copy=True)
        for optimizer in (trainer.optimizer, library):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + number)
        library.step()
    held = state(trainer)
    assert {True, False} == set(quantized(trainer).values())
    for name, in_8_bits in quantized(trainer).items():
        assert torch.equal(held[name], params[name].cpu()), name
        for number, moment in enumerate(("exp_avg", "exp_avg_sq"), 1):
            own = {
                key: torch.as_tensor(value).cpu()
                for key, value in library.state[params[name]].items()
            }
            codes = held[f"{name}.{moment}{'_codes' if in_8_bits else ''}"]
            assert torch.equal(codes, own[f"state{number}"])
            if in_8_bits:
                scales = held[f"{name}.{moment}_scales"].view(-1)
                assert torch.equal(scales, own[f"absmax{number}"])


@pytest.mark.parametrize("chunk", [1024, adamw_8bit.CHUNK])
def test_rows_without_gradient_keep_their_bits_until_they_get_one(
    chunk: int, device: str, path: str, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows share blocks with others; some get a gradient after the fourth step."""
    monkeypatch.setattr(adamw_8bit, "CHUNK", chunk)
    trainer = make_trainer(path, device=device, **EIGHT, weight_decay=0.0)
    params: Any = dict(trainer.model.named_parameters())
    before = {name: local_shard(param).clone() for name, param in params.items()}
    for number, _ in enumerate(draws(trainer, 9)):
        for name, param in params.items():
            local = local_shard(param)
            if number:
                assert torch.equal(local[::3], before[name][::3]), name
                assert (local[1::3] != before[name][1::3]).any(), name
                waited = torch.equal(local[2::3], before[name][2::3])
                assert waited == (number <= 4), name
            grad = local_shard(param.grad)
            grad[::3] = 0
            grad[2::3] *= number >= 4


@pytest.mark.gpu
def test_update_on_a_gpu_takes_no_memory_and_follows_the_current_stream(
    path: str, make_trainer: Make
) -> None:
    """Set gradients on another stream, after a pause, and read the result there."""
    plain, aside = (make_trainer(path, device="cuda:0", **EIGHT) for _ in range(2))
    for _ in draws(plain, 2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    assert torch.cuda.max_memory_allocated() == held
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for grads in draws(aside, 2):
            for param in aside.model.parameters():
                local_shard(param.grad).zero_()
            torch.cuda._sleep(1 << 27)
            for name, param in aside.model.named_parameters():
                local_shard(param.grad).copy_(grads[name])
        learned = state(aside)
    assert_same_bits(learned, state(plain))


def moment_bytes(params: Any) -> int:
    """Count bytes: each tensor begins at a multiple of 64, and the last one ends at one of 256."""
    total = 0
    for param in params:
        size = param.numel()
        parts = [4 * size]
        if param.ndim > 1 and size >= 4096:
            parts = [size, 4 * math.ceil(size / 256)]
        total += 2 * sum(round_up(nbytes, 64) for nbytes in parts)
    return total


def test_moments_are_offloaded_and_reloaded_with_their_tags(
    device: str, path: str, make_trainer: Make
) -> None:
    trainer = make_trainer(path, device=device, critic=CriticConfig(learning_rate=1e-2), **EIGHT)
    trainer.update_actor(make_batch(4))
    trainer.update_critic(value_batch(4))
    before, tags = all_states(trainer), trainer.saver.report().tags
    assert any(value.any() for name, value in before.items() if name.endswith("_codes"))
    assert trainer.critic is not None
    for tag, model in (("optim", trainer.model), ("critic_optim", trainer.critic.module)):
        held = tags[tag].live_bytes
        assert 0 <= held - moment_bytes(model.parameters()) < 256
        leaving = config(path, critic=CriticConfig(), leaving=(tag,), **EIGHT)
        slack = 4 * SHAPE["vocab_size"] * SHAPE["hidden_size"] if tag == "critic_optim" else 256
        assert abs(offloaded_bytes(leaving, 1)[tag] - held) <= slack
    moved = copied(trainer)
    trainer.offload("optim", "critic_optim")
    moved = copied(trainer) - moved
    assert 0 <= moved - tags["optim"].live_bytes - tags["critic_optim"].live_bytes < 1 << 12
    with pytest.raises(StateError, match="'optim', which is offloaded"):
        trainer.update_actor(make_batch(4))
    trainer.reload()
    assert_same_bits(all_states(trainer), before)


@pytest.mark.parametrize(
    "changes",
    [
        {"critic": CriticConfig(learning_rate=5e-3)},
        {"lora": LoraConfig(rank=64, alpha=64.0, target_modules=("q_proj", "up_proj"))},
    ],
)
def test_resumed_run_continues_bit_identical(
    changes: dict[str, Any], path: str, make_trainer: Make, tmp_path: Path
) -> None:
    first, second = (make_trainer(path, **changes, **EIGHT) for _ in range(2))

    def learn(trainer: Trainer, seed: int) -> list[dict[str, float]]:
        batch = value_batch(4, seed)
        critic = [] if trainer.critic is None else [trainer.update_critic(batch)]
        return [trainer.update_actor(batch), *critic]

    learn(first, 0)
    learn(first, 1)
    first.save_checkpoint(str(tmp_path / "step"))
    second.load_checkpoint(str(tmp_path / "step"))
    assert_same_bits(all_states(second), all_states(first))
    assert any(name.endswith("_codes") for name in all_states(second))
    assert learn(first, 2) == learn(second, 2)
    assert_same_bits(all_states(second), all_states(first))


@pytest.mark.parametrize("saved", ["adamw", "adamw_8bit"])
def test_checkpoint_of_the_other_optimizer_is_refused_and_changes_nothing(
    saved: str, path: str, make_trainer: Make, tmp_path: Path
) -> None:
    other = "adamw" if saved == "adamw_8bit" else "adamw_8bit"
    first, second = make_trainer(path, optimizer=saved), make_trainer(path, optimizer=other)
    first.update_actor(make_batch(4))
    first.save_checkpoint(str(tmp_path / "step"))
    before = state(second)
    rule = r"another model or optimizer, nothing was loaded: missing optim\.exp_avg"
    with pytest.raises(ValueError, match=rule):
        second.load_checkpoint(str(tmp_path / "step"))
    assert_same_bits(state(second), before)


def test_interrupted_update_is_refused_until_a_checkpoint_is_loaded(
    path: str, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("bitsandbytes.functional")
    trainer = make_trainer(path, critic=CriticConfig(), **EIGHT)
    trainer.save_checkpoint(str(tmp_path / "step"))
    before = all_states(trainer)
    update, calls = kernels.optimizer_update_8bit_blockwise, []

    def interrupted(*args: Any, **kwargs: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        update(*args, **kwargs)

    for learn in (trainer.update_actor, trainer.update_critic):
        calls.clear()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(kernels, "optimizer_update_8bit_blockwise", interrupted)
            learn(value_batch(4))
        for call in (trainer.update_actor, trainer.update_critic, trainer.compute_log_prob):
            with pytest.raises(StateError, match="interrupted; .* call load_checkpoint"):
                call(value_batch(4))
        trainer.load_checkpoint(str(tmp_path / "step"))
        assert_same_bits(all_states(trainer), before)
        learn(value_batch(4))
        trainer.load_checkpoint(str(tmp_path / "step"))


def in_blocks(values: Tensor, moment: str) -> tuple[Tensor, Tensor]:
    """Quantize the moments of a shard as an update does."""
    kernels = pytest.importorskip("bitsandbytes.functional")
    table = torch.tensor(code_tables()[moment])
    codes, quantized = kernels.quantize_blockwise(values.contiguous(), code=table, blocksize=256)
    return codes, quantized.absmax


@contextlib.contextmanager
def mesh_of(ranks: int, rank: int) -> Iterator[DeviceMesh]:
    """Build a mesh of `ranks` ranks of which only this one exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


@settings(max_examples=40, deadline=None)
@given(
    old=st.integers(1, 5),
    new=st.integers(1, 5),
    shape=st.sampled_from([(101, 64), (4, 2048), (16, 8, 64), (3, 1500)]),
    dims=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    moment=st.sampled_from(["exp_avg", "exp_avg_sq"]),
)
def test_moments_of_other_shards_keep_their_bits_or_are_rounded_once(
    old: int, new: int, shape: tuple[int, ...], dims: tuple[int, int], moment: str
) -> None:
    """Expect the same values in blocks of one scale, and at most half a gap's difference in others.

    FSDP divides no dimension but the first unevenly.
    """
    olds, news = ([1] * len(shape) for _ in range(2))
    for parts, ranks, dim in zip((olds, news), (old, new), dims, strict=True):
        parts[dim if shape[dim] % ranks == 0 else 0] = ranks
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(old))
    whole = whole if moment == "exp_avg" else whole.square()
    whole.view(-1)[::7] = 0
    codes, values, old_scales = torch.empty(shape, dtype=torch.uint8), whole.clone(), whole.clone()
    scales = moment_specs(shape, shape, tuple(olds))[f"{moment}_scales"][0]
    stored = torch.zeros(*olds, scales[-1])
    for rank in range(old):
        dim = olds.index(old)
        part = whole.chunk(old, dim)
        if rank < len(part) and part[rank].numel():
            at = sum(piece.shape[dim] for piece in part[:rank])
            box = (slice(None),) * dim + (slice(at, at + part[rank].shape[dim]),)
            coded, maxima = in_blocks(part[rank], moment)
            codes[box] = coded.masked_fill(part[rank] == 0, zero_code(moment))
            stored.view(old, -1)[rank, : len(maxima)] = maxima
            values[box], old_scales[box] = dequantized(codes[box], maxima, moment)
    dim = news.index(new)
    for rank, expected in enumerate(values.chunk(new, dim)):
        name = f"optim.{moment}_scales.x"
        with mesh_of(new, rank) as mesh:
            local = codes.chunk(new, dim)[rank].clone()
            blocks = moment_specs(shape, tuple(local.shape), tuple(news))[f"{moment}_scales"][0]
            tensors = {
                key: DTensor.from_local(
                    part, mesh, [Shard(dim)], run_check=False, shape=size, stride=stride(size)
                )
                for key, part, size in (
                    (f"optim.{moment}_codes.x", local, shape),
                    (name, torch.zeros(blocks), (*news, blocks[-1])),
                )
            }
            requantize(tensors, name, stored)
            got, scale = dequantized(local, tensors[name].to_local(), moment)
        before = old_scales.chunk(new, dim)[rank]
        blocks_of = [part.flatten().split(256) for part in (got, expected, scale, before)]
        for ours, theirs, now, then in zip(*blocks_of, strict=True):
            if len(then.unique()) == 1:
                assert torch.equal(ours, theirs) and torch.equal(now, then)
            assert ((ours - theirs).abs() <= half_gap(moment) * now).all()
            assert not ours[theirs == 0].any()


def stride(shape: Sequence[int]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def test_missing_package_and_optimizer_on_the_host_are_refused(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="optimizer='sgd': use one of adamw, adamw_8bit"):
        TrainerConfig(model_path=path, optimizer="sgd")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer_offload=True: needs optimizer='adamw'"):
        TrainerConfig(model_path=path, optimizer_offload=True, **EIGHT)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs bitsandbytes; run: pip install 'memsaver\[opt"):
        TrainerConfig(model_path=path, **EIGHT)
