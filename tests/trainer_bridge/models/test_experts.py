"""Mixtures of experts in the trainer: updates with the load-balance loss, routers and syncs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from rollout import Engine, SamplingParams
from rollout.model import Routing
from tests.helpers.case_selection import some
from tests.helpers.models import DEEPSEEK_MOE, MLA, RELEASE
from tests.helpers.trainer_bridge.models import make_batch, reference, write_model
from tests.helpers.trainer_bridge.reference_step import plain_bits, plain_step
from tests.helpers.trainer_bridge.states import arrives, bits
from tests.helpers.trainer_bridge.tolerance import STABLE, assert_learned, assert_metrics
from trainer_bridge import PolicyLoss, SequenceBatch
from trainer_bridge.learning.batch import lay_out
from trainer_bridge.models.moe import NAME, expert_routers

COEFFICIENT = 0.5
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 5},
    "mixtral": {"num_local_experts": 5},
    "qwen3_next": {"num_experts": 5, "num_experts_per_tok": 2},
}


def balance_loss(model: Any, batch: SequenceBatch) -> Tensor:
    """Compute the loss by transformers, with all sequences padded to one length."""
    rows = [a + b for a, b in zip(batch.prompt_ids, batch.response_ids, strict=True)]
    length = max(map(len, rows))
    ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
    real = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    out = model(input_ids=ids, attention_mask=real, output_router_logits=True)
    assert torch.equal(out.router_logits[0].isfinite(), torch.ones_like(out.router_logits[0]) > 0)
    return COEFFICIENT * out.aux_loss


@pytest.mark.parametrize("checkpointing", ["layers", "mlp"])
def test_mixture_update_with_balance_loss_matches_transformers(
    checkpointing: str, device: str, tmp_path: Path, make_trainer: Any
) -> None:
    path = write_model(tmp_path, "qwen3_moe", num_experts=5, mlp_only_layers=[0])
    model = reference(path)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, eps=STABLE["adam_eps"], weight_decay=0.0
    )
    trainer = make_trainer(
        path,
        device=device,
        loss=PolicyLoss(clip_high=0.3),
        router_aux_loss_coef=COEFFICIENT,
        activation_checkpointing=checkpointing,
        micro_batch_size=64,
        **STABLE,
    )
    if RELEASE >= (5, 14):
        assert trainer.model.get_experts_implementation()[""] == NAME
    for step in range(2):
        batch = make_batch(7, seed=step)
        expected = plain_step(model, optimizer, batch, 1.0, balance_loss(model, batch))
        assert_metrics(trainer.update_actor(batch), expected)
    assert_learned(bits(trainer), plain_bits(model, optimizer), 2)


@pytest.mark.parametrize("family", some("qwen3_moe", "mixtral", whole=["qwen3_next"]))
def test_fp32_router_computes_in_fp32_on_both_sides(
    family: str, tmp_path: Path, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path, family, **MIXTURES[family])
    trainer = make_trainer(
        path, param_dtype="bfloat16", fp32_router=True, activation_checkpointing="layers"
    )
    equal = list[bool]()

    def look(router: torch.nn.Module, args: tuple[Tensor], out: tuple[Tensor, ...]) -> None:
        weight: Any = router.weight
        assert weight.dtype == args[0].dtype == torch.bfloat16
        x = args[0].flatten(0, -2)
        torch.testing.assert_close(out[0], F.linear(x.float(), weight.float()), rtol=0, atol=0)
        assert out[1].dtype == torch.float32
        equal.append(torch.equal(out[0], F.linear(x, weight).float()))

    routers = expert_routers(trainer.model)
    for router in routers:
        router.register_forward_hook(look)
    names = [name for name, _ in trainer.model.named_parameters() if name.endswith("gate.weight")]
    before = [trainer.shards()[name].clone() for name in names]
    trainer.update_actor(make_batch(4))
    assert len(equal) > len(routers) and not all(equal)  # the backward pass recomputes layers
    for name, old in zip(names, before, strict=True):
        assert not torch.equal(trainer.shards()[name], old)

    given = list[torch.dtype]()
    choose = Routing.choose

    def spied(routing: Routing, logits: Tensor, bias: Tensor | None = None) -> Any:
        choice = choose(routing, logits, bias)
        given.extend((logits.dtype, choice[1].dtype))
        return choice

    monkeypatch.setattr(Routing, "choose", spied)
    how = {"kv_tokens": 64, "page_size": 4, "dtype": torch.bfloat16, "fp32_router": True}
    engine = Engine.from_pretrained(path, **how)
    trainer.connect([engine])
    trainer.sync_weights(1)
    [[answer]] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))
    assert len(answer.token_ids) == 4 and set(given) == {torch.float32}


def test_experts_with_unaligned_widths_are_refused(tmp_path: Path, make_trainer: Any) -> None:
    path = write_model(tmp_path, "qwen3_moe", moe_intermediate_size=20)
    make_trainer(path)  # fp32
    with pytest.raises(ValueError, match=r"rows of 20 elements.* multiples of 8"):
        make_trainer(path, param_dtype="bfloat16")


def test_fp32_router_refuses_a_dense_model(model_path: str, make_trainer: Any) -> None:
    for make in (make_trainer, Engine.from_pretrained):
        with pytest.raises(ValueError, match="fp32_router=True is for mixtures of experts"):
            make(model_path, fp32_router=True)


def test_padding_and_fillers_are_excluded_from_load_balance() -> None:
    batch = SequenceBatch(prompt_ids=[[3, 4], [5]], response_ids=[[6, 7], [8]])
    padded = lay_out(batch, [0, -1, 1], torch.device("cpu"), 3, packed=False)
    assert padded.real.tolist() == [[True] * 4, [False] * 4, [True, True, False, False]]
    packed = lay_out(batch, [0, -1, 1], torch.device("cpu"), 3 * batch.max_length, packed=True)
    assert packed.real.tolist() == [[True] * 4 + [False] + [True] * 2 + [False]]


def test_balance_loss_refuses_a_dense_model(model_path: str, make_trainer: Any) -> None:
    with pytest.raises(ValueError, match="router_aux_loss_coef needs a mixture of experts"):
        make_trainer(model_path, router_aux_loss_coef=0.1)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_moe", {"num_experts": 9, "num_experts_per_tok": 1}),
        ("mixtral", {"num_local_experts": 3}),
        ("deepseek_v3", {**MLA, **DEEPSEEK_MOE, "head_dim": 8}),
        ("deepseek_v2", {**MLA, **DEEPSEEK_MOE, "head_dim": 8}),
        ("qwen3_next", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}),
    ],
)
def test_sync_writes_every_expert(
    family: str, changes: dict[str, Any], tmp_path: Path, make_trainer: Any
) -> None:
    """Include experts without a token; test_two_ranks.py runs two ranks."""
    path = write_model(tmp_path, family, **changes)
    assert arrives(make_trainer(path), path)


@pytest.mark.parametrize("files", [True, False])
def test_router_biases_stay_fp32(files: bool, tmp_path: Path, make_trainer: Any) -> None:
    """Expect the files' biases on both sides, or zeros for a random model, with bf16 weights."""
    fields = {**MLA, **DEEPSEEK_MOE, "head_dim": 8, "moe_intermediate_size": 24}
    path = write_model(tmp_path, "deepseek_v3", **fields)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    expected = load_file(tmp_path / "model.safetensors")[name]
    assert float(expected.abs().min()) > 0 and not torch.equal(expected, expected.bfloat16())
    if not files:
        (tmp_path / "model.safetensors").unlink()
        expected = torch.zeros(8)
    engine = Engine.from_pretrained(path, dtype=torch.bfloat16, load_weights=False)
    trainer = make_trainer(path, dtype="bfloat16", random_init=not files)
    trainer.connect([engine])
    trainer.update_actor(make_batch(2))
    trainer.sync_weights(1)
    for bias in (engine.store.buffers[name], trainer.model.get_buffer(name)):
        assert bias.dtype == torch.float32 and torch.equal(bias, expected)
