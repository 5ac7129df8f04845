"""The output embedding of a policy: while its model scores tokens it makes no logits.

Hooks and names stay what they are: FSDP gathers the module's weight before it is called, or that of
the root with which it is tied.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer_bridge.ops.token_scores import token_scores


class ScoringHead(nn.Linear):
    """y = W x, and inside `scoring` what is asked there, which the model returns as its logits.

    The weight is that of the layer whose place it takes.
    """

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight = layer.weight
        self.register_parameter("bias", None)
        self._asked: tuple[Tensor, Tensor, float] | None = None

    @contextlib.contextmanager
    def scoring(self, at: Tensor, target: Tensor, temperature: float) -> Iterator[None]:
        """Inside, hidden states [B, L, H] become fp32 [2, N]: log-probabilities and entropies of
        the tokens `target` at the positions `at` of B * L, both int64 [N].
        """
        self._asked = at, target, temperature
        try:
            yield
        finally:
            self._asked = None

    def forward(self, x: Tensor) -> Tensor:
        if self._asked is None:
            return F.linear(x, self.weight)
        at, target, temperature = self._asked
        hidden = x.flatten(0, 1).index_select(0, at)
        return torch.stack(token_scores(hidden, self.weight, target, temperature))


def score_in_head(model: Any) -> None:
    """Puts a `ScoringHead` in the place of a meta model's output embedding, if it is a plain one:
    without bias or adapters, and the last that the model does. Some families cap or scale logits.
    """
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.bias is None and _ends_with(model, head):
        model.set_output_embeddings(ScoringHead(head))


def _ends_with(model: Any, head: nn.Linear) -> bool:
    """Tells whether the model returns, as logits, the very tensor that its head returns.

    Its forward is run around a decoder that does nothing; one that asks more of it counts as no.
    """
    from transformers.modeling_outputs import MoeModelOutputWithPast

    states: Any = torch.empty((1, 1, head.in_features), dtype=head.weight.dtype, device="meta")
    scores = torch.empty((2, 1), device="meta")  # fp32: some families see to that
    decoder, hook = model.get_decoder(), head.register_forward_hook(lambda *_: scores)
    decoder.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=states)
    try:
        ids = torch.zeros((1, 1), dtype=torch.int64, device="meta")
        return model(input_ids=ids, use_cache=False).logits is scores
    except (AttributeError, LookupError, TypeError):
        return False
    finally:
        hook.remove()
        del decoder.forward
