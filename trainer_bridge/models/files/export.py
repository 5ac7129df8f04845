"""Export of a model as a Hugging Face folder, from a trainer's shards or from a checkpoint.

Both sources yield one whole parameter at a time, and one writer stores them in files of limited
size. So no step holds the model twice.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from memsaver.system.files import replace_text, sync
from rollout.model import Stored, read_json, spellings, stored_buffers, token_ids
from trainer_bridge.config import LoraConfig, TrainerConfig
from trainer_bridge.errors import OtherWeights, listed, misfits
from trainer_bridge.models.adapters.lora import (
    adapted_params,
    base_params,
    factor_names,
    shard_factors,
)
from trainer_bridge.models.adapters.peft_format import peft_config, peft_tensors
from trainer_bridge.models.files import checkpoint
from trainer_bridge.models.files.initial import CheckpointFiles, files_digest, open_weights
from trainer_bridge.models.runtime import Runtime
from trainer_bridge.models.sharded_model import meta_model, trained_params
from trainer_bridge.sync.shards import Box, like_shard, local_shard
from trainer_bridge.sync.writer import LowRank

_FILE_BYTES = 2 << 30
_KEPT = ("*.json", "*.jinja", "*.model", "*.txt")
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_REPLACED = ("config.json", "adapter_config.json")  # also the index of the weights
_GENERATION = "generation_config.json"  # only of models
_TEMPLATE = "chat_template.jinja"  # where transformers reads it first
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_HUB_SNAPSHOT = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/[^/]+/?$")


class ShardedWeights:
    """The weights of a trainer's model, whose ranks gather one parameter at a time.

    All methods are collective calls.
    """

    def __init__(self, model: nn.Module, config: TrainerConfig) -> None:
        self.model, self.config = model, config
        self._adapted = adapted_params(model)
        self._tensors = dict(model.named_parameters()) | stored_buffers(model)

    @cached_property
    def files(self) -> CheckpointFiles | None:
        """Return the weights in the model's directory; None if they are random."""
        return _open_files(self.model, self.config)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a parameter, an adapter's factor or a buffer, in `dtype`, on any device."""
        tensor = self._tensors[name]
        if not isinstance(tensor, DTensor):
            return tensor.to(dtype)
        return _gathered(local_shard(tensor).to(dtype), tensor)

    def merged(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return an adapted parameter with its adapter merged, rounded once to `dtype`."""
        adapter = self._adapted[name]
        local = local_shard(adapter.weight)
        return _gathered(shard_factors(adapter).merge(local, dtype), adapter.weight)


def _open_files(model: nn.Module, config: TrainerConfig) -> CheckpointFiles | None:
    return None if config.random_init else open_weights(model, config.model_dir)


def _gathered(local: Tensor, param: Tensor) -> Tensor:
    """Gather the shards of a tensor that is sharded like `param`."""
    assert isinstance(param, DTensor)
    return local if param.device_mesh.size() == 1 else like_shard(local, param).full_tensor()


class CheckpointWeights:
    """The weights of a trainer's checkpoint, with the interface of `ShardedWeights`.

    Its `model` is on the meta device. Frozen weights are read from the model's directory.
    """

    def __init__(self, directory: str, config: TrainerConfig) -> None:
        """Open a checkpoint of any number of ranks.

        Raises:
            ValueError: The checkpoint is incomplete, or belongs to another model.
            OtherWeights: The run of the adapters started from other weights.
        """
        values = checkpoint.read_values(directory)
        self.config, self.model = config, meta_model(config)
        self._stored = checkpoint.StoredTensors(directory, "params.")
        trained = {name: tuple(p.shape) for name, p in trained_params(self.model).items()}
        if problems := misfits(trained, self._stored.shapes):
            rule = f"checkpoint {directory!r} belongs to another model"
            raise ValueError(f"{rule}: {listed(problems)}")
        self.files = _open_files(self.model, config)
        self._shapes = _shapes(self.model)
        if config.lora is not None:
            self._check_base(directory, values.get("began_with"))
        self._adapted = adapted_params(self.model)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        if name in self._stored.shapes:
            return self._stored.read(name).to(dtype)
        if self.files is None:
            return torch.zeros(self._shapes[name], dtype=dtype)  # a buffer of a random model
        return self.files.whole(name, self._shapes[name]).to(dtype)

    def merged(self, name: str, dtype: torch.dtype) -> Tensor:
        adapter, (a, b) = self._adapted[name], factor_names(name)
        factors = LowRank(
            a=self.read(a, self.config.torch_dtype),
            b=self.read(b, self.config.torch_dtype),
            scale=adapter.scale,
        )
        return factors.merge(self.read(name, self.config.torch_model_dtype), dtype)

    def _check_base(self, directory: str, began_with: str | None) -> None:
        """Raise unless the adapters were trained on the base in the model's directory."""
        if self.files is None:
            rule = "trains adapters of random weights, which only the run itself has"
            raise ValueError(f"checkpoint {directory!r} {rule}; let the run export them merged")
        if (now := files_digest(self.model, self.files)) != (began_with or now):
            rule = f"the run began with other weights (digest {began_with}; {now} now)"
            raise OtherWeights(f"checkpoint {directory!r}: {rule}; restore the original weights")


Weights = ShardedWeights | CheckpointWeights


def export_checkpoint(
    checkpoint_dir: str,
    directory: str,
    config: TrainerConfig,
    *,
    merge_adapters: bool = False,
    chat_template: str | None = None,
) -> None:
    """Export a checkpoint as `Trainer.save_pretrained` exports the trainer.

    No GPU, no optimizer and no second copy of the model are needed. `config` names the model and
    its dtypes. The checkpoint itself says whether the run trains adapters. `merge_adapters` and
    `chat_template` are as of `Trainer.save_pretrained`.

    Raises:
        ValueError: The checkpoint is incomplete, belongs to another model, or cannot be exported
            like this.
        OtherWeights: The adapters were trained on other weights than the model's directory has.
        OSError: The directory cannot be written. Nothing is left of it.
    """
    values = checkpoint.read_values(checkpoint_dir)
    lora = None if values["adapters"] is None else LoraConfig(**values["adapters"])
    config = TrainerConfig(
        model_path=config.model_path,
        random_init=config.random_init,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        lora=lora,
    )
    runtime = Runtime.open("cpu")
    try:
        weights = CheckpointWeights(checkpoint_dir, config)
        how: dict[str, Any] = {"merge_adapters": merge_adapters, "chat_template": chat_template}
        save_folder(directory, weights, **how)
    finally:
        runtime.close()


def save_folder(
    directory: str,
    weights: Weights,
    dtype: torch.dtype | None = None,
    *,
    merge_adapters: bool = False,
    chat_template: str | None = None,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Save a model, or the adapters of one, as a Hugging Face folder; a collective call.

    An older export is replaced as a whole or not at all. Rank 0 writes. `chat_template` is as of
    `Trainer.save_pretrained`. `texts` are further files of a model, by name.

    Raises:
        ValueError: `merge_adapters` does not fit the model, or `directory` holds other files.
        OtherRankFailed: Another rank failed; the older folder stays.
    """
    config = weights.config
    if merge_adapters and config.lora is None:
        raise ValueError("merge_adapters=True needs adapters (TrainerConfig.lora); this has none")
    if config.lora is not None and not merge_adapters and config.random_init:
        rule = "the adapters' base has random weights, which no folder holds"
        raise ValueError(f"{rule}; set merge_adapters=True to export the whole model")
    source = Path(config.model_dir)
    with checkpoint.together():
        if os.path.exists(directory) and source.samefile(directory):
            raise ValueError(f"{directory} is the model's own directory; name another")
        files = _template_files(source, chat_template)
        if config.lora is not None and not merge_adapters:
            entries = list(_adapter_entries(weights, dtype or config.torch_dtype))
            described = _json(peft_config(config.lora, _base_name(config.model_path)))
            files |= {"adapter_config.json": described, _GENERATION: None}
            folder = _Folder("adapter_model", math.inf, files, _kept_files(source))
        else:
            dtype = dtype or config.torch_param_dtype
            entries = list(_model_entries(weights, dtype))
            files |= {**(texts or {}), "config.json": _config_text(source, weights.model, dtype)}
            files |= _generation_file(source)
            folder = _Folder("model", _FILE_BYTES, files, _kept_files(source))
    own = {*_WEIGHTS, *_REPLACED, _GENERATION, _TEMPLATE, *files, *(k.name for k in folder.kept)}
    with checkpoint.whole_directory(directory, own, "an export") as partial_directory:
        folder.write(Path(partial_directory), entries)


def _template_files(source: Path, template: str | None) -> dict[str, str | None]:
    """Return the files, by name, that hold a chat template in place of the model's own.

    A file with None is left out. With `template` None, the model's own files stay.
    """
    if template is None:
        return {}
    files: dict[str, str | None] = {_TEMPLATE: template or None, "chat_template.json": None}
    tokenizer = source / "tokenizer_config.json"
    settings = json.loads(tokenizer.read_text(encoding="utf-8")) if tokenizer.is_file() else {}
    if settings.pop("chat_template", None) is not None:
        files[tokenizer.name] = _json(settings)
    return files


def _generation_file(source: Path) -> dict[str, str | None]:
    """Return generation_config.json if the model's lacks a token that ends the engine's answers."""
    config = read_json(source / "config.json")
    settings = {key: config[key] for key in _SPECIAL_TOKENS if config.get(key) is not None}
    if (file := source / _GENERATION).is_file():
        settings = read_json(file)
    ends = settings.get("eos_token_id")
    listed = [ends] if isinstance(ends, int) else ends or []
    if not (missing := token_ids(source).ends.difference(listed)):
        return {}
    settings["eos_token_id"] = [*listed, *sorted(missing)]
    return {file.name: _json(settings)}


def _json(value: Mapping[str, Any]) -> str:
    return f"{json.dumps(value, indent=2)}\n"


class _Entry(NamedTuple):
    """Tensors that belong into one file.

    `tensors` is a collective call, which returns them by name on rank 0.
    """

    nbytes: int
    tensors: Callable[[], dict[str, Tensor]]


class _Folder(NamedTuple):
    """All of a folder but its weights, and how the files of the weights are named and divided."""

    stem: str
    file_bytes: float
    texts: Mapping[str, str | None]  # by file name; None leaves a kept file out
    kept: Sequence[Path]  # to copy

    def write(self, directory: Path, entries: Sequence[_Entry]) -> None:
        """Write the folder; a collective call."""
        files, places, total = self._divided(entries), dict[str, str](), 0
        for number, own in enumerate(files, 1):
            several = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
            name = f"{self.stem}{several}.safetensors"
            with checkpoint.together():  # a rank that could not write stops the others here
                tensors: dict[str, Tensor] = {}
                for entry in own:
                    tensors |= entry.tensors()
                if dist.get_rank() == 0:
                    _save_file(directory / name, tensors)
            places |= dict.fromkeys(tensors, name)
            total += sum(tensor.nbytes for tensor in tensors.values())
        if dist.get_rank() != 0:
            return
        texts = dict(self.texts)
        if len(files) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            texts[f"{self.stem}.safetensors.index.json"] = _json(index)
        for name, text in texts.items():
            if text is not None:
                replace_text(directory / name, text)
        for file in self.kept:
            if file.name in texts:
                continue
            shutil.copyfile(file, directory / file.name)
            sync(directory / file.name)

    def _divided(self, entries: Sequence[_Entry]) -> list[list[_Entry]]:
        """Divide entries into files, each of which is not larger than one entry or the limit."""
        files: list[list[_Entry]] = [[]]
        size = 0
        for entry in entries:
            if files[-1] and size + entry.nbytes > self.file_bytes:
                files.append([])
                size = 0
            files[-1].append(entry)
            size += entry.nbytes
        return files


def _save_file(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file to the disk; a full or broken disk raises an OSError."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    file.touch()
    mode = file.stat().st_mode  # safetensors would let only the owner read the file
    try:
        save_file(dict(tensors), file, {"format": "pt"})
        file.chmod(mode)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), f"{error}", str(file)) from error
    sync(file)


def _model_entries(weights: Weights, dtype: torch.dtype) -> Iterator[_Entry]:
    """Yield all parameters and buffers, spelled as in the model's directory.

    Buffers keep the dtype that they have there.
    """
    model, files = weights.model, weights.files
    buffers, adapted = stored_buffers(model), adapted_params(model)
    for name, shape in _shapes(model).items():
        own = _buffer_dtype(files, name) if name in buffers else dtype
        read = weights.merged if name in adapted else weights.read
        way = _published(name, shape, model) if files is None else files.ways[name]
        yield _Entry(math.prod(shape) * own.itemsize, partial(_parts, read, name, own, way))


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters without adapters, tied ones once, and of the buffers."""
    tensors = {**base_params(model), **stored_buffers(model)}
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _buffer_dtype(files: CheckpointFiles | None, name: str) -> torch.dtype:
    return torch.float32 if files is None else files.dtype(name)


def _published(name: str, shape: tuple[int, ...], model: Any) -> list[Stored]:
    """Return the spelling in which transformers saves a parameter of this model."""
    ways = spellings(name, shape)
    mixtral = model.config.model_type == "mixtral"
    usual = [way for way in ways if (".block_sparse_moe." in way[0].name) == mixtral]
    return (usual or ways)[-1]


def _parts(
    read: Callable[[str, torch.dtype], Tensor], name: str, dtype: torch.dtype, way: list[Stored]
) -> dict[str, Tensor]:
    whole = read(name, dtype)
    if dist.get_rank() != 0:
        return {}
    whole, parts = whole.detach().cpu(), {}
    for part in way:
        box = Box(part.start, part.box)
        parts[part.name] = whole[box.slices].reshape(part.shape).contiguous()
    return parts


def _adapter_entries(weights: Weights, dtype: torch.dtype) -> Iterator[_Entry]:
    for name, adapter in adapted_params(weights.model).items():
        nbytes = (adapter.a.numel() + adapter.b.numel()) * dtype.itemsize
        yield _Entry(nbytes, partial(_factors, weights, name, dtype))


def _factors(weights: Weights, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    a, b = (weights.read(factor, dtype) for factor in factor_names(name))
    return {} if dist.get_rank() != 0 else peft_tensors(name, a.cpu(), b.cpu())


def _config_text(source: Path, model: Any, dtype: torch.dtype) -> str:
    """Return the model's config.json with the dtype of the export."""
    fields = read_json(source / "config.json")
    if fields.get("tie_word_embeddings") and not model.config.tie_word_embeddings:
        fields["tie_word_embeddings"] = False  # the files hold an output embedding of their own
    fields.setdefault("architectures", [type(model).__name__.removeprefix("FSDP")])
    fields["dtype"] = str(dtype).removeprefix("torch.")
    if "torch_dtype" in fields:  # the older name of the key
        fields["torch_dtype"] = fields["dtype"]
    return _json(fields)


def _kept_files(source: Path) -> list[Path]:
    """Return the files to copy: tokenizer, chat template and other settings of the model."""
    files = chain.from_iterable(source.glob(pattern) for pattern in _KEPT)
    return sorted(
        file
        for file in files
        if file.name not in _REPLACED and not file.name.endswith(".index.json")
    )


def _base_name(model_path: str) -> str:
    """Return the name of the adapters' base: ORG/NAME of the Hub, or an absolute path."""
    path = Path(model_path)
    if not path.exists():
        return model_path
    snapshot = _HUB_SNAPSHOT.search(path.absolute().as_posix())
    return "/".join(snapshot.groups()) if snapshot else str(path.absolute())
