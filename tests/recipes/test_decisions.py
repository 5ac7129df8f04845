"""The record of a run's decisions: what keys name, what checkpoints keep, reasons in order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipes.config.decisions import LASTING, Decisions, why_ray
from recipes.config.load import load
from recipes.setup.preparation import prepare

AUTO = [
    *("driver=auto", "exact=auto", "cycle.alias=auto", "cycle.resident=auto"),
    *("cycle.overlap=auto", "cycle.hand_over=auto"),
    *("trainer.keep_unsharded=auto", "trainer.micro_batch_size=auto"),
    *("trainer.activation_checkpointing=auto", "trainer.cuda_graphs=auto"),
]
NAMED = {
    "driver": ("driver=ray", "ray"),
    "exact": ("exact=warn", "warn"),
    "alias": ("cycle.alias=never", False),
    "resident": ("cycle.resident=[optim]", ["optim"]),
    "overlap": ("cycle.overlap=[params]", ["params"]),
    "hand_over": ("cycle.hand_over=never", False),
    "keep_unsharded": ("trainer.keep_unsharded=true", True),
    "activation_checkpointing": ("trainer.activation_checkpointing=mlp", "mlp"),
    "cuda_graphs": ("trainer.cuda_graphs=true", True),
    "micro_batch_size": ("trainer.micro_batch_size=8", 8),
}


@pytest.mark.parametrize("name", NAMED)
def test_decision_is_open_unless_its_key_names_a_value(name: str) -> None:
    word, value = NAMED[name]
    assert Decisions.named(load("tiny", AUTO)).open == NAMED.keys()
    made = Decisions.named(load("tiny", [*AUTO, word]))
    assert made.open == NAMED.keys() - {name} and getattr(made, name) == value
    other = replace(Decisions(), **{name: object()}, reasons={name: "so"})
    assert made.taking(other) == made.taking(Decisions()), "only open decisions are taken"


@pytest.mark.parametrize(
    ("words", "job", "why"),
    [
        ("", "", ""),
        ("", "10.0.0.1:6379", "driver=auto with RAY_ADDRESS=10.0.0.1:6379"),
        ("cluster.address=here:1", "", "driver=auto with cluster.address=here:1"),
        ("cluster.rollout_gpus=2", "", "driver=auto with 3 devices"),
        ("driver=ray", "", "driver=ray"),
        ("driver=inprocess", "10.0.0.1:6379", ""),
    ],
)
def test_driver_is_ray_for_several_devices_a_cluster_or_a_job(
    words: str, job: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", job)
    recipe = load("tiny", words.split())
    assert why_ray(recipe) == why
    made = prepare(recipe, tmp_path).decisions
    assert made.driver == ("ray" if why else "inprocess")
    reason = f"driver: ray ({why})" if why else "driver: inprocess (one device and no Ray cluster)"
    assert made.reasons.get("driver", reason) == reason
    assert ("driver" in made.reasons) == (recipe.driver == "auto")


def test_lines_have_the_order_of_the_decisions() -> None:
    made = Decisions(open=frozenset(NAMED))
    for name in reversed(NAMED):
        made = made.decided({name: f"{name}\nmore"}, **{name: NAMED[name][1]})
    assert not made.open and made.lines == [line for name in NAMED for line in (name, "more")]


@pytest.mark.parametrize("older", [False, True])
def test_checkpoint_keeps_the_decisions_that_bits_depend_on(older: bool) -> None:
    """Read also the values of older checkpoints, which had no reasons."""
    values = {name: value for name, (_, value) in NAMED.items()}
    made = Decisions(**values, reasons={"exact": "exact: counted"})
    saved: dict[str, Any] = {"step": 3, "decisions": made.as_json()}
    if older:
        saved = {"step": 3, **{name: values[name] for name in LASTING}}
    kept = Decisions.lasting(json.loads(json.dumps(saved)))
    assert kept.open == NAMED.keys() - {*LASTING}
    assert [getattr(kept, name) for name in LASTING] == ["warn", True, 8]
    resumed = Decisions.named(load("tiny", AUTO)).taking(kept)
    assert resumed.open == kept.open and resumed.micro_batch_size == 8
    assert resumed.lines == ([] if older else ["exact: counted"])
