"""What an engine computes, for a listener, which gets the result of each operation with weights.

The engine's own code has no place for listeners: for the time of a block, the functions that
compute are replaced by wrappers.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor

from memsaver.system.replaced import replaced
from rollout.engine.engine import Engine
from rollout.model import decoder
from rollout.model.mixers import attention, base
from rollout.running import runner

Listener = Callable[[str, Tensor], None]
"""(operation, rows [T, ...]): the input or the result of the module whose weights are used."""

_WEIGHTS = {"linear": 1, "rms_norm": 1, "add_rms_norm": 2, "mix_experts": 3}  # arguments


@contextlib.contextmanager
def observed(engine: Engine, listen: Listener) -> Iterator[None]:
    """Tell the listener of all operations of an engine inside the block.

    Args:
        engine: An engine without CUDA graphs, which would not call the listener. No other engine of
            this process may compute in the block.
        listen: Gets input and result of each module with weights, in chunks of the sequences. The
            input is called "input of" the module; "lm_head" has a row for each token that follows.
    """
    store = engine.store
    params = {store.tensor(part.name).data_ptr(): part for part in store.manifest.slices}

    def call(at: int, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        result, start, size = function(*args, **options), args[at].data_ptr(), args[at].nbytes
        # A norm after an addition also returns the sum, which is its input.
        rows, taken = result if isinstance(result, tuple) else (result, args[0])
        parts = [part for place, part in params.items() if start <= place < start + size]
        widths = [part.shape[0] for part in parts] if len(parts) > 1 else rows.shape[-1]
        for part, columns in zip(parts, rows.split(widths, -1), strict=True):
            # The embedding has no wrapper, so its weight is that of a tied output layer.
            name = part.name.removeprefix("model.").replace("embed_tokens", "lm_head")
            listen(f"input of {name.rpartition('.')[0]}", taken)
            listen(name.rpartition(".")[0], columns)
        return result

    with contextlib.ExitStack() as stack:
        for user in (decoder, base, attention, runner):
            used = _WEIGHTS.keys() & vars(user)
            stack.enter_context(replaced(user, **{f: partial(call, _WEIGHTS[f]) for f in used}))
        yield
