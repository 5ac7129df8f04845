"""Training checkpoints: parameters, optimizer moments and a few plain values, through
torch.distributed.checkpoint.

A directory appears whole or not at all. Loading writes into the tensors that are there: addresses
stay. Tensors are in safetensors files and values in JSON, so that a folder from elsewhere is data:
torch's own format holds pickles.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from memsaver.system.files import replace_text, sync
from memsaver.system.plain import all_gather_plain
from trainer_bridge.errors import OtherRankFailed, OtherWeights, listed, misfits

_VALUES = "values.json"
_BEFORE = ".before"
_FILE_BYTES = 2 << 30


def state(
    model: nn.Module, optimizer: torch.optim.Optimizer, prefix: str = ""
) -> dict[str, Tensor]:
    """Return what a checkpoint holds of one model: all that is trained, by name, masters under
    their parameters' names; the tensors are the model's and the optimizer's own.
    """
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        moments = optimizer.state[param]
        found[f"{prefix}params.{name}"] = moments.get("master", param.detach())
        found[f"{prefix}optim.exp_avg.{name}"] = moments["exp_avg"]
        found[f"{prefix}optim.exp_avg_sq.{name}"] = moments["exp_avg_sq"]
    return found


def save(directory: str, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Replace `directory`, which all ranks see and all call this for. values: for JSON."""
    text = json.dumps(values)  # refuses before anything is written
    with whole_directory(directory) as partial:
        writer = dcp.HuggingFaceStorageWriter(partial, _files(tensors), save_distributed=True)
        with _unwrapped():
            dcp.save(dict(tensors), storage_writer=writer)
        if _is_first():
            replace_text(Path(partial, _VALUES), text)


@contextlib.contextmanager
def whole_directory(directory: str) -> Iterator[str]:
    """Every rank enters it. What is written into the directory given takes `directory`'s place when
    the block has ended on all ranks without an error; else it is removed, and every rank raises.
    """
    directory = os.path.abspath(directory)
    partial = f"{directory}.partial"
    try:
        with _together():
            if _is_first():
                _remove(partial)
                os.makedirs(partial)
        with _together():
            yield partial
        with _together():
            if _is_first():
                _replace(directory, partial)
    except BaseException:
        if _is_first():
            with contextlib.suppress(OSError):
                _remove(partial)
        raise


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Wait for all ranks at the end. Where one raised inside, all raise: that one its error, the
    others an OtherRankFailed, so that nobody waits for a rank that does not come.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
    texts = all_gather_plain(None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(texts):
        if text is not None:
            raise OtherRankFailed(f"rank {rank} failed: {text}")


def read_values(directory: str) -> dict[str, Any]:
    """Return the values of a complete checkpoint; a ValueError where there is none."""
    with open(os.path.join(_complete(directory), _VALUES), encoding="utf-8") as file:
        return json.load(file)


def load(
    directory: str,
    tensors: Mapping[str, Tensor],
    adapters: Mapping[str, Any] | None = None,
    began_with: str | None = None,
) -> dict[str, Any]:
    """Fill `tensors` in place, also when saved by another number of ranks. Returns the values.

    adapters, began_with: `Adapters.identity` and `weights_digest`, which the values of these names
    must equal. A ValueError says what is of another model; nothing was loaded then.
    """
    values, directory = read_values(directory), _complete(directory)
    if adapters != (stored := values.get("adapters")):
        rule = f"trains adapters {stored}, this trainer {adapters} (None: all parameters)"
        raise ValueError(f"checkpoint {directory!r} {rule}; nothing was loaded")
    _check_fit(directory, tensors)
    if began_with != (stored := values.get("began_with", began_with)):
        rule = f"the run began with other weights (digest {stored}; {began_with} now)"
        raise OtherWeights(f"checkpoint {directory!r}: {rule}; put those back; nothing was loaded")
    with torch.no_grad(), _unwrapped():
        dcp.load(dict(tensors), storage_reader=dcp.HuggingFaceStorageReader(directory))
    return values


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """torch wraps what a rank raises, also an interrupt, into something that is no Exception."""
    try:
        yield
    except dcp.CheckpointException as wrapped:
        rank, (error, _) = min(
            wrapped.failures.items(), key=lambda item: item[0] != dist.get_rank()
        )
        if rank == dist.get_rank():
            raise error from None
        raise OtherRankFailed(f"rank {rank} failed: {type(error).__name__}: {error}") from wrapped


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the file of a rank, from 1 on, that each tensor is in: host memory holds one file."""
    size, files = _FILE_BYTES * dist.get_world_size(), dict[str, int]()
    total = 0
    for name, tensor in tensors.items():
        files[name] = 1 + total // size
        total += tensor.nbytes
    return files


def _complete(directory: str) -> str:
    """Return where the checkpoint is: a killed save may have renamed it (`_replace`)."""
    for place in (directory, f"{os.path.abspath(directory)}{_BEFORE}"):
        if os.path.isfile(os.path.join(place, _VALUES)):
            return place
    raise ValueError(
        f"{directory!r} holds no complete checkpoint ({_VALUES} is missing); name another directory"
    )


def _check_fit(directory: str, tensors: Mapping[str, Tensor]) -> None:
    stored = dcp.HuggingFaceStorageReader(directory).read_metadata().state_dict_metadata
    shapes = {name: tuple(getattr(entry, "size", ())) for name, entry in stored.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if problems := misfits(wanted, shapes):
        rule = f"checkpoint {directory!r} is of another model, nothing was loaded"
        raise ValueError(f"{rule}: {listed(problems)}")


def _replace(directory: str, partial: str) -> None:
    """Put `partial` in the place of `directory`, which may exist: a reader finds the old one or the
    new one. There is a moment in which the old one has another name, where `load` looks, too.
    """
    before = f"{directory}{_BEFORE}"
    if os.path.isdir(directory):
        _remove(before)
        os.rename(directory, before)
    os.rename(partial, directory)
    sync(Path(directory).parent)
    _remove(before)


def _remove(directory: str) -> None:
    if os.path.isdir(directory):
        shutil.rmtree(directory)


def _is_first() -> bool:
    return dist.get_rank() == 0
