"""Adapters in the trainer: their merge, updates, memory, syncs, saved files and errors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from memsaver import StateError
from rollout import AdapterSlots, Completion, Engine, Output, SamplingParams
from rollout.engine.stepping import joined
from tests.helpers.case_selection import some
from tests.helpers.models import DEEPSEEK_MOE, MLA
from tests.helpers.trainer_bridge.models import (
    make_batch,
    reference,
    reference_logprobs,
    write_model,
)
from tests.helpers.trainer_bridge.reference_step import plain_adamw, plain_bits, plain_step
from tests.helpers.trainer_bridge.states import assert_same_bits, bits, weights
from tests.helpers.trainer_bridge.tolerance import (
    STABLE,
    assert_learned,
    assert_metrics,
    assert_scores,
)
from trainer_bridge import LoraConfig, PolicyLoss, SequenceBatch, Trainer
from trainer_bridge.sync.shards import local_shard
from trainer_bridge.sync.writer import LowRank

Make = Callable[..., Trainer]
LORA = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "o_proj", "down_proj"))
EXPERTS = LoraConfig(rank=8, alpha=16.0, target_modules=("q_proj", "experts"))
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5},
    "mixtral": {"num_local_experts": 3},
    "deepseek_v3": {**MLA, **DEEPSEEK_MOE, "head_dim": 8, "moe_intermediate_size": 24},
}


def merged(trainer: Trainer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Merge the adapters of a single rank by hand, and round once to `dtype`."""
    params: Any = dict(trainer.model.named_parameters())
    own = {name: param.detach().to_local() for name, param in params.items() if "lora_" not in name}
    for name in own:
        path = name.removesuffix(".weight") if name.endswith(".weight") else f"{name}_lora"
        if f"{path}.lora_a" in params:
            a, b = (params[f"{path}.lora_{x}"].detach().to_local().float() for x in "ab")
            own[name] = torch.add(own[name], b @ a, alpha=LORA.scale)
    return {name: value.to(dtype) for name, value in own.items()}


class PrecisionRecorder(TorchDispatchMode):
    """A mode that records the allowed precision of fp32 products when they are computed."""

    def __init__(self, device: str) -> None:
        super().__init__()
        on_gpu = torch.device(device).type == "cuda"
        self.products = (torch.backends.cuda if on_gpu else torch.backends.mkldnn).matmul
        self.seen: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.mm.out:
            self.seen.append(self.products.fp32_precision)
        return op(*args, **(kwargs or {}))


def test_merge_uses_full_precision_even_if_less_is_allowed(device: str) -> None:
    """Check the setting, too, because most CPUs compute in full precision anyway.

    The tolerance of a sum of 16 fp32 products is (16 + 2) roundings of 2^-24 of the terms.
    """
    base, b, a = (torch.randn(shape, device=device) for shape in ((64, 96), (64, 16), (16, 96)))
    before, mode = torch.get_float32_matmul_precision(), PrecisionRecorder(device)
    torch.set_float32_matmul_precision("medium")
    try:
        allowed = mode.products.fp32_precision
        with mode:
            LowRank(a=a, b=b, scale=2.0).rows(base, 0, 64, out := torch.empty_like(base))
        assert mode.products.fp32_precision == allowed != "ieee"
    finally:
        torch.set_float32_matmul_precision(before)
    assert mode.seen == ["ieee"]
    terms = base.double().abs() + 2 * b.double().abs() @ a.double().abs()
    assert (
        (out - (base.double() + 2 * b.double() @ a.double())).abs() <= 18 * 2**-24 * terms
    ).all()


@pytest.mark.parametrize("experts", [(), (5,)])
def test_merged_weights_are_rounded_once(experts: tuple[int, ...], device: str) -> None:
    """Allow half a unit of the sum, and 10 roundings of 2^-24 of the small product's terms.

    CPUs have special kernels for stacks as small as these.
    """
    draw = torch.Generator().manual_seed(0)
    base, b, a = (
        torch.randn(*experts, *shape, generator=draw).to(device) * size
        for shape, size in (((8, 6), 1.0), ((8, 8), 0.01), ((8, 6), 0.01))
    )
    out = torch.empty_like(base)
    LowRank(a=a, b=b, scale=2.0).rows(base, 0, len(base), out)
    exact = base.double() + 2 * b.double() @ a.double()
    unit = 2.0 ** (exact.abs().log2().floor() - 23)
    terms = 10 * 2**-24 * 2 * b.double().abs() @ a.double().abs()
    assert ((out - exact).abs() <= 0.5 * unit + terms).all()


@pytest.mark.parametrize("experts", [False, True])
def test_receipt_reports_share_of_adapters_lost_by_rounding(
    experts: bool, tmp_path: Path, make_trainer: Make
) -> None:
    """Compare with all rows (of experts, those of the first), which the sample covers here."""
    lora = dataclasses.replace(EXPERTS, target_modules=("experts",)) if experts else LORA
    family, fields = ("qwen3_moe", {"num_experts": 5}) if experts else ("qwen3", {})
    path = write_model(tmp_path, family, num_hidden_layers=1, **fields)
    trainer = make_trainer(path, lora=lora, param_dtype="bfloat16")
    engine = Engine.from_pretrained(path, kv_tokens=64, dtype=torch.bfloat16)
    trainer.connect([engine])
    assert trainer.sync_weights(1).merge_lost == 0.0  # b is zero
    named: Any = dict(trainer.model.named_parameters())
    factors = {name: param for name, param in named.items() if name.endswith("lora_b")}
    lossy, lost = [], []
    for version, size in ((2, 1e-5), (3, 1e-5), (4, 1.0)):
        for factor in factors.values():
            factor.detach().to_local().normal_(0, size, generator=torch.Generator().manual_seed(0))
        receipt = trainer.sync_weights(version)
        arrived = meant = 0.0
        for name, factor in factors.items():
            path_of = name.removesuffix(".lora_b")
            weight = path_of.removesuffix("_lora") if experts else f"{path_of}.weight"
            a = named[f"{path_of}.lora_a"].detach().to_local().double()
            move = lora.scale * factor.detach().to_local().double() @ a
            at = 0 if experts else slice(None)
            (stored,) = (piece for piece in engine.manifest.slices if piece.name == weight)
            served = engine.store.box(stored)
            base = trainer.shards()[weight].double()
            arrived += float(((served.double() - base) * move)[at].sum())
            meant += float(move[at].square().sum())
        assert receipt.merge_lost == pytest.approx(1 - arrived / meant, rel=1e-3, abs=1e-5)
        lost.append(receipt.merge_lost)
        lossy.append(receipt.lossy)
    assert lossy == [True, True, False] and lost[0] > 0.5 and abs(lost[2]) < 0.01


def plain_experts(path: str, trainer: Trainer) -> Any:
    """Build a plain mixture with the trainer's adapters, which computes one expert at a time."""
    model = reference(path)
    model.requires_grad_(False)
    for name, value in trainer.model.named_parameters():
        if name.endswith(("lora_a", "lora_b")):
            parent, _, last = name.rpartition(".")
            above, _, own = parent.rpartition(".")
            if not hasattr(model.get_submodule(above), own):  # adapters of a stack
                model.get_submodule(above).add_module(own, torch.nn.Module())
            start = torch.nn.Parameter(local_shard(value).cpu().clone())
            model.get_submodule(parent).register_parameter(last, start)
    for name, layer in model.named_modules():
        if name.endswith(".experts"):
            layer.forward = partial(one_by_one, layer)
        elif name.endswith(".q_proj"):
            layer.register_forward_hook(
                lambda own, x, y: y + EXPERTS.scale * (x[0] @ own.lora_a.T @ own.lora_b.T)
            )
    return model


def one_by_one(experts: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gate_up, down = (
        stack + EXPERTS.scale * lora.lora_b @ lora.lora_a
        for stack, lora in (
            (experts.gate_up_proj, experts.gate_up_proj_lora),
            (experts.down_proj, experts.down_proj_lora),
        )
    )
    out = torch.zeros_like(x)
    for expert in range(len(down)):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ gate_up[expert].T).chunk(2, -1)
        rows = (torch.nn.functional.silu(gate) * up) @ down[expert].T
        out = out.index_add(0, token, rows * weights[token, choice, None])
    return out


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("checkpointing", some("layers", whole=["none", "mlp"]))
def test_updates_of_expert_adapters_match_one_expert_at_a_time(
    checkpointing: str, family: str, device: str, tmp_path: Path, make_trainer: Make
) -> None:
    path = write_model(tmp_path, family, **MIXTURES[family])
    lora = EXPERTS
    if family == "deepseek_v3":
        lora = dataclasses.replace(EXPERTS, target_modules=("experts",))
    how = {"activation_checkpointing": checkpointing, "device": device}
    how |= {"loss": PolicyLoss(clip_high=0.3), "weight_decay": 0.1}
    trainer = make_trainer(path, lora=lora, **STABLE, **how)
    model = plain_experts(path, trainer)
    optimizer = plain_adamw(model, weight_decay=0.1)
    base = {name: shard.clone() for name, shard in trainer.shards().items()}
    for step in range(3):
        expected = plain_step(model, optimizer, make_batch(7, seed=step), 1.0)
        assert_metrics(trainer.update_actor(make_batch(7, seed=step)), expected)
    learned = {name: value.cpu() for name, value in bits(trainer).items()}
    assert_learned(learned, plain_bits(model, optimizer), 3)
    assert_same_bits(trainer.shards(), base)
    batch = make_batch(7)
    assert trainer.compute_log_prob(batch, base=True) != trainer.compute_log_prob(batch)
    with torch.no_grad():
        assert_scores(
            trainer.compute_log_prob(batch, base=True), reference_logprobs(reference(path), batch)
        )


def test_initial_factor_a_depends_on_seed_and_name_within_kaiming_bound(
    model_path: str, make_trainer: Make
) -> None:
    first, same, different = (make_trainer(model_path, lora=LORA, seed=seed) for seed in (0, 0, 1))
    assert_same_bits(bits(first), bits(same))
    start = {name: value for name, value in bits(first).items() if name.endswith("lora_a")}
    assert len(start) == 6
    for name, value in start.items():
        bound = 1 / math.sqrt(value.shape[1])
        assert 0.8 * bound < value.abs().max() <= bound
        assert not torch.equal(value, bits(different)[name])
        assert sum(torch.equal(value, factor) for factor in start.values()) == 1


def test_frozen_base_is_stored_in_the_compute_dtype(model_path: str, make_trainer: Make) -> None:
    """Expect masters and moments of adapters only."""
    trainer = make_trainer(model_path, lora=LORA, param_dtype="bfloat16")
    trainer.update_actor(make_batch(4))
    named = dict(trainer.model.named_parameters())
    small = sum(param.numel() for name, param in named.items() if "lora_" in name)
    whole = sum(param.numel() for name, param in named.items() if "lora_" not in name)
    tags = trainer.saver.report().tags
    assert tags.keys() == {"params", "adapters", "optim"}
    for tag, nbytes in {"params": 2 * whole, "adapters": 4 * small, "optim": 8 * small}.items():
        assert nbytes <= tags[tag].live_bytes < nbytes + 64 * len(named), tag
    assert {shard.dtype for shard in trainer.shards().values()} == {torch.bfloat16}
    assert {value.dtype for value in bits(trainer).values()} == {torch.float32}
    assert any((value != value.bfloat16()).any() for value in bits(trainer).values())
    assert trainer.optimizer.state.keys() == {
        param for name, param in named.items() if "lora_" in name
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_later_syncs_write_only_adapted_weights(
    dtype: str, model_path: str, make_trainer: Make
) -> None:
    trainer = make_trainer(model_path, lora=LORA, param_dtype=dtype)
    engine = Engine.from_pretrained(model_path, kv_tokens=64, dtype=getattr(torch, dtype))
    trainer.connect([engine])
    whole = sum(tensor.nbytes for tensor in weights(engine).values())
    size = getattr(torch, dtype).itemsize
    own = trainer.shards()
    changed = sum(
        shard.numel() for name, shard in own.items() if name.split(".")[-2] in LORA.target_modules
    )

    def check(version: int, nbytes: int) -> None:
        trainer.update_actor(make_batch(5, seed=version))
        assert trainer.sync_weights(version).nbytes == nbytes
        assert_same_bits(weights(engine), merged(trainer, getattr(torch, dtype)))

    assert trainer.sync_weights(1).nbytes == whole
    assert_same_bits(weights(engine), trainer.shards())  # b is zero
    check(2, changed * size)
    engine.sleep(level=1)
    engine.wake_up(["weights"])
    check(3, changed * size)
    engine.sleep(level=2)
    engine.wake_up(["weights"])
    check(4, whole)
    engine.abort_update("a fault")
    check(5, whole)
    trainer.connect([engine])  # a new connection does not know of earlier syncs
    check(6, whole)


def small_engine(path: str, **changes: Any) -> Engine:
    layers = ("q_proj", "o_proj", "down_proj")
    slots = AdapterSlots(**{"slots": 2, "rank": 4, "target_modules": layers, **changes})
    return Engine.from_pretrained(path, kv_tokens=256, adapters=slots, load_weights=False)


@pytest.mark.parametrize("alias", [False, True])
def test_served_adapters_are_synced_alone_and_answer_like_the_trainer(
    alias: bool, model_path: str, make_trainer: Make
) -> None:
    engine = small_engine(model_path)
    lora, layout = dataclasses.replace(LORA, served_as="policy"), engine.manifest
    trainer = make_trainer(model_path, lora=lora, layout=layout if alias else None)
    trainer.connect([engine])
    sync = trainer.alias_weights if alias else trainer.sync_weights
    whole = 0 if alias else sum(tensor.nbytes for tensor in trainer.shards().values())
    small = 4 * sum(p.numel() for name, p in trainer.model.named_parameters() if "lora_" in name)
    policy, prompt = SamplingParams(max_tokens=6, ignore_eos=True, adapter="policy"), [3, 1, 4]

    def answer(params: SamplingParams, version: int) -> Completion:
        ((sample,),) = engine.generate([prompt], params)
        assert sample.weight_versions == [version] * 6
        return sample

    def check(version: int, nbytes: int) -> None:
        trainer.update_actor(make_batch(5, seed=version))
        receipt = sync(version)
        assert receipt.nbytes == nbytes and receipt.merge_lost is None
        for base, params in ((False, policy), (True, replace(policy, adapter=None))):
            sample = answer(params, engine.weights_version if base else version)
            batch = SequenceBatch(prompt_ids=[prompt], response_ids=[sample.token_ids])
            assert_scores([sample.logprobs], trainer.compute_log_prob(batch, base=base))

    check(1, whole + small)
    check(2, small)
    if not alias:
        begun = engine.submit(prompt, policy)
        engine.step()
        assert sync(3).nbytes == small
        versions = [v for o in finish(engine) if o.id == begun for v in o.weight_versions]
        assert {*versions} == {2}, "a running request keeps its version"
    for version, level in ((4, 1), (5, 2)):
        engine.sleep(level=level)
        engine.wake_up(["kv_cache"] if alias else None)
        check(version, whole * (level == 2) + small)
    served = engine.report().tags["weights"]
    assert bool(served.aliased_bytes) == alias != bool(served.committed_bytes)


@pytest.mark.parametrize("how", ["refuse", "recompute", "keep"])
def test_sync_into_the_only_slot_does_with_running_requests_what_it_is_told(
    how: Any, model_path: str, make_trainer: Make
) -> None:
    trainer = make_trainer(model_path, lora=dataclasses.replace(LORA, served_as="policy"))
    engine = small_engine(model_path, slots=1)
    trainer.connect([engine])
    trainer.sync_weights(1)
    prompts = [[3, 1, 4], [1, 5, 9, 2]]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, adapter="policy")
    for prompt in prompts:
        engine.submit(prompt, params)
    outputs = [*engine.step(), *engine.step()]
    trainer.update_actor(make_batch(5))
    if how == "refuse":
        with pytest.raises(StateError, match="no slot is free for adapter 'policy'"):
            trainer.sync_weights(2, in_flight=how)
    else:
        trainer.sync_weights(2, in_flight=how)
    answers = [answer for (answer,) in joined([*outputs, *finish(engine)])]
    for answer in answers:
        versions = answer.weight_versions
        assert versions == sorted(versions) and versions[-1] == (1 if how == "refuse" else 2)
    if how == "recompute":  # what follows the first tokens is the new version's own choice
        for prompt, answer in zip(prompts, answers, strict=True):
            old = answer.weight_versions.count(1)
            ((again,),) = engine.generate([prompt + answer.token_ids[:old]], params)
            assert again.token_ids[: 6 - old] == answer.token_ids[old:]
    engine.check_integrity()


@pytest.mark.parametrize("stage", ["begin_update", "verify_update", "commit_update"])
@pytest.mark.parametrize("slots", [1, 2])
def test_failed_sync_leaves_the_last_version_where_it_has_a_slot_of_its_own(
    stage: str, slots: int, model_path: str, make_trainer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(model_path, lora=dataclasses.replace(LORA, served_as="policy"))
    engine = small_engine(model_path, slots=slots)
    trainer.connect([engine])
    trainer.sync_weights(1)
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=1, adapter="policy")
    before = engine.generate([[3, 1, 4]], params)
    trainer.update_actor(make_batch(5))
    call = getattr(engine, stage)

    def fails(*args: Any, **options: Any) -> Any:
        if options.get("adapter") is None:
            return call(*args, **options)
        raise RuntimeError("a fault")

    monkeypatch.setattr(engine, stage, fails)
    with pytest.raises(RuntimeError, match="a fault"):
        trainer.sync_weights(2)
    monkeypatch.undo()
    if slots == 2 or stage == "begin_update":
        assert engine.generate([[3, 1, 4]], params) == before
    else:
        with pytest.raises(StateError, match="adapters were discarded: policy"):
            engine.generate([[3, 1, 4]], params)
    trainer.sync_weights(3)
    ((answer,),) = engine.generate([[3, 1, 4]], params)
    assert answer.weight_versions == [3] * 4
    engine.check_integrity()


def finish(engine: Engine) -> list[Output]:
    outputs = list[Output]()
    while engine.unfinished:
        outputs += engine.step()
    return outputs


def test_adapters_that_engines_cannot_serve_are_refused(
    model_path: str, make_trainer: Make
) -> None:
    trainer = make_trainer(model_path, lora=dataclasses.replace(LORA, served_as="policy"))
    for engine, error, text in (
        (Engine.from_pretrained(model_path, kv_tokens=64), StateError, "has no slots for them"),
        (small_engine(model_path, rank=8), ValueError, r"lora_a.*\(4, .*\(8, "),
        (small_engine(model_path, target_modules=["q_proj"]), ValueError, "down_proj.lora_a"),
        (small_engine(model_path, target_modules=()), ValueError, "k_proj.lora_a"),
    ):
        with pytest.raises(error, match=text):
            trainer.connect([engine])
    with pytest.raises(ValueError, match="adapters of experts are merged; use served_as=None"):
        dataclasses.replace(EXPERTS, served_as="policy")


def test_unknown_adapter_targets_are_refused(model_path: str, make_trainer: Make) -> None:
    def targets(*names: str) -> LoraConfig:
        return dataclasses.replace(LORA, target_modules=names)

    with pytest.raises(
        ValueError, match="no linear layer is named k_porj, norm; known: down_proj, gate_proj"
    ):
        make_trainer(model_path, lora=targets("norm", "q_proj", "k_porj"))
    with pytest.raises(
        ValueError, match="lm_head shares its weight with another layer; leave it out"
    ):
        make_trainer(model_path, lora=targets("lm_head"))
    with pytest.raises(
        ValueError,
        match=r"LoraConfig.target_modules=\('a', 'a'\): name at least one layer, none twice",
    ):
        targets("a", "a")
    with pytest.raises(ValueError, match="no linear layer is named experts; known: down_"):
        make_trainer(model_path, lora=EXPERTS)
    with pytest.raises(ValueError, match="LoraConfig.rank=4: must be a multiple of 8"):
        targets("experts")
    with pytest.raises(ValueError, match="LoraConfig.rank=0: must be at least 1"):
        dataclasses.replace(LORA, rank=0)


def test_calls_that_need_or_exclude_adapters_are_refused(
    model_path: str, make_trainer: Make
) -> None:
    with pytest.raises(ValueError, match="base=True"):
        make_trainer(model_path).compute_log_prob(make_batch(2), base=True)
    with pytest.raises(ValueError, match="without adapters that are merged; omit it"):
        make_trainer(
            model_path, lora=LORA, layout=Engine.from_pretrained(model_path, kv_tokens=64).manifest
        )
