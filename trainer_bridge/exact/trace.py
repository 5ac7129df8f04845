"""Both sides of an exact run over a recorded sequence, compared operation by operation.

The engine computes the sequence as in a run, the prompt in chunks and then a token at a time. The
trainer's model computes it in one forward. Both report input and result of each module that has
weights. A side keeps a hash and the sum of each row (token), so memory stays small.
"""

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memsaver import MemorySaver
from memsaver.ops.layout import round_up
from memsaver.system.replaced import replaced
from rollout import Engine, EngineConfig, SamplingParams
from rollout.observed import Listener, observed
from trainer_bridge.config import TrainerConfig
from trainer_bridge.exact.record import MismatchRecord
from trainer_bridge.learning.batch import SequenceBatch
from trainer_bridge.learning.policy import Policy
from trainer_bridge.models.runtime import Runtime
from trainer_bridge.models.sharded_model import build_model
from trainer_bridge.ops import token_scores

_Row = tuple[float, float]
"""A hash of a token's result, and the sum of its elements."""
_Rows = dict[str, list[_Row]]
"""The rows of each operation, in the order of tokens."""


@dataclass(frozen=True)
class Compared:
    """An operation that both sides computed.

    Attributes:
        operation: A module of the trainer's decoder, for its result, or "input of" a module, for
            what is computed between modules. "lm_head" has the logits, and "log-softmax" the
            log-probabilities.
        rows: Number of rows (tokens).
        unequal: The sums of the elements of an unequal row in engine and trainer, by the position
            of its token in the sequence. For "lm_head" and "log-softmax", the token that they
            predict comes next.
    """

    operation: str
    rows: int
    unequal: dict[int, tuple[float, float]]


@dataclass(frozen=True)
class MismatchTrace:
    """The comparison of both sides over a recorded sequence.

    Attributes:
        record: The record of the mismatch.
        compared: All operations in the engine's order.
        engine: The engine's log-probabilities, computed alone now; NaN if one is not finite, which
            ends the engine's part.
        trainer: The trainer's log-probabilities, computed alone now.
    """

    record: MismatchRecord
    compared: list[Compared]
    engine: list[float]
    trainer: list[float]

    @property
    def first(self) -> Compared | None:
        """Return the first operation with unequal rows; None without any."""
        return next((done for done in self.compared if done.unequal), None)


def trace_mismatch(
    directory: str | Path, *, device: str | None = None, **engine_options: Any
) -> MismatchTrace:
    """Compare both sides over the sequence that an update of an exact trainer recorded.

    One side after the other is on the device, without an optimizer.

    Args:
        directory: `TrainerConfig.mismatch_dir` of that trainer.
        device: Device of both sides; None for the trainer's type of device.
        **engine_options: Fields of `EngineConfig`, such as max_prefill_tokens.

    Returns:
        The comparison.

    Raises:
        FileNotFoundError: The directory holds no record.
        ValueError: There is no such device, or a side refuses the model or the options.
    """
    record = MismatchRecord.read(directory)
    record = replace(record, device=device or record.device)
    if record.device != "cpu" and not torch.cuda.is_available():
        rule = "there is no GPU here, and a CPU computes other bits"
        raise ValueError(f"device={record.device}: {rule}")
    ours, theirs = _Rows(), _Rows()
    served = _by_engine(ours, str(directory), record, engine_options)
    trained = _by_trainer(theirs, str(directory), record)
    for rows, scores in ((ours, served), (theirs, trained)):
        rows["log-softmax"] = [*zip(scores, scores, strict=True)]
    compared = [
        Compared(operation, len(rows), _unequal(rows, theirs[operation], record.length - 1))
        for operation, rows in ours.items()
        if operation in theirs
    ]
    return MismatchTrace(record, compared, served, trained)


def _unequal(ours: list[_Row], theirs: list[_Row], tokens: int) -> dict[int, tuple[float, float]]:
    """Compare the engine's rows of an operation with the trainer's, which end with `tokens`."""
    pairs = zip(ours, theirs, strict=False)  # the engine may have ended early
    return {
        position: (our, their)
        for position, ((first, our), (second, their)) in enumerate(pairs, tokens - len(theirs))
        if first != second and not math.isnan(first)
    }


def _add(to: _Rows, operation: str, rows: Tensor) -> None:
    """Add rows [T, ...] of an operation."""
    flat = rows.detach().flatten(1).cpu().contiguous()
    hashes = (hash(row.tobytes()) for row in flat.view(torch.uint8).numpy())
    sums = flat.sum(1, dtype=torch.float64).tolist()
    to.setdefault(operation, []).extend(zip(hashes, sums, strict=True))


def _by_engine(rows: _Rows, path: str, record: MismatchRecord, options: Any) -> list[float]:
    """Compute the sequence by an engine; return its log-probabilities."""
    page, length = options.get("page_size", EngineConfig.page_size), record.length
    engine = Engine.from_pretrained(
        path, record.device, getattr(torch, record.dtype), kv_tokens=round_up(length, page),
        max_context_len=length, max_running=1, cuda_graphs=False, prefix_cache=False,
        fp32_router=record.fp32_router, exact=True, **options,
    )  # fmt: skip
    forced = tuple(record.response_ids)
    params = SamplingParams(
        max_tokens=len(forced), temperature=record.temperature, ignore_eos=True, forced=forced
    )
    with contextlib.closing(engine.saver), observed(engine, partial(_add, rows)):
        with contextlib.suppress(FloatingPointError):
            ((answer,),) = engine.generate([record.prompt_ids], params)
            return answer.logprobs
    return [math.nan] * len(forced)


def _by_trainer(rows: _Rows, path: str, record: MismatchRecord) -> list[float]:
    """Compute the sequence by a trainer's model; return its log-probabilities."""
    prompt, response, heat = record.prompt_ids, record.response_ids, record.temperature
    batch = SequenceBatch(prompt_ids=[prompt], response_ids=[response], temperature=heat)
    config = TrainerConfig(
        model_path=path, param_dtype=record.dtype, fp32_router=record.fp32_router,
        device=record.device, exact=True, micro_batch_size=1,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        runtime = Runtime.open(record.device)
        stack.callback(runtime.close)
        saver = stack.enter_context(contextlib.closing(MemorySaver(device=runtime.device)))
        model = build_model(config, runtime, saver)
        _observe(model, partial(_add, rows), record.length - 1)
        logits = list[Tensor]()

        def multiply(linear: Callable[..., Tensor], *args: Any) -> Tensor:
            part = linear(*args)  # of a slice of the vocabulary
            logits.append(part.cpu())
            return part

        with replaced(token_scores, linear=multiply):
            (scores,) = Policy(model, config, runtime).any_scores(batch)
        _add(rows, "lm_head", torch.cat(logits, 1))
    return scores


def _observe(model: Any, listen: Listener, tokens: int) -> None:
    """Let the modules of a decoder tell of the rows of `tokens`, without fillers."""

    def tell(name: str, module: nn.Module, inputs: Any, result: Any) -> None:
        result = result[0] if isinstance(result, tuple) else result  # of a router
        for operation, part in ((f"input of {name}", inputs[0]), (name, result)):
            listen(operation, (part if part.dim() == 2 else part[0])[:tokens])

    for name, module in model.get_decoder().named_modules():
        if [*module.parameters(recurse=False)]:
            module.register_forward_hook(partial(tell, name))
