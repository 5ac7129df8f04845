"""The vLLM rollout over an engine with vLLM's layout: recorded loaders, syncs, sleeps, refusals.

Tests with vLLM itself are in test_hosted_gpu.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from memsaver import LeaseError, StateError, attach
from rollout import SamplingParams
from rollout.actor import build_engine
from rollout.hosted import VllmRollout
from rollout.hosted.load_recorder import boxes, record
from rollout.hosted.vllm import vllm_params
from rollout.tag_names import KV_CACHE, WEIGHTS
from tests.helpers.rollout.fused import KINDS, FusedEngine, loaded, random_directory, same
from trainer_bridge import LoraConfig, Trainer, TrainerConfig


@pytest.fixture
def make(tmp_path: Path, device: str) -> Iterator[Callable[..., tuple[VllmRollout, str]]]:
    made: list[FusedEngine] = []

    def build(kind: str = "qwen3", **overrides: Any) -> tuple[VllmRollout, str]:
        path = random_directory(tmp_path / f"{kind}{len(made)}", kind, **overrides)
        shape = KINDS.get(kind, {})
        made.append(FusedEngine(AutoConfig.from_pretrained(path), device, **shape))
        return VllmRollout(made[-1], path), path  # type: ignore[arg-type]

    yield build
    for engine in made:
        engine.close()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [*KINDS, "qwen3_moe"])
def test_sync_writes_the_same_bytes_as_the_loader(
    make: Callable[..., tuple[VllmRollout, str]], device: str, kind: str, tied: bool
) -> None:
    if kind == "qwen3_moe" and tied:
        pytest.skip("one of the two cases is enough with experts")
    overrides = {} if kind == "qwen3_moe" else {"tie_word_embeddings": tied}
    rollout, path = make(kind, **overrides)
    config = TrainerConfig(model_path=path, device=device, random_init=True, threads=1)
    trainer = Trainer(config)
    expected = loaded(rollout.engine, trainer.shards())
    with pytest.raises(AssertionError):
        same(rollout.engine.model, expected)
    if kind == "qwen3_moe":
        assert all(".experts" not in p.name or p.shape[0] == 4 for p in rollout.manifest.slices)
    trainer.connect([rollout])
    receipt = trainer.sync_weights(3)
    same(rollout.engine.model, expected)
    assert receipt.digests == (rollout.digest(),)
    assert rollout.served_version() == rollout.weights_version == 3
    trainer.close()


def synced(rollout: VllmRollout, path: str, device: str, version: int = 1) -> Trainer:
    trainer = Trainer(TrainerConfig(model_path=path, device=device, random_init=True, threads=1))
    trainer.connect([rollout])
    trainer.sync_weights(version)
    return trainer


@pytest.mark.parametrize("place", ["refill_kv_state", "buffers"])
def test_next_calls_complete_a_wake_up_that_failed_halfway(
    make: Callable[..., tuple[VllmRollout, str]],
    device: str,
    place: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Interrupt a wake-up when its tags are awake and their content is incomplete.

    The next sync rewrites the buffers, and the next `generate` the data next to the KV cache.
    """
    rollout, path = make()
    trainer = synced(rollout, path, device)
    engine: Any = rollout.engine
    tables, cache = engine.tables.clone(), engine.model.cos_sin_cache.clone()
    rollout.sleep(2)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        owner = engine if place == "refill_kv_state" else torch.Tensor
        patched.setattr(owner, place if owner is engine else "copy_", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            rollout.wake_up()
    assert not any(map(rollout.saver.is_paused, (WEIGHTS, KV_CACHE)))
    reason = str(rollout.unavailable_reason())
    assert ("'weights' was discarded" in reason) == (place == "buffers")
    trainer.sync_weights(2)
    assert rollout.make_ready() is None
    assert torch.equal(engine.tables, tables)
    assert torch.equal(engine.model.cos_sin_cache, cache)
    assert rollout.unavailable_reason() is None
    trainer.close()


def test_refused_sleep_changes_nothing(
    make: Callable[..., tuple[VllmRollout, str]], device: str
) -> None:
    rollout, path = make()
    trainer = synced(rollout, path, device)
    model: Any = rollout.engine.model
    with attach(rollout.saver.share(WEIGHTS)), pytest.raises(LeaseError):
        rollout.sleep(2)
    assert rollout.unavailable_reason() is None and rollout.served_version() == 1
    model.cos_sin_cache.fill_(3)  # after the refusal
    rollout.sleep(2)
    rollout.wake_up()
    assert bool((model.cos_sin_cache == 3).all())
    trainer.close()


def test_unfinished_requests_refuse_sleep_and_update_or_are_aborted(
    make: Callable[..., tuple[VllmRollout, str]],
) -> None:
    rollout, _ = make()
    rollout.store.define(1)
    rollout.submit([1, 2], SamplingParams(n=2))
    for unfinished in ("refuse", "recompute"):
        with pytest.raises(StateError, match=r"cannot sleep with unfinished requests \[0\]"):
            rollout.sleep(1, unfinished=unfinished)
    with pytest.raises(StateError, match="cannot begin a weight update with unfinished requests"):
        rollout.begin_update(2)
    with pytest.raises(ValueError, match="unfinished='wait' must be one of"):
        rollout.sleep(1, unfinished="wait")  # type: ignore[arg-type]
    assert rollout.unavailable_reason() is None and rollout.unfinished == [0]
    rollout.sleep(1, unfinished="abort")
    assert [output.finish_reason for output in rollout.step()] == ["abort", "abort"]
    rollout.wake_up()
    rollout.begin_update(2)


def test_sampling_parameters_with_other_log_probs_are_refused() -> None:
    for wrong, words in {
        SamplingParams(top_k=3): "top_k=0 and top_p=1",
        SamplingParams(top_p=0.9): "top_k=0 and top_p=1",
        SamplingParams(temperature=0.005): "at least 0.01",
        SamplingParams(beam_width=2): "beam_width=2: vLLM only samples",
        SamplingParams(adapter="a"): "adapter=.a.: vLLM serves merged",
        SamplingParams(forced=(2,)): r"forced=\(2,\): vLLM only samples",
    }.items():
        with pytest.raises(ValueError, match=words):
            vllm_params(wrong, [])


def test_stop_token_ids_include_the_models_own_unless_ignored() -> None:
    own = vllm_params(SamplingParams(stop_token_ids=(7,)), [2, 3])
    assert own["stop_token_ids"] == [2, 3, 7] and own["ignore_eos"] is True
    assert vllm_params(SamplingParams(ignore_eos=True), [2])["stop_token_ids"] == []


# ---------------------------------------------------------------- the load recorder


class Loads(nn.Module):
    """A model with one parameter [8, 4] and the given loader."""

    def __init__(self, loader: Callable[[nn.Parameter, Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4), requires_grad=False)
        self.loader = loader

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in tensors:
            self.loader(self.weight, tensor)


def halves(weight: Tensor, tensor: Tensor) -> None:
    """Load a checkpoint that interleaves gate and up rows."""
    pairs = tensor.view(4, 2, 4)
    weight[:4].data.copy_(pairs[:, 0])
    weight[4:].data.copy_(pairs[:, 1].to(torch.float32))


def one_by_one(weight: Tensor, tensor: Tensor) -> None:
    torch._foreach_copy_(list(weight.data), list(tensor.contiguous().unbind()))


def reordered(weight: Tensor, tensor: Tensor) -> None:
    weight.data.copy_(tensor.view(2, 4, 4).transpose(0, 1).reshape(4, 2, 4).view(8, 4))


PLAIN: dict[str, Callable[[Any, Any], object]] = {
    "whole": lambda weight, tensor: weight.data.copy_(tensor),
    "flat": lambda weight, tensor: weight.data.view(-1).copy_(tensor.reshape(-1)),
    "halves": halves,
    "rows": one_by_one,
    "columns": lambda weight, tensor: weight.data.view(8, 2, 2).copy_(tensor.view(8, 2, 2)),
    "swapped": lambda weight, tensor: (
        weight.data.copy_(tensor.view(2, 4, 4)[[1, 0]].view(8, 4))
        if not tensor.is_meta
        else [weight[4:].data.copy_(tensor[:4]), weight[:4].data.copy_(tensor[4:])]
    ),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_recorded_boxes_reproduce_what_the_loader_writes(kind: str) -> None:
    model = Loads(PLAIN[kind])
    recording = record(model.load_weights, model, {"w": (8, 4)})
    assert torch.equal(model.weight, torch.ones(8, 4)), "the recording wrote"
    source = torch.arange(32.0).view(8, 4)
    model.load_weights([("w", source)])
    written = torch.full((32,), -1.0)
    for landed in recording.landed:
        for box in boxes(landed, (8, 4)):
            at = (landed.address - model.weight.data_ptr()) // 4 + box.offset
            ranges = (slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            written.as_strided(box.shape, box.steps, at).copy_(source[tuple(ranges)])
    assert torch.equal(written.view(8, 4), model.weight)


def put_another(weight: Any, tensor: Any) -> None:
    weight.data = torch.zeros(8, 4)


WRONG: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "scaled": (lambda weight, tensor: weight.data.copy_(tensor * 2), "copies computed values"),
    "added": (lambda weight, tensor: weight.data.add_(1), "aten.add_"),
    "filled": (lambda weight, tensor: weight.data.fill_(1), "fills a part"),
    "read": (lambda weight, tensor: weight.data.fill_(tensor.sum().item()), "does more than copy"),
    "replaced": (put_another, "another tensor in its place"),
    "as integers": (lambda weight, tensor: weight.data.copy_(tensor.to(torch.int8)), "computed"),
    "reordered": (reordered, "does more than copy"),
    "transposed": (lambda weight, tensor: weight.data.copy_(tensor.view(4, 8).t()), "transposes"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_loader_that_does_more_than_copy_is_refused_by_parameter_name(kind: str) -> None:
    loader, words = WRONG[kind]
    model = Loads(loader)
    with pytest.raises(ValueError, match=words) as error:
        for landed in record(model.load_weights, model, {"w": (8, 4)}).landed:
            list(boxes(landed, (8, 4)))
    assert "w" in str(error.value) and "engine.kind=native" in str(error.value)


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (lambda weight, tensor: weight[:4].data.copy_(tensor[:4]), "takes 4 of the 48 elements"),
        (lambda weight, tensor: None, "takes 0 of the 48 elements"),
        (
            lambda weight, tensor: [weight.data.copy_(tensor) for _ in range(2)],
            "takes 96 of the 48",
        ),
    ],
)
def test_parameter_that_is_loaded_partly_or_twice_is_refused(
    make: Callable[..., tuple[VllmRollout, str]], loader: Callable[..., object], words: str
) -> None:
    rollout, path = make()
    model: Any = rollout.engine.model
    model.loaders["model.norm.weight"] = loader
    with pytest.raises(ValueError, match=f"{words}.* of model.norm.weight"):
        VllmRollout(rollout.engine, path)


def test_build_engine_refuses_unknown_kinds_and_other_gpus() -> None:
    with pytest.raises(ValueError, match="kind='trtllm' must be one of native, vllm"):
        build_engine("trtllm", {})
    with pytest.raises(ValueError, match="uses its first GPU"):
        build_engine("vllm", {"path": ".", "device": "cuda:1"})


def test_second_sync_of_a_lora_trainer_writes_adapted_parameters_only(
    make: Callable[..., tuple[VllmRollout, str]], device: str
) -> None:
    rollout, path = make()
    lora = LoraConfig(rank=2, alpha=4.0, target_modules=("q_proj", "up_proj"))
    trainer = Trainer(
        TrainerConfig(model_path=path, device=device, random_init=True, lora=lora, threads=1)
    )
    trainer.connect([rollout])
    whole = trainer.sync_weights(1)
    before = {name: tensor.clone() for name, tensor in rollout.engine.model.state_dict().items()}
    with torch.no_grad():
        for param in trainer.model.parameters():
            if param.requires_grad:
                param.add_(0.5)
    part = trainer.sync_weights(2)
    assert part.nbytes < whole.nbytes and rollout.served_version() == 2
    changed = {
        name
        for name, tensor in rollout.engine.model.state_dict().items()
        if not torch.equal(tensor, before[name])
    }
    assert {name.split("/")[-2] for name in changed} == {"qkv_proj", "gate_up_proj"}
    trainer.close()
