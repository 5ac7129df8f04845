"""CUDA graphs of layers: the bits of passes without them, and memory only in updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.trainer_bridge.models import make_batch, value_batch, write_model
from tests.helpers.trainer_bridge.states import assert_same_bits, bits
from tests.helpers.trainer_bridge.tolerance import STABLE
from trainer_bridge import CriticConfig, LoraConfig, Trainer
from trainer_bridge.models import Runtime

Make = Callable[..., Trainer]
LORA = LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", "down_proj"))
HALF: dict[str, Any] = {"param_dtype": "bfloat16"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen2", HALF),
    ("llama", {"activation_checkpointing": "layers"}),
    ("qwen3", {"activation_checkpointing": "mlp", "keep_unsharded": True, **HALF}),
    ("qwen3", {"exact": True, "activation_checkpointing": "layers", **HALF}),
    ("qwen3", {"lora": LORA, **HALF}),
    ("qwen3", {"optimizer_offload": True, **HALF}),
    ("llama", {"param_dtype": "float16"}),
    ("qwen2", {"critic": CriticConfig(), **HALF}),
]
EXACT = {"exact": True, **HALF}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of what is captured."""
    names, graph_memory = list[str](), Runtime.graph_memory

    def noted(runtime: Runtime, *given: Any) -> Any:
        memory = graph_memory(runtime, *given)

        def capture(run: Any) -> Any:
            names.append(run.__name__)
            return memory.capture(run)

        return SimpleNamespace(placing=memory.placing, capture=capture)

    monkeypatch.setattr(Runtime, "graph_memory", noted)
    return names


def trained(trainer: Trainer, seeds: int) -> list[dict[str, float]]:
    """Return the figures of updates, with all memory away in between."""
    figures = []
    for seed in range(seeds):
        figures.append(trainer.update_actor(make_batch(7, seed=seed % 2)))
        if trainer.critic is not None:
            figures.append(trainer.update_critic(value_batch(7, seed=seed % 2)))
        trainer.offload()
        assert not trainer.saver.report().committed_bytes
        trainer.reload()
    return figures


def compare(path: str, make_trainer: Make, captures: list[str], **how: Any) -> None:
    """Assert that updates by graphs, at most one for each shape, have the bits of other updates."""
    results = []
    for graphs in (False, True):
        trainer = make_trainer(path, cuda_graphs=graphs, micro_batch_size=2, **STABLE, **how)
        results.append((trained(trainer, 4), bits(trainer.models[-1])))  # of a critic, if any
    graphs = 4 * len(trainer.models)
    assert Counter(captures) == {"_forward": graphs, "_backward": graphs}, "of recurring shapes"
    (figures, plain), (same, graphed) = results
    assert same == figures
    assert_same_bits(graphed, plain)


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_graphs_change_no_bit(
    family: str, changes: dict[str, Any], tmp_path: Path, make_trainer: Make, captures: list[str]
) -> None:
    compare(write_model(tmp_path, family), make_trainer, captures, **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["none", "mlp", "layers"])
@pytest.mark.parametrize("masters", ["float32", "bfloat16"])
def test_captured_graphs_change_no_bit(
    way: str, masters: str, tmp_path: Path, make_trainer: Make, captures: list[str]
) -> None:
    path = write_model(tmp_path, "qwen2", head_dim=64)
    how = {"dtype": masters, "activation_checkpointing": way, "device": "cuda:0"}
    compare(path, make_trainer, captures, **how, **EXACT)


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_moe", {}), ("mistral", {"sliding_window": 8})]
)
def test_models_without_graphs_are_refused(
    family: str, changes: dict[str, Any], tmp_path: Path, make_trainer: Make
) -> None:
    with pytest.raises(ValueError, match="cuda_graphs is for granite, .*; set it to False"):
        make_trainer(write_model(tmp_path, family, **changes), cuda_graphs=True)
