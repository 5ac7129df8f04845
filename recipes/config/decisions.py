"""What a run decides where keys of its recipe say auto: one record, each decision with a reason."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from recipes.config.literals import Checkpointing
from recipes.config.recipe import Recipe

UNPLANNED_SIZE = 4
"""The value of `trainer.micro_batch_size=auto` if no plan precedes the trainer."""

OF_THE_TRAINER = (
    "keep_unsharded",
    "activation_checkpointing",
    "cuda_graphs",
    "micro_batch_size",
)
"""Decisions that a trainer is built with."""

LASTING = ("exact", "keep_unsharded", "micro_batch_size")
"""Decisions that the bits of the weights depend on, which a resumed run keeps."""


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """The decisions of a run.

    Attributes:
        driver: Whether both sides live in the process of the command, or are Ray actors.
        exact: Whether rollout and trainer compute the same bits; warn only counts differences.
        alias: Whether the engine serves the trainer's own pages.
        resident: Tags that stay on the device.
        overlap: Tags whose moves are overlapped with work.
        hand_over: Whether memory that leaves goes to the other side.
        keep_unsharded: Whether unsharded parameters stay between micro batches.
        activation_checkpointing: What the backward pass recomputes.
        cuda_graphs: Whether updates launch layers as CUDA graphs.
        micro_batch_size: Sequences in a pass of the trainer.
        reasons: Lines for a reader about a decision, by its name.
        open: Names of decisions that are still to be made. Until then they have their defaults.
    """

    driver: Literal["inprocess", "ray"] = "inprocess"
    exact: bool | Literal["warn"] = False
    alias: bool = False
    resident: Sequence[str] = ()
    overlap: Sequence[str] = ()
    hand_over: bool = False
    keep_unsharded: bool = False
    activation_checkpointing: Checkpointing = "layers"
    cuda_graphs: bool = False
    micro_batch_size: int = UNPLANNED_SIZE
    reasons: Mapping[str, str] = field(default_factory=dict)
    open: frozenset[str] = frozenset()

    @classmethod
    def named(cls, recipe: Recipe) -> Self:
        """Return the decisions that keys of the recipe name; those whose key says auto are open."""
        cycle, trainer = recipe.cycle, recipe.trainer
        wishes: dict[str, Any] = {
            "driver": recipe.driver,
            "exact": recipe.exact,
            "alias": _is_wanted(cycle.alias),
            "resident": cycle.resident,
            "overlap": cycle.overlap,
            "hand_over": _is_wanted(cycle.hand_over),
            "keep_unsharded": trainer.keep_unsharded,
            "activation_checkpointing": trainer.activation_checkpointing,
            "cuda_graphs": trainer.cuda_graphs,
            "micro_batch_size": trainer.micro_batch_size,
        }
        values = {name: value for name, value in wishes.items() if value != "auto"}
        return cls(**values, open=frozenset(wishes.keys() - values.keys()))

    @classmethod
    def lasting(cls, values: Mapping[str, Any]) -> Self:
        """Return the lasting decisions of a checkpoint, from its values; all others are open.

        Older checkpoints have the lasting decisions as values of their own.
        """
        saved = values.get("decisions", values)
        known = {name: saved[name] for name in LASTING if name in saved}
        rest = cls.__dataclass_fields__.keys() - {"reasons", "open", *known}
        return cls(**known, reasons=saved.get("reasons", {}), open=frozenset(rest))

    def as_json(self) -> dict[str, Any]:
        """Return the decisions for a file."""
        return {name: value for name, value in vars(self).items() if name != "open"}

    @property
    def lines(self) -> list[str]:
        """Return the lines for a reader, in the order of the decisions."""
        reasons = [self.reasons[name] for name in vars(self) if name in self.reasons]
        return "\n".join(reasons).splitlines()

    def decided(self, reasons: Mapping[str, str] | None = None, **values: Any) -> Self:
        """Return the decisions with values and reasons for those among them that are open."""
        made = {name: value for name, value in values.items() if name in self.open}
        told = {name: text for name, text in (reasons or {}).items() if name in made}
        return replace(self, **made, reasons={**self.reasons, **told}, open=self.open - made.keys())

    def taking(self, other: "Decisions", *names: str) -> Self:
        """Return the decisions with open ones among `names` made as in other decisions.

        Without names, all open decisions are taken.
        """
        taken = set(names or self.open) - other.open
        values = {name: getattr(other, name) for name in taken}
        return self.decided(other.reasons, **values)


def why_ray(recipe: Recipe) -> str:
    """Return the setting by which a run has Ray actors; empty if its driver is inprocess."""
    if recipe.driver != "auto":
        return "driver=ray" if recipe.driver == "ray" else ""
    cluster, job = recipe.cluster, os.environ.get("RAY_ADDRESS", "").strip()
    if (devices := cluster.machines * cluster.per_node) > 1:
        return f"driver=auto with {devices} devices"
    if cluster.address is not None:
        return f"driver=auto with cluster.address={cluster.address}"
    return f"driver=auto with RAY_ADDRESS={job}" if job else ""


def _is_wanted(wish: Literal["auto", "always", "never"]) -> bool | Literal["auto"]:
    return wish if wish == "auto" else wish == "always"
