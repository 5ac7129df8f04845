"""Both sides of an exact run over one sequence, compared operation by operation.

The trainer's model computes the sequence in one forward. The engine computes it as in a run, the
prompt in chunks and then a token at a time. Both yield a digest of each row (token) of each
operation's result, so memory stays small. The first operation with unequal digests is computed once
more, for its values.
"""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from memsaver import MemorySaver
from memsaver.ops.hash import splitmix64
from memsaver.ops.layout import round_up
from rollout import Engine, EngineConfig
from rollout.tap import listening
from rollout.teacher_forcing import teacher_forced
from trainer_bridge.config import TrainerConfig
from trainer_bridge.exact.model import ATTENTION, exact_attention
from trainer_bridge.exact.record import MismatchRecord, UnequalSequence
from trainer_bridge.learning.batch import MicroBatch, SequenceBatch
from trainer_bridge.learning.losses import micro_logprobs, score_tokens
from trainer_bridge.models.runtime import Runtime
from trainer_bridge.models.sharded_model import build_model

OPERATIONS = (
    "embedding",
    *("norm", "q", "k", "v", "q norm", "k norm", "rotary q", "rotary k", "attention", "o"),
    *("sum with o", "MLP norm", "router", "gate", "up", "activation", "down", "sum with down"),
    *("final norm", "logits", "log-softmax"),
)
"""Operations in the order of computation; those between the first and the last four are a layer's.

A product has the name of its weight. "activation" is silu(gate) * up. "router" are its logits, and
"down" is the whole result of a mixture of experts.
"""
_OF_OUTPUTS = {
    "embed_tokens": "embedding", "input_layernorm": "norm", "q_proj": "q", "k_proj": "k",
    "v_proj": "v", "q_norm": "q norm", "k_norm": "k norm", "o_proj": "o",
    "post_attention_layernorm": "MLP norm", "gate": "router", "gate_proj": "gate", "up_proj": "up",
    "mlp": "down", "norm": "final norm",
}  # fmt: skip
_OF_INPUTS = {
    "o_proj": "attention", "post_attention_layernorm": "sum with o", "down_proj": "activation"
}  # fmt: skip
_LAYER = re.compile(r"^layers\.(\d+)\b")
_BITS = {2: torch.int16, 4: torch.int32}
_BLOCK = 1 << 24  # elements that are digested together


class OperationPlace(NamedTuple):
    """An operation of a layer; the embedding is in layer -1, the head behind the last layer."""

    layer: int
    operation: str

    @property
    def order(self) -> tuple[int, int]:
        return self.layer, OPERATIONS.index(self.operation)


Results = dict[OperationPlace, Tensor]
"""Digests int64 [rows] of each operation, or values [rows, width] of one."""

Side = Callable[[OperationPlace | None], tuple[Results, list[float]]]
"""Compute the sequence; return digests, or the values at the given place, and log-probabilities."""


@dataclass(frozen=True)
class Compared:
    """An operation that both sides computed; `unequal` are the positions of unequal rows."""

    place: OperationPlace
    rows: int
    unequal: list[int]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first unequal row of the first operation with unequal rows.

    Attributes:
        place: The operation.
        position: Position of the row's token in the sequence. For logits and log-softmax, the token
            that they predict comes next.
        element: The first unequal element of the row.
        elements: Number of unequal elements of the row.
        width: Number of elements of the row.
        engine: The element in the engine.
        trainer: The element in the trainer.
        ulps: Distance of the two in units in the last place of their dtype.
    """

    place: OperationPlace
    position: int
    element: int
    elements: int
    width: int
    engine: float
    trainer: float
    ulps: int


@dataclass(frozen=True, kw_only=True)
class MismatchTrace:
    """The comparison of both sides over one recorded sequence.

    Attributes:
        record: The record of the mismatch.
        sequence: The recorded sequence.
        compared: All operations in the order of computation.
        first: The first difference; None without any.
        engine: The engine's log-probabilities, computed alone now; NaN for a token that the engine
            cannot draw.
        trainer: The trainer's log-probabilities, computed alone now.
    """

    record: MismatchRecord
    sequence: UnequalSequence
    compared: list[Compared]
    first: Difference | None
    engine: list[float]
    trainer: list[float]


def trace_mismatch(
    directory: str | Path,
    number: int | None = None,
    *,
    device: str | None = None,
    **engine_options: Any,
) -> MismatchTrace:
    """Compare both sides over a sequence that an update of an exact trainer recorded.

    Both models are on the device together, in the dtype of forward, without an optimizer.

    Args:
        directory: `TrainerConfig.mismatch_dir` of that trainer.
        number: Number of a recorded sequence in its batch; None for the first.
        device: Device of both sides; None for the trainer's type of device.
        **engine_options: Fields of `EngineConfig`, such as max_prefill_tokens.

    Returns:
        The comparison.

    Raises:
        FileNotFoundError: The directory holds no record.
        ValueError: The sequence is not recorded, or a side refuses the model or the options.
    """
    record = MismatchRecord.read(directory)
    known = {sequence.number: sequence for sequence in record.sequences}
    number = next(iter(known)) if number is None else number
    if number not in known:
        listed = ", ".join(map(str, known))
        raise ValueError(f"sequence {number} is not on record; use one of {listed}")
    device = device or record.device
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device={device}: there is no GPU here, and a CPU computes other bits")
    sequence = known[number]
    tokens = sequence.length - 1  # the last one predicts nothing
    inputs = str(directory), record, sequence, device
    with _trainer_side(*inputs) as trainer, _engine_side(*inputs, engine_options) as engine:
        (theirs, trained), (ours, served) = trainer(None), engine(None)
        compared = _compare(ours, theirs, tokens)
        pair = torch.tensor([served, trained])[..., None]
        compared.append(_compare_scores(pair, tokens, compared[-1].place.layer))
        first = next((operation for operation in compared if operation.unequal), None)
        if first and first is not compared[-1]:
            pair = torch.stack([side(first.place)[0][first.place] for side in (engine, trainer)])
    return MismatchTrace(
        record=record,
        sequence=sequence,
        compared=compared,
        first=_difference(first, pair, tokens) if first else None,
        engine=served,
        trainer=trained,
    )


class _RowRecorder:
    """The digests of each operation's rows, or the rows of a single operation."""

    def __init__(self, only: OperationPlace | None) -> None:
        self._only = only
        self.parts: dict[OperationPlace, list[Tensor]] = {}

    def add(self, place: OperationPlace, result: Tensor, column: int = 0) -> None:
        """Add the result [rows, ...] of an operation, whose first column has number `column`."""
        if self._only in (None, place):
            rows = result.detach().flatten(1)
            part = _digests(rows, column) if self._only is None else rows.cpu()
            self.parts.setdefault(place, []).append(part)


def _digests(rows: Tensor, column: int) -> Tensor:
    """Return the sum of bits times odd numbers of each row, int64 [rows], modulo 2**64.

    A row with a single changed element always has another digest.
    """
    width = rows.shape[1]
    factors = splitmix64(torch.arange(column, column + width, device=rows.device)) | 1
    blocks = rows.split(max(1, _BLOCK // width))
    bits = (block.contiguous().view(_BITS[rows.element_size()]).long() for block in blocks)
    return torch.cat([(block * factors).sum(1) for block in bits]).cpu()


@contextlib.contextmanager
def _trainer_side(
    directory: str, record: MismatchRecord, sequence: UnequalSequence, device: str
) -> Iterator[Side]:
    """Build the trainer's model, which computes the sequence when it is called."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    half = record.dtype == "float16"  # in which no shards can be
    config = TrainerConfig(
        model_path=directory,
        dtype="float32" if half else record.dtype,
        param_dtype=record.dtype,
        fp32_router=record.fp32_router,
        device=device,
        exact=True,
    )
    batch = SequenceBatch(
        prompt_ids=[sequence.prompt_ids],
        response_ids=[sequence.response_ids],
        temperature=record.temperature,
    )
    with contextlib.ExitStack() as stack:
        runtime = Runtime.open(device)
        stack.callback(runtime.close)
        saver = stack.enter_context(contextlib.closing(MemorySaver(device=runtime.device)))
        model: Any = build_model(config, runtime, saver)
        rows, layers = sequence.length - 1, model.config.num_hidden_layers
        recorder = _RowRecorder(None)

        def record_rows(place: OperationPlace, result: Tensor) -> None:
            recorder.add(place, result[0][:rows])  # without the last token and fillers

        def record_logits(operation: str, result: Tensor) -> None:
            place = OperationPlace(layers, operation)
            recorder.add(place, result, sum(columns))
            columns.append(result.shape[1])

        def record_attention(
            module: Any, query: Tensor, key: Tensor, *args: Any, **more: Any
        ) -> Any:
            for name, heads in (("rotary q", query), ("rotary k", key)):
                record_rows(OperationPlace(module.layer_idx, name), heads.transpose(1, 2))
            return exact_attention(module, query, key, *args, **more)

        def score(micro: MicroBatch) -> Tensor:
            return micro_logprobs(model, micro, record.temperature)[0]

        def run(only: OperationPlace | None) -> tuple[Results, list[float]]:
            nonlocal recorder
            recorder = _RowRecorder(only)
            columns.clear()
            with listening(record_logits):
                (logprobs,) = score_tokens(model, batch, score, 1, runtime)
            joined = {place: _joined(parts) for place, parts in recorder.parts.items()}
            return joined, logprobs

        columns: list[int] = []
        _hook(model.get_decoder(), layers, record_rows)
        ALL_ATTENTION_FUNCTIONS.register(ATTENTION, record_attention)
        stack.callback(ALL_ATTENTION_FUNCTIONS.register, ATTENTION, exact_attention)
        yield run


def _joined(parts: list[Tensor]) -> Tensor:
    """Join slices of the vocabulary: digests int64 [rows] or values [rows, words]."""
    return torch.cat(parts, 1) if parts[0].dim() > 1 else torch.stack(parts).sum(0)


def _hook(
    decoder: nn.Module, layers: int, record: Callable[[OperationPlace, Tensor], None]
) -> None:
    """Let the modules of a decoder record their results, and some of them their inputs."""

    def before(place: OperationPlace, module: nn.Module, inputs: Any) -> None:
        record(place, inputs[0])

    def after(place: OperationPlace, module: nn.Module, inputs: Any, result: Any) -> None:
        rows = result[0] if isinstance(result, tuple) else result
        record(place, rows if rows.dim() > 2 else rows[None])

    ends = {"embed_tokens": -1, "norm": layers}
    for name, module in decoder.named_modules():
        found, kind = _LAYER.search(name), name.rpartition(".")[2]
        layer = ends.get(name) if found is None else int(found[1])
        if layer is None:
            continue
        whole = name == f"layers.{layer}"
        operation = "sum with down" if whole else _OF_OUTPUTS.get(kind)
        if operation:
            module.register_forward_hook(partial(after, OperationPlace(layer, operation)))
        if kind in _OF_INPUTS:
            module.register_forward_pre_hook(
                partial(before, OperationPlace(layer, _OF_INPUTS[kind]))
            )


@contextlib.contextmanager
def _engine_side(
    directory: str,
    record: MismatchRecord,
    sequence: UnequalSequence,
    device: str,
    options: Mapping[str, Any],
) -> Iterator[Side]:
    """Build an engine, which computes the sequence when it is called."""
    page = options.get("page_size", EngineConfig.page_size)
    engine = Engine.from_pretrained(
        directory,
        device,
        getattr(torch, record.dtype),
        kv_tokens=round_up(sequence.length, page),
        max_context_len=sequence.length,
        max_running=1,
        cuda_graphs=False,
        prefix_cache=False,
        fp32_router=record.fp32_router,
        exact=True,
        **options,
    )

    def run(only: OperationPlace | None) -> tuple[Results, list[float]]:
        recorder, layer = _RowRecorder(only), -1

        def listen(operation: str, result: Tensor) -> None:
            nonlocal layer
            if operation == "embedding":
                layer = -1
            elif operation == "norm":
                layer += 1
            if operation == "norm" and layer == engine.model.num_layers:
                operation = "final norm"
            names = operation.split(", ")  # of weights that are multiplied together
            for name, part in zip(names, result.chunk(len(names), dim=-1), strict=True):
                recorder.add(OperationPlace(layer, name), part)

        with listening(listen):
            logprobs = teacher_forced(
                engine, sequence.prompt_ids, sequence.response_ids, record.temperature
            )
        return {place: torch.cat(parts) for place, parts in recorder.parts.items()}, logprobs

    with contextlib.closing(engine.saver):
        yield run


def _compare(ours: Results, theirs: Results, tokens: int) -> list[Compared]:
    """Compare the digests of engine and trainer; the last rows are of the last of `tokens`."""
    if ours.keys() != theirs.keys():
        names = sorted({place.operation for place in ours.keys() ^ theirs.keys()})
        raise ValueError(f"only one side has operations {', '.join(names)}; the models differ")
    compared = []
    for place in sorted(ours, key=lambda place: place.order):
        rows = len(ours[place])
        unequal = (ours[place] != theirs[place]).nonzero().flatten() + (tokens - rows)
        compared.append(Compared(place, rows, unequal.tolist()))
    return compared


def _compare_scores(pair: Tensor, tokens: int, layer: int) -> Compared:
    """Compare log-probabilities, fp32 [2, rows, 1], where the engine has one."""
    unequal = ((pair[0] != pair[1]) & ~pair[0].isnan()).flatten().nonzero().flatten()
    rows = pair.shape[1]
    return Compared(
        OperationPlace(layer, "log-softmax"), rows, (unequal + (tokens - rows)).tolist()
    )


def _difference(first: Compared, both: Tensor, tokens: int) -> Difference:
    """Describe the first unequal row of [2, rows, width]: results of engine and trainer."""
    pair = both[:, first.unequal[0] - (tokens - first.rows)]
    bits = pair.view(_BITS[pair.element_size()]).long()
    unequal = (bits[0] != bits[1]).nonzero().flatten().tolist()
    element = unequal[0]
    # Bits of a float without its sign count in units in the last place.
    sizes = bits & (1 << 8 * pair.element_size() - 1) - 1
    steps = torch.where(bits < 0, -sizes, sizes)[:, element].tolist()
    return Difference(
        place=first.place,
        position=first.unequal[0],
        element=element,
        elements=len(unequal),
        width=pair.shape[1],
        engine=pair[0, element].item(),
        trainer=pair[1, element].item(),
        ulps=abs(steps[0] - steps[1]),
    )
