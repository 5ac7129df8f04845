"""Memory of CUDA graphs on a tag, whose addresses outlive a pause."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from memsaver.memory import clear_workspaces
from memsaver.saver import MemorySaver
from memsaver.types import Content


class GraphPool:
    """Memory of CUDA graphs on a tag; a capture reuses what earlier ones have freed.

    Args:
        saver: Saver of the tag.
        tag: The tag.
        content: Where a pause keeps its content; see `MemorySaver.region`.

    Attributes:
        saver: Saver of the tag.
        stream: Stream on which graphs are captured.
        captures: Number of graphs that were captured.
    """

    def __init__(self, saver: MemorySaver, tag: str, content: Content | None = None) -> None:
        self.saver = saver
        self._pool = saver.mem_pool(tag, content)
        self.stream = torch.cuda.Stream(saver.device)
        self.captures = 0

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture what a function launches.

        Args:
            run: Launches kernels that are compiled, and does not wait for the device. The memory
                that it reads must be mapped.

        Returns:
            The graph, which the pool must outlive.
        """
        graph = torch.cuda.CUDAGraph()
        clear_workspaces()  # cuBLAS then allocates its workspace in the graph's pool
        pool: Any = self._pool.id  # torch.cuda.graph declares another type
        captured = torch.cuda.graph(
            graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"
        )
        with no_collection(), captured:
            run()
        clear_workspaces()  # and outside of the pool after the capture
        self.captures += 1
        return graph

    def placing(self) -> AbstractContextManager[None]:
        """Return a context that places this thread's tensors in the memory of the graphs."""
        return torch.cuda.use_mem_pool(self._pool, self.saver.device)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now and not inside the block: torch aborts when a graph dies in a capture."""
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
