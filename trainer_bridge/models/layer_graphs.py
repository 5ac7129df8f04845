"""CUDA graphs of a decoder's layers, for a trainer of one rank.

The layers of a pass are thousands of launches. Where model or batch is small, these take the host
longer than the device. As graphs they are two: forward and backward. What is around them has other
sizes in each pass, and is computed as without graphs: embedding, head and loss.

Activations and gradients are on tags that lose their memory with torch's cache, and keep their
addresses. So the graphs of one update serve the next, and in between the memory is the rollout's.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memsaver import MemorySaver
from memsaver.system.replaced import having
from trainer_bridge.config import TrainerConfig
from trainer_bridge.fsdp_internals import LoneUnit, lone_units
from trainer_bridge.models.packing import DENSE, Packing
from trainer_bridge.models.runtime import GraphMemory, Runtime, side_by_side
from trainer_bridge.sync.shards import like_shard, local_shard
from trainer_bridge.tag_names import ACTIVATIONS, GRADIENTS, PARAMS

_MOST = 16  # graphs that are kept
_SHORTEST = 256  # the longest sequence of a graph has at least so many tokens


class _Shape(NamedTuple):
    """What the passes that a graph serves have in common."""

    tokens: int
    sequences: int  # or fewer
    longest: int  # tokens, or fewer

    @classmethod
    def of(cls, packing: Packing) -> Self:
        lengths = packing.lengths
        return cls(sum(lengths), _power(len(lengths)), _power(max(_SHORTEST, *lengths)))


def _power(count: int) -> int:
    """Return the power of two that is at least `count`."""
    return 1 << (count - 1).bit_length()


class _Layers(NamedTuple):
    """The layers of a decoder, and how they are computed."""

    units: list[LoneUnit]
    sums: dict[nn.Parameter, Tensor]  # gradients by trained shard, to which graphs add
    recompute: bool  # whether backward computes whole layers again
    products: Callable[[], Any]  # context of forward's products


def why_no_graphs(config: Any, ranks: int) -> str:
    """Return why the layers of updates cannot be graphs; empty if they can.

    Args:
        config: The configuration of the model, by transformers.
        ranks: Ranks of the trainer.
    """
    if ranks > 1:
        return f"is for one rank, and there are {ranks}"
    if config.model_type not in DENSE or getattr(config, "sliding_window", None) is not None:
        return f"is for {', '.join(DENSE)}, without a window"
    return ""


class LayerGraphs:
    """Graphs of the layers of a model, by the shape of a micro batch.

    The first pass of a shape runs without graphs, and compiles its kernels.

    Args:
        model: The model, on its shards.
        config: The trainer's configuration.
        runtime: The device.
        saver: Saver of the tags.
        tag: Tag of the model.

    Raises:
        ValueError: The model or the number of ranks is not supported.
    """

    def __init__(
        self, model: Any, config: TrainerConfig, runtime: Runtime, saver: MemorySaver, tag: str
    ) -> None:
        self._decoder, self._saver, self._runtime = model.get_decoder(), saver, runtime
        if why := why_no_graphs(model.config, runtime.mesh.size()):
            raise ValueError(f"TrainerConfig.cuda_graphs {why}; set it to False")
        units = lone_units(model, [*self._decoder.layers])
        prefix = "" if tag == PARAMS else f"{tag}_"
        self._tag, self._sums_tag = f"{prefix}{ACTIVATIONS}", f"{prefix}{GRADIENTS}"
        trained = [*chain.from_iterable(unit.trained for unit in units)]
        specs = [
            (tuple(local_shard(shard).shape), shard.grad_dtype or shard.dtype) for shard in trained
        ]
        parts = side_by_side(specs, saver, self._sums_tag, content="discard")
        sums = dict(zip(trained, parts, strict=True))
        self._gradients = {shard: like_shard(part, shard) for shard, part in sums.items()}
        products = getattr(model, "forward_products", nullcontext)
        recompute = config.activation_checkpointing == "layers"
        self._layers = _Layers(units, sums, recompute, products)
        self._memory = runtime.graph_memory(saver, self._tag)
        self._stack = _Stack(self._run, self._decoder.layers[0])
        self._graphs = OrderedDict[_Shape, _LayerGraph | None]()
        self._ends: Tensor | None = None  # [4, 1, T, H], for the ends of all graphs
        with self._memory.placing():  # from now on, there is the tag
            pass
        self.free()

    def take_memory(self) -> None:
        """Give memory to activations and gradients."""
        self._saver.resume(self._tag, self._sums_tag)

    def begin(self) -> None:
        """Let the next passes add to gradients of 0."""
        for shard, gradient in self._gradients.items():
            shard.grad = gradient
        torch._foreach_zero_([*self._layers.sums.values()])

    def free(self) -> None:
        """Free the memory of activations and gradients; it may be repeated."""
        self._saver.pause(self._tag, self._sums_tag, content="discard", release="driver")

    def clear(self) -> None:
        """Forget all graphs."""
        self._graphs.clear()
        self._ends = None

    @contextmanager
    def layers_of(self, packing: Packing) -> Iterator[None]:
        """Replace the decoder's layers by a graph, if this is not the first pass of its shape."""
        shape = _Shape.of(packing)
        known = shape in self._graphs
        if not known:
            self._graphs[shape] = None
            if len(self._graphs) > _MOST:
                self._graphs.popitem(last=False)
        if not known and self._runtime.compiles:
            # This pass takes as much of torch's memory as graphs have.
            self._saver.pause(self._tag, content="discard", release="driver")
            yield
            self._runtime.empty_cache()
            self._saver.resume(self._tag)
            return
        self._graphs.move_to_end(shape)
        try:
            with having(self._decoder, layers=self._stack):
                yield
        except BaseException:
            del self._graphs[shape]  # its capture may have been interrupted
            raise

    def _run(self, hidden: Tensor, packing: Packing, named: Mapping[str, Any]) -> Tensor:
        shape = _Shape.of(packing)
        graph = self._graphs[shape]
        if graph is None:
            ends = self._ends_like(hidden)
            graph = _LayerGraph(self._layers, self._memory, packing, ends, named)
            self._graphs[shape] = graph
        graph.send(hidden, packing, named)
        return _Replay.apply(hidden.requires_grad_(), graph)

    def _ends_like(self, hidden: Tensor) -> "_Ends":
        """Return memory for the ends of a graph, in which those of all others are, too."""
        if self._ends is None or self._ends.shape[2] < hidden.shape[1]:
            self._graphs.update(dict.fromkeys(self._graphs))  # they know the memory until now
            with self._memory.placing(), torch.no_grad():
                self._ends = hidden.new_empty((4, *hidden.shape))
        return _Ends(*self._ends[:, :, : hidden.shape[1]])


class _Stack(nn.Module):
    """All layers of a decoder, as the single one over which its forward loops."""

    def __init__(self, run: Callable[..., Tensor], layer: Any) -> None:
        super().__init__()
        self._run = run
        self.attention_type = getattr(layer, "attention_type", None)

    def __getitem__(self, _: slice) -> list[nn.Module]:
        return [self]

    def forward(self, hidden: Tensor, *, packing: Packing, **named: Any) -> Tensor:
        return self._run(hidden, packing, named)


class _Ends(NamedTuple):
    """Where the graphs of a pass begin and end, all [1, T, H]."""

    hidden: Tensor  # input of the layers
    out: Tensor  # their result
    slope: Tensor  # gradient of `out`
    to_hidden: Tensor  # gradient of `hidden`


class _LayerGraph:
    """Forward and backward of the layers, for passes of one shape."""

    def __init__(
        self,
        layers: _Layers,
        memory: GraphMemory,
        packing: Packing,
        ends: _Ends,
        named: Mapping[str, Any],
    ) -> None:
        self._layers, self._memory, self.ends = layers, memory, ends
        self._shape = shape = _Shape.of(packing)
        with memory.placing(), torch.no_grad():
            self._bounds = packing.bounds.new_empty(shape.sequences + 1)
            self._named = _like(named)
        self._lengths = packing.lengths
        if packing.bounds.is_cuda:  # where kernels read bounds, and only these numbers of lengths
            self._lengths = (shape.longest,) * shape.sequences
        self._passed = list[tuple[Tensor, Tensor]]()
        self._captured: Any = memory.capture(self._forward)
        self._captured_backward: Any = None

    def send(self, hidden: Tensor, packing: Packing, named: Mapping[str, Any]) -> None:
        """Copy the inputs of a pass."""
        self._bounds.data.fill_(self._shape.tokens)  # sequences that are missing are empty
        _copy(self._bounds[: len(packing.bounds)], packing.bounds)
        _copy(self.ends.hidden, hidden)
        _copy(self._named, named)
        if not hidden.is_cuda:
            self._lengths = packing.lengths

    def forward(self) -> None:
        """Compute `ends.out`."""
        self._captured.replay()

    def backward(self) -> None:
        """Compute `ends.to_hidden`, and add the gradients of parameters to their sums."""
        if self._captured_backward is None:  # here, products are those of a backward pass
            self._captured_backward = self._memory.capture(self._backward)
        self._captured_backward.replay()

    def _forward(self) -> None:
        packing = Packing(self._lengths, self._bounds, self._named["position_ids"])
        self._inputs = {**self._named, "packing": packing}
        self._passed, x = [], self.ends.hidden
        for unit in self._layers.units:
            with unit.gathered():
                for layer in unit.modules:
                    x = x.detach().requires_grad_()
                    with torch.set_grad_enabled(not self._layers.recompute):
                        out = layer.forward(x, **self._inputs)
                    self._passed.append((x, out))
                    x = out
        _copy(self.ends.out, x)

    def _backward(self) -> None:
        slope = self.ends.slope
        for unit in reversed(self._layers.units):
            with unit.gathered():
                for layer in reversed(unit.modules):
                    slope = self._backward_of(layer, unit, slope)
        _copy(self.ends.to_hidden, slope)

    def _backward_of(self, layer: nn.Module, unit: LoneUnit, slope: Tensor) -> Tensor:
        """Return the gradient of a layer's input from that of its result."""
        x, out = self._passed.pop()
        if self._layers.recompute:
            with torch.enable_grad(), self._layers.products():
                out = layer.forward(x, **self._inputs)
        trained = unit.trained_of(layer)
        slope, *gradients = torch.autograd.grad(out, [x, *trained.values()], slope)
        torch._foreach_add_([self._layers.sums[shard] for shard in trained], gradients)
        return slope


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, graph: _LayerGraph) -> Tensor:
        ctx.graph = graph
        graph.forward()
        return graph.ends.out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
        graph = ctx.graph
        _copy(graph.ends.slope, slope)
        graph.backward()
        return graph.ends.to_hidden, None


def _like(value: Any) -> Any:
    """Return values with new tensors of the same shape."""
    if isinstance(value, Tensor):
        return torch.empty_like(value)
    if isinstance(value, Mapping):
        return {name: _like(part) for name, part in value.items()}
    return type(value)(map(_like, value)) if isinstance(value, tuple | list) else value


def _copy(into: Any, value: Any) -> None:
    """Copy the tensors among values; what a graph has saved of them counts as unchanged."""
    if isinstance(value, Tensor):
        into.data.copy_(value.detach())
    elif isinstance(value, Mapping):
        for name, part in value.items():
            _copy(into[name], part)
    elif isinstance(value, tuple | list):
        for target, part in zip(into, value, strict=True):
            _copy(target, part)
