"""Operations of an update, to compare its time with what a device can do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Self


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
