"""The files of a Hugging Face model directory: JSON, tensors and end tokens.

Engine, trainer, planner and export read directories by this file only, so that all of them see one
model.
"""

import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, equal

from rollout.weights.pages import shorten

_log = logging.getLogger("rollout")
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER_FILES = ("*tok*", "vocab.*", "tekken.json")
_TOKENIZER_JSON = ("special_tokens_map", "tokenizer_config", "added_tokens", "tokenizer")
# Buffers in old checkpoints, and multi-token prediction layers (Qwen3-Next).
_UNUSED = re.compile(r"rotary_emb\.inv_freq$|self_attn\.(masked_)?bias$|^mtp\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
T = TypeVar("T")


def cached_by_content(read: Callable[[Path], T]) -> Callable[[str | Path], T]:
    """Cache what `read` returns for a directory until one of the directory's files changes."""

    @functools.lru_cache(maxsize=64)
    def cached(directory: Path, _: tuple[Any, ...]) -> T:
        return read(directory)

    @functools.wraps(read)
    def call(path: str | Path) -> T:
        directory = Path(path)
        entries = os.scandir(directory) if directory.is_dir() else ()
        stats = ((entry.name, entry.stat()) for entry in entries if entry.is_file())
        sizes = sorted((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)
        return cached(directory, tuple(sizes))

    return call


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a model directory.

    Raises:
        ValueError: The file is missing, is not valid JSON in UTF-8, or holds no object; names it.
    """
    if not path.is_file():
        raise ValueError(f"{path} not found; the model path must be a Hugging Face model directory")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        why = "" if isinstance(content, dict) else "it holds no JSON object"
    except ValueError as error:
        why = f"not valid JSON: {error}"
    if why:
        raise ValueError(f"{path} cannot be read ({why}); download or save the model again")
    return content


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def load_hf_config(path: str | Path) -> Any:
    """Read transformers' config of a model directory.

    As in transformers, a model whose files hold an output embedding of its own is not tied, even if
    config.json says so.

    Raises:
        ValueError: config.json is missing or damaged, or transformers refuses it; names it.
    """
    config = _auto_config(Path(path))
    if getattr(config, "tie_word_embeddings", False) and _own_head(path):
        config.tie_word_embeddings = False
    return config


def _auto_config(directory: Path) -> Any:
    from transformers import AutoConfig

    file = directory / "config.json"
    read_json(file)  # names the file if it is damaged
    try:
        return AutoConfig.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # a wrong value raises many types
        why = " ".join(str(error).split())
        raise ValueError(f"{file} is refused by transformers: {why}; correct it") from error


@cached_by_content
def _own_head(directory: Path) -> bool:
    """Return whether the files hold both tied tensors, and these differ."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    try:
        files = open_tensors(directory)
    except ValueError:  # reported by whoever reads the weights, if anyone does
        return False
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(_auto_config(directory))]
    ties = kind._tied_weights_keys
    for name, stored in ties.items() if isinstance(ties, Mapping) else ():
        if name not in files or stored not in files:
            continue
        head, embedding = (files[each].get_tensor(each) for each in (name, stored))
        if not equal(head, embedding.to(head.dtype)):
            _log.warning("%s: %s differs from %s; they are not tied", directory, name, stored)
            return True
    return False


def iter_checkpoint(path: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, CPU tensor) from a directory's safetensors files, one at a time.

    Raises:
        ValueError: As `open_tensors`.
    """
    for name, file in open_tensors(path).items():
        yield name, file.get_tensor(name)


def open_tensors(path: str | Path) -> dict[str, Any]:
    """Open a directory's safetensors files; they are mapped, not read.

    The index decides which file a tensor comes from. Tensors that no model uses are left out, and
    the log names them.

    Returns:
        The open file of each tensor, by the tensor's name.

    Raises:
        ValueError: A file is missing, truncated or damaged, the index names a tensor that its file
            lacks, or it is undecided which files are the model; names them.
    """
    directory = Path(path)
    places = _weight_map(directory)
    files: dict[str, Any] = {}
    left_out: list[str] = []
    for shard in dict.fromkeys(places.values()) if places else [_SINGLE]:
        file = open_checkpoint(directory / shard)
        for name in file.keys():  # noqa: SIM118  (safe_open is not a mapping)
            if places.get(name, shard) != shard or name in files:
                left_out.append(f"{name} of {shard}")
            else:
                files[name] = file
    if lacking := [name for name in places if name not in files]:
        rule = f"assigns {shorten(lacking)} to {places[lacking[0]]}, which lacks it"
        raise ValueError(f"{directory / _INDEX} {rule}; download or save the model again")
    unused = _unused(directory, files)
    if left_out or unused:
        text = "%s: tensors that are left out: %s"
        _log.log(
            logging.WARNING if left_out else logging.INFO, text, path, shorten(left_out + unused)
        )
    return {name: file for name, file in files.items() if name not in unused}


def _weight_map(directory: Path) -> dict[str, str]:
    """Return the file of each tensor from the index; nothing without an index."""
    if not (directory / _INDEX).is_file():
        return {}
    places = read_json(directory / _INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        rule = "cannot be read (it has no weight_map)"
        raise ValueError(f"{directory / _INDEX} {rule}; download or save the model again")
    if (directory / _SINGLE).is_file() and _SINGLE not in places.values():
        rule = f"holds both {_SINGLE} and {_INDEX}, which may be two models"
        raise ValueError(f"{directory} {rule}; remove the one that is not the model")
    return places


def open_checkpoint(file: Path) -> Any:
    """Open a safetensors file by `safetensors.safe_open`; it is mapped, not read.

    Raises:
        ValueError: The file is missing, truncated or damaged; names it.
    """
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        remedy = "download the model again, or save it with save_pretrained()"
        raise ValueError(f"{file.parent} lacks {file.name}; {remedy}")
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"{file} cannot be read ({error}); download or save the model again"
        ) from error


def _unused(directory: Path, names: Mapping[str, Any]) -> list[str]:
    """Return the tensors that the model ignores, such as DeepSeek-V3's prediction layers."""
    config = _read_optional(directory / "config.json")
    first, count = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    extra = range(first, first + count) if first and count else ()
    layers = ((name, _LAYER.match(name)) for name in names)
    predicting = {name for name, match in layers if match and int(match[1]) in extra}
    return [name for name in names if name in predicting or _UNUSED.search(name)]


class TokenIds(NamedTuple):
    """Special ids of a model directory.

    Attributes:
        ends: Tokens that end an answer: the end tokens of generation_config.json, else of
            config.json, and the end token of transformers' tokenizer. A fine-tuned model often ends
            its turns with a token that only its tokenizer names.
        size: Ids from this one on are no tokens: the rows of an output layer are often padded.
            None: the directory has no tokenizer.
    """

    ends: frozenset[int]
    size: int | None


@cached_by_content
def token_ids(directory: Path) -> TokenIds:
    """Read the special ids of a model directory.

    Raises:
        ValueError: A JSON file is damaged; names it.
    """
    ids = _read_optional(directory / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = read_json(directory / "config.json").get("eos_token_id")
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(token, int) for token in listed):
        raise ValueError(f"{directory}: eos_token_id={ids!r} must be token ids; correct it")
    end, largest = _tokenizer_ids(directory)
    ends = frozenset(listed if end is None else [*listed, end])
    return TokenIds(ends, None if largest is None else max([largest, *ends]) + 1)


def _tokenizer_ids(directory: Path) -> tuple[int | None, int | None]:
    """Return end token and largest id of transformers' tokenizer; None for what it lacks."""
    if not any(any(directory.glob(pattern)) for pattern in _TOKENIZER_FILES):
        return None, None
    from transformers import AutoTokenizer

    for stem in _TOKENIZER_JSON[:-1]:
        _read_optional(directory / f"{stem}.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        return tokenizer.eos_token_id, max(tokenizer.get_vocab().values(), default=None)
    except Exception as error:  # a wrong file raises many types
        _read_optional(directory / "tokenizer.json")  # large, so it is read for the message only
        text = "%s: the tokenizer cannot be read, so its end token ends no answer: %s"
        _log.warning(text, directory, " ".join(str(error).split()))
        return None, None
