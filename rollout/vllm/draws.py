"""Has vLLM's own draws be the same on all ranks of one engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def drawn_from(seed: int, device: torch.device) -> Iterator[None]:
    """Has torch's and NumPy's own generators begin at `seed` inside; afterwards they go on as if
    nothing had been drawn.

    vLLM 0.24 samples requests without a seed from these (one of its runners from torch's, the other
    with seeds of NumPy's), and a trainer of this process may have drawn from them, as no other rank
    did.
    """
    on_gpu, before = device.type == "cuda", np.random.get_state()
    with torch.random.fork_rng([device] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            np.random.set_state(before)
