"""Training checkpoints of parameters, moments and plain values.

A directory is replaced as a whole or not at all. Loading writes into the existing tensors, so
addresses do not change. Tensors are stored in safetensors files (`checkpoint_writer.py` writes,
torch.distributed.checkpoint reads) and values in JSON, so loading a foreign directory executes
nothing; torch's own format contains pickles.
"""

import contextlib
import glob
import json
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from memsaver.system.files import replace_text, sync
from memsaver.system.plain import all_gather_plain
from rollout.model import open_checkpoint
from trainer_bridge.errors import OtherRankFailed, OtherWeights, Shape, listed, misfits
from trainer_bridge.models.files.checkpoint_writer import Staging, Writing
from trainer_bridge.models.files.moments_8bit import is_scales, requantize

_VALUES = "values.json"
_OWN = ("*.safetensors", _VALUES)
_PARTIAL, _BEFORE = ".partial", ".before"


class BegunCheckpoint:
    """A checkpoint that is being written; `finish` makes it replace the older one.

    Construction and `finish` are collective calls. All ranks must share the directory's filesystem.

    Args:
        directory: Directory of the checkpoint.
        tensors: Tensors by name, which may change after the construction.
        values: JSON values.
        staging: Memory for a copy of the tensors; None: they are written at once.

    Raises:
        ValueError: A file in the directory is no part of a checkpoint.
    """

    def __init__(
        self,
        directory: str,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        staging: Staging | None = None,
    ) -> None:
        self._values = json.dumps(values)  # fails before anything is written
        self._new = NewDirectory(directory, _OWN, "a checkpoint")
        with self._new.or_removed(), together():
            self._writing = Writing(self._new.path, tensors, staging)

    def written(self) -> bool:
        """Return whether all ranks have written their files; a collective call."""
        return all(all_gather_plain(self._writing.end.done()))

    def finish(self) -> None:
        """Wait until the files are written, and replace the directory."""
        with self._new.or_removed():
            with together():
                self._writing.end.result()
                if _is_first():
                    replace_text(Path(self._new.path, _VALUES), self._values)
            self._new.replace()

    def drop(self) -> None:
        """Remove what is written, without the other ranks."""
        self._writing.stop()
        self._new.remove()


class NewDirectory:
    """A directory that replaces an older one as a whole or not at all.

    Construction and `replace` are collective calls. A killed process leaves the new directory, as
    `DIRECTORY.*.partial`.

    Args:
        directory: The older directory, which need not exist.
        own: Patterns of the files that it may hold.
        what: What the directory is, in messages.

    Attributes:
        path: The new directory.

    Raises:
        ValueError: The older directory holds another file, which would be lost.
    """

    def __init__(self, directory: str, own: Collection[str], what: str) -> None:
        self._directory, self._own, self._what = os.path.abspath(directory), own, what
        # A name that nobody else has: two processes may write the directory at the same time.
        name = all_gather_plain(secrets.token_hex(8))[0]
        self.path = f"{self._directory}.{name}{_PARTIAL}"
        with self.or_removed(), together():
            if _is_first():
                _require_own(self._directory, own, what)
                os.makedirs(self.path)

    def replace(self) -> None:
        """Replace the older directory."""
        with together():
            if _is_first():
                _require_own(self._directory, self._own, self._what)
                _replace(self._directory, self.path)

    @contextlib.contextmanager
    def or_removed(self) -> Iterator[None]:
        """Remove the new directory if the block fails."""
        try:
            yield
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Remove the new directory."""
        if _is_first():
            with contextlib.suppress(OSError):
                _remove(self.path)


@contextlib.contextmanager
def whole_directory(directory: str, own: Collection[str], what: str) -> Iterator[str]:
    """Replace `directory` as a whole if the block succeeds on all ranks; a collective call.

    The block writes into a new directory, whose path is yielded. If the block fails on a rank, the
    new directory is removed and every rank raises. Arguments are those of `NewDirectory`.
    """
    new = NewDirectory(directory, own, what)
    with new.or_removed():
        with together():
            yield new.path
        new.replace()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Wait for all ranks at the end of the block, and raise on every rank if one failed.

    A failed rank raises its own error, other ranks raise OtherRankFailed, so no rank waits forever.
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
    """Return the values of a checkpoint; ValueError if the directory has no complete checkpoint."""
    with open(os.path.join(_complete(directory), _VALUES), encoding="utf-8") as file:
        return json.load(file)


def load(
    directory: str,
    tensors: Mapping[str, Tensor],
    adapters: Mapping[str, Any] | None = None,
    began_with: str | None = None,
) -> dict[str, Any]:
    """Load a checkpoint, perhaps of another number of ranks, into `tensors`; return its values.

    Moments in 8 bits, whose blocks depend on the number of ranks, are quantized again where needed.
    The stored adapters must equal `adapters` (`lora.identity`). The stored digest, if there is
    one, must equal `began_with` (`weights_digest`).

    Raises:
        ValueError: The checkpoint is incomplete, or of another model, optimizer or adapters.
            Nothing was loaded.
        OtherWeights: The run started from other weights. Nothing was loaded.
    """
    values, directory = read_values(directory), _complete(directory)
    if adapters != (stored := values.get("adapters")):
        rule = f"trains adapters {stored}, this trainer {adapters} (None: all parameters)"
        raise ValueError(f"checkpoint {directory!r} {rule}; nothing was loaded")
    whole = StoredTensors(directory, "")
    moved = _check_fit(directory, whole.shapes, tensors)
    if began_with != (stored := values.get("began_with", began_with)):
        rule = f"the run began with other weights (digest {stored}; {began_with} now)"
        text = f"{rule}; restore the original weights; nothing was loaded"
        raise OtherWeights(f"checkpoint {directory!r}: {text}")
    with torch.no_grad(), _unwrapped():
        loaded = {name: tensor for name, tensor in tensors.items() if name not in moved}
        dcp.load(loaded, storage_reader=dcp.HuggingFaceStorageReader(directory))
        if moved:
            with together():
                for name in moved:
                    requantize(tensors, name, whole.read(name))
    return values


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the error of a rank in place of torch's wrapper, which is not an Exception."""
    try:
        yield
    except dcp.CheckpointException as wrapped:
        rank, (error, _) = min(
            wrapped.failures.items(), key=lambda item: item[0] != dist.get_rank()
        )
        if rank == dist.get_rank():
            raise error from None
        raise OtherRankFailed(f"rank {rank} failed: {type(error).__name__}: {error}") from wrapped


class StoredTensors:
    """The tensors of a checkpoint whose names begin with `prefix`, readable one at a time.

    Files are mapped when the object is created, so a later removal of the checkpoint does no harm.

    Attributes:
        shapes: Shapes by name without the prefix.
    """

    def __init__(self, directory: str, prefix: str) -> None:
        metadata = dcp.HuggingFaceStorageReader(_complete(directory)).read_metadata()
        self._prefix = prefix
        self.shapes = {
            key.removeprefix(prefix): tuple(getattr(entry, "size", ()))
            for key, entry in metadata.state_dict_metadata.items()
            if key.startswith(prefix)
        }
        files: dict[str, Any] = {}
        self._parts: dict[str, list[tuple[Sequence[int], Any]]] = defaultdict(list)
        for index, info in metadata.storage_data.items():
            path = info.relative_path
            files[path] = files.get(path) or open_checkpoint(Path(path))
            self._parts[index.fqn].append((index.offset, files[path]))

    def read(self, name: str) -> Tensor:
        """Read a whole tensor to the CPU, in its own dtype."""
        key, shape = f"{self._prefix}{name}", self.shapes[name]
        parts = ((offset, file.get_tensor(key)) for offset, file in self._parts[key])
        whole: Tensor | None = None
        for offset, part in parts:
            if part.shape == shape:
                return part
            whole = part.new_empty(shape) if whole is None else whole
            ends = map(sum, zip(offset, part.shape, strict=True))
            whole[tuple(map(slice, offset, ends))] = part
        assert whole is not None
        return whole


def _complete(directory: str) -> str:
    """Return the directory of a complete checkpoint, which a killed `_replace` may have renamed."""
    for place in (directory, *_replaced(directory)):
        if os.path.isfile(os.path.join(place, _VALUES)):
            return place
    raise ValueError(
        f"{directory!r} holds no complete checkpoint ({_VALUES} is missing); name another directory"
    )


def _check_fit(
    directory: str, stored: Mapping[str, Shape], tensors: Mapping[str, Tensor]
) -> list[str]:
    """Return the names of scales that belong to other shards; all else must fit."""
    wanted = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    moved = [name for name in tensors if is_scales(name) and stored.get(name) != wanted[name]]
    shapes = {**stored, **{name: wanted[name] for name in moved if name in stored}}
    if problems := misfits(wanted, shapes):
        rule = f"checkpoint {directory!r} belongs to another model or optimizer"
        raise ValueError(f"{rule}, nothing was loaded: {listed(problems)}")
    return moved


def _replace(directory: str, partial: str) -> None:
    """Replace `directory` by `partial`, so that readers always find the old or the new checkpoint.

    For a moment the old one has another name, under which `load` finds it, too.
    """
    before = f"{partial.removesuffix(_PARTIAL)}{_BEFORE}"
    if os.path.isdir(directory):
        os.rename(directory, before)
    try:
        os.rename(partial, directory)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rename(before, directory)
        raise
    sync(Path(directory).parent)
    for replaced in _replaced(directory):
        _remove(replaced)


def _replaced(directory: str) -> list[str]:
    """Return the names under which a killed `_replace` may have left an earlier directory."""
    path = Path(directory).absolute()
    name = f"{glob.escape(path.name)}.{'[0-9a-f]' * 16}{_BEFORE}"
    return sorted(map(str, path.parent.glob(name)))


def _require_own(directory: str, own: Collection[str], what: str) -> None:
    """Raise a ValueError if the directory holds a file that matches no pattern of `own`."""
    for entry in Path(directory).iterdir() if os.path.exists(directory) else ():
        if entry.is_dir() or not any(entry.match(pattern) for pattern in own):
            rule = f"holds {entry.name}, which is no file of {what}"
            raise ValueError(f"{directory} {rule}; name another directory")


def _remove(directory: str) -> None:
    if os.path.isdir(directory):
        shutil.rmtree(directory)


def _is_first() -> bool:
    return dist.get_rank() == 0
