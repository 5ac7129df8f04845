"""Operations of an update, to compare its time with what a device can do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

from recipes.config.recipe import Recipe
from rollout.model import load_hf_config, parameter_shapes


@dataclass(frozen=True)
class Operations:
    """Operations of forward and backward, without what backward repeats.

    A product has as many operations as its two gradients each; a frozen weight has no gradient.

    Attributes:
        token: Of each token.
        scored: Of each token whose logits are computed.
        pair: Of each pair of tokens that attention compares, as if in every layer.
    """

    token: float
    scored: float
    pair: float

    @classmethod
    def of(cls, config: Any, shapes: Mapping[str, Sequence[int]], frozen: bool = False) -> Self:
        """Count the operations of a model of transformers.

        Args:
            config: Its configuration.
            shapes: The shapes of its parameters by name, without tied ones.
            frozen: Whether only adapters are trained, which have few operations of their own.
        """
        used, head, embedding = 0.0, 0, 0
        for name, shape in shapes.items():
            if "lm_head" in name:
                head = prod(shape)
            elif "embed_tokens" in name:
                embedding = prod(shape)
            elif ".experts." in name:
                used += prod(shape) / shape[0] * config.num_experts_per_tok
            elif len(shape) > 1:
                used += prod(shape)
        width = getattr(config, "head_dim", None)
        width = width or config.hidden_size // config.num_attention_heads
        pair = 12 * config.num_hidden_layers * config.num_attention_heads * width
        each = 4 if frozen else 6
        return cls(token=each * used, scored=each * (head or embedding), pair=pair)

    def update(self, lengths: Sequence[int], scored: int) -> float:
        """Return the operations of an update.

        Args:
            lengths: Tokens of each sequence, with its prompt.
            scored: Tokens of all answers.
        """
        pairs = sum(length**2 / 2 for length in lengths)
        return self.token * sum(lengths) + self.scored * scored + self.pair * pairs


def count_operations(recipe: Recipe, model_dir: Path) -> Operations | None:
    """Count the operations of a recipe's updates; None if its model's configuration does not tell.

    Args:
        recipe: The recipe.
        model_dir: Folder of the model.
    """
    try:
        shapes, _ = parameter_shapes(model_dir)
        return Operations.of(load_hf_config(model_dir), shapes, frozen=bool(recipe.lora.rank))
    except AttributeError:  # of a configuration with other names
        return None
