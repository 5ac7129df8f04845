"""The command `memsaver trace-mismatch`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from recipes.cli import main
from tests.helpers.case_selection import some
from tests.helpers.models import save_tiny
from tests.helpers.recipes.tiny_runs import rows
from trainer_bridge.exact import trace
from trainer_bridge.exact.record import FILE, MismatchRecord
from trainer_bridge.ops import decoder_ops, exact, token_scores

ROW = 4  # of the tensor in which a fault is planted
RUN = ("tiny", "exact=true", "model.dtype=float32", "steps=2", "eval.every=0")
ROTATE, COMBINE = decoder_ops.rotate, token_scores.combine_blocks
LAST = torch.tensor([0.0] * ROW + [1e-3, 0.0])  # nats
RUN += ("loop.prompts_per_step=4", "loop.samples_per_prompt=4", "checkpoint.every=0")


def nudged(result: Tensor) -> Tensor:
    """Raise the last element of a row of [rows, width] or [1, rows, ...] by one ulp."""
    result = result.clone()
    row = result[ROW] if result.dim() == 2 else result[0, ROW].view(-1)
    row[-1] = torch.nextafter(row[-1], torch.tensor(torch.inf))
    return result


def of_outputs(module: Any) -> None:
    module.register_forward_hook(lambda module, inputs, result: nudged(result))


def of_inputs(module: Any) -> None:
    module.register_forward_pre_hook(lambda module, inputs: (nudged(inputs[0]), *inputs[1:]))


def of_tables(module: Any) -> None:
    module.register_forward_hook(lambda module, inputs, tables: (nudged(tables[0]), tables[1]))


LAYER, ATTENTION, MLP = "layers.1", "layers.1.self_attn", "layers.1.mlp"
IN_MODULES = some(  # the operation that is named, the module that is wrong, how
    ("input of layers.0.input_layernorm", "embed_tokens", of_outputs),
    (f"{ATTENTION}.q_norm", f"{ATTENTION}.q_norm", of_outputs),
    ("input of layers.0.self_attn.o_proj", "rotary_emb", of_tables),  # of all layers
    (f"input of {ATTENTION}.o_proj", f"{ATTENTION}.o_proj", of_inputs),
    (f"input of {LAYER}.post_attention_layernorm", f"{LAYER}.post_attention_layernorm", of_inputs),
    (f"{MLP}.up_proj", f"{MLP}.up_proj", of_outputs),
    ("input of norm", LAYER, of_outputs),
    whole=[
        (f"{LAYER}.input_layernorm", f"{LAYER}.input_layernorm", of_outputs),
        *((f"{ATTENTION}.{name}_proj", f"{ATTENTION}.{name}_proj", of_outputs) for name in "qkvo"),
        (f"{ATTENTION}.k_norm", f"{ATTENTION}.k_norm", of_outputs),
        (f"{LAYER}.post_attention_layernorm", f"{LAYER}.post_attention_layernorm", of_outputs),
        (f"{MLP}.gate_proj", f"{MLP}.gate_proj", of_outputs),
        (f"input of {MLP}.down_proj", f"{MLP}.down_proj", of_inputs),
        (f"{MLP}.down_proj", f"{MLP}.down_proj", of_outputs),
        ("norm", "norm", of_outputs),
    ],
)


def recorded_by(folder: Path, family: str) -> Path:
    """Fill a folder as an update of a model of this family does."""
    save_tiny(folder, family)
    record = MismatchRecord(
        updates=2, seed=0, temperature=0.7, dtype="float32", device="cpu", fp32_router=False,
        sequence=3, prompt_ids=[7, 3, 11], response_ids=[5, 90, 2, 8, 4, 1], rollout=[-1.0] * 6,
        trainer=[-1.0, -2.0, *[-1.0] * 4], mask=[True] * 6,
    )  # fmt: skip
    (folder / FILE).write_text(json.dumps(asdict(record)))
    return folder


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded_by(tmp_path_factory.mktemp("mismatch"), "qwen3")


@pytest.fixture
def traced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "100")

    def trace(folder: Path, *words: str, status: int) -> str:
        capsys.readouterr()
        assert main(["trace-mismatch", str(folder), *words]) == status
        return " ".join("".join(capsys.readouterr()).split())

    return trace


def plant_in(module: str, plant: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a fault in a module of the trainer's decoder."""
    build = trace.build_model

    def build_wrong(*arguments: Any) -> Any:
        model: Any = build(*arguments)
        plant(model.get_decoder().get_submodule(module))
        return model

    monkeypatch.setattr(trace, "build_model", build_wrong)


@pytest.mark.parametrize(("name", "module", "plant"), IN_MODULES, ids=[n for n, *_ in IN_MODULES])
def test_command_names_the_operation_with_a_planted_fault(
    name: str,
    module: str,
    plant: Callable[[Any], None],
    recorded: Path,
    traced: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant_in(module, plant, monkeypatch)
    text = traced(recorded, status=1)
    assert f"first difference: {name}, token {ROW} of the sequence (decode in the engine)" in text
    assert "sum of its elements: " in text


def of_router(module: Any) -> None:
    module.register_forward_hook(lambda module, inputs, routed: (nudged(routed[0]), *routed[1:]))


@pytest.mark.parametrize(
    ("module", "plant"),
    [(f"{MLP}.gate", of_router), (f"{MLP}.experts", of_outputs)],
)
def test_command_names_an_operation_of_a_mixture_of_experts(
    module: str, plant: Any, tmp_path: Path, traced: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    plant_in(module, plant, monkeypatch)
    text = traced(recorded_by(tmp_path, "qwen3_moe"), status=1)
    assert f"first difference: {module}, token {ROW} of the sequence" in text


def keys_wrong(*given: Tensor) -> tuple[Tensor, Tensor]:
    q, k = ROTATE(*given)
    return q, k * (1 + 2**-20)


@pytest.mark.parametrize(
    ("name", "row", "module", "function", "wrong"),
    [
        (
            "input of layers.0.self_attn.o_proj",
            1,
            decoder_ops,
            "rotate",
            keys_wrong,
        ),
        ("lm_head", ROW + 2, token_scores, "linear", lambda *x: nudged(exact.linear(*x))),
        (
            "log-softmax",
            ROW + 2,
            token_scores,
            "combine_blocks",
            lambda *x: COMBINE(*x) + LAST,
        ),
    ],
)
def test_command_names_an_operation_outside_of_modules(
    name: str, row: int, module: Any, function: str, wrong: Any, recorded: Path, traced: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, function, wrong)
    text = traced(recorded, status=1)
    assert f"first difference: {name}, token {row} of the sequence" in text


def test_equal_sides_are_said_to_be_equal(recorded: Path, traced: Any) -> None:
    text = traced(recorded, status=0)
    assert "sequence 3 of the step after 2 updates: 3 + 6 tokens, float32" in text
    assert "no operation differs: both sides compute the same bits" in text


@pytest.mark.usefixtures("no_pictures")
def test_run_that_stops_records_what_the_command_traces(
    tmp_path: Path, traced: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run, gate = tmp_path / "run", decoder_ops.silu_gate
    monkeypatch.setattr(decoder_ops, "silu_gate", lambda *halves: gate(*halves) * (1 + 2**-20))
    assert main(["run", *RUN, "--run-dir", str(run)]) == 1
    message = capsys.readouterr().err
    assert "memsaver: update_actor failed: UnequalTokens: log-probabilities of " in message
    assert f"memsaver trace-mismatch {run}/mismatch names the operation" in message
    text = traced(run, status=1)
    assert (
        "first difference: input of layers.0.mlp.down_proj, token 0 of the sequence (prefill"
        in text
    )
    assert "had other bits in the run" not in text, "both sides repeat the run's bits"
    monkeypatch.undo()
    text = traced(run, status=0)
    assert "no operation differs" in text and "the trainer had other bits in the run" in text
    assert "the engine had" not in text


@pytest.mark.usefixtures("no_pictures")
def test_run_that_only_warns_records_the_first_step_and_goes_on(
    tmp_path: Path,
    traced: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, gate = tmp_path / "run", decoder_ops.silu_gate
    with monkeypatch.context() as patch:
        patch.setattr(decoder_ops, "silu_gate", lambda *halves: gate(*halves) * (1 + 2**-20))
        assert main(["run", *RUN, "exact=warn", "--run-dir", str(run)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("and the run continues; find the cause: memsaver trace-mismatch") == 1
    assert all(row["unequal_tokens"] > 0 for row in rows(run, "train"))
    assert MismatchRecord.read(run / "mismatch").updates == 0
    assert "the trainer had other bits in the run" in traced(run, status=0)


def test_run_without_a_mismatch_is_refused_in_a_line(tmp_path: Path, traced: Any) -> None:
    text = traced(tmp_path, status=2)
    assert "holds no mismatch; an exact run records the first one" in text
