"""Exported models of runs: in the run, by the command, after failures, and their errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.cli import main
from recipes.errors import RunError
from recipes.logs.checkpoints import Checkpoints
from recipes.run import continue_run, start_run
from rollout import Engine, SamplingParams
from tests.helpers.exports import contents
from tests.helpers.models import greedy
from tests.helpers.read_only_disk import read_only
from tests.helpers.recipes.tiny_runs import MakeRun
from trainer_bridge import Trainer

FEW = ("steps=3", "eval.every=0", "loop.prompts_per_step=2", "loop.samples_per_prompt=2")
EVERY = (*FEW, "checkpoint.every=1", "checkpoint.keep=9", "checkpoint.export_every=2")
LORA = ("lora.rank=4", "lora.target_modules=[q_proj,down_proj]")


def exported(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "exports").glob("*"))


def test_run_exports_at_intervals_and_after_the_last_step(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command writes the same bytes as the run, for any step that has a checkpoint."""
    run = make_run("tiny", *EVERY)
    capsys.readouterr()  # what the run printed
    assert exported(run) == ["step_2", "step_3"]
    for number in (2, 3):
        out = tmp_path / f"out{number}"
        assert main(["export", str(run), "--to", str(out), "--step", str(number)]) == 0
        assert contents(out) == contents(run / "exports" / f"step_{number}")
        size = sum(map(len, contents(out).values())) / 2**10
        line = f"{out}: step {number}, {size:.1f} KiB; load it with "
        assert capsys.readouterr().out == f"{line}AutoModelForCausalLM.from_pretrained('{out}')\n"
    Checkpoints(run).mark_best(2, keep=9)
    assert main(["export", str(run), "--to", str(tmp_path / "best"), "--best"]) == 0
    assert contents(tmp_path / "best") == contents(tmp_path / "out2")
    (run / "checkpoints" / "best").unlink()  # other tests share the run
    assert main(["export", str(run), "--to", str(tmp_path / "newest")]) == 0
    assert contents(tmp_path / "newest") == contents(tmp_path / "out3")


def test_exported_model_answers_a_chat_like_our_engine(make_run: MakeRun) -> None:
    out = make_run("tiny", *EVERY) / "exports" / "step_3"
    tokenizer = AutoTokenizer.from_pretrained(out)
    chat = [{"role": "user", "content": "first of b e"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    engine = Engine.from_pretrained(str(out), kv_tokens=64, dtype=torch.float32)
    ((sample,),) = engine.generate([ids], SamplingParams(max_tokens=8, temperature=0))
    assert sample.token_ids == greedy(model.eval(), ids, 8)


@pytest.mark.parametrize("template", ["{{ messages[0]['content'] }} answer", None])
def test_export_has_the_template_that_the_run_used(
    template: str | None, make_run: MakeRun, tmp_path: Path
) -> None:
    """The file of the template is gone when the command exports."""
    file, out = tmp_path / "own.jinja", tmp_path / "out"
    if template is not None:
        file.write_text(template)
    run = make_run("tiny", *FEW, f"task.template={file if template else 'none'}")
    file.unlink(missing_ok=True)
    assert main(["export", str(run), "--to", str(out)]) == 0
    assert contents(out) == contents(run / "exports" / "step_3")
    assert AutoTokenizer.from_pretrained(out).chat_template == template


@pytest.mark.parametrize(("every", "names"), [("0", ["step_3"]), ("null", [])])
def test_run_without_checkpoints_exports_as_it_is_asked(
    every: str, names: list[str], make_run: MakeRun
) -> None:
    run = make_run("tiny", *FEW, "checkpoint.every=0", f"checkpoint.export_every={every}")
    assert exported(run) == names
    with pytest.raises(SystemExit) as stopped:
        main(["export", str(run)])
    assert stopped.value.code == 2


def test_adapters_are_exported_alone_or_merged(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")

    base = make_run("tiny", *EVERY) / "exports" / "step_3"
    run = make_run("tiny", *EVERY, *LORA, f"model.path={base}")
    assert main(["export", str(run), "--to", str(tmp_path / "own")]) == 0
    assert "AutoPeftModelForCausalLM" in capsys.readouterr().out
    assert contents(tmp_path / "own") == contents(run / "exports" / "step_3")
    assert main(["export", str(run), "--to", str(tmp_path / "merged"), "--merge"]) == 0
    ids = torch.tensor([[7, 8, 9, 10]])
    with torch.no_grad():
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
        adapted = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "own")(ids).logits
    assert torch.allclose(merged, adapted, atol=1e-4)


def test_run_merges_adapters_of_random_weights(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("tiny", *EVERY, *LORA)
    AutoModelForCausalLM.from_pretrained(run / "exports" / "step_3")
    assert main(["export", str(run), "--to", str(tmp_path / "out"), "--merge"]) == 2
    assert "trains adapters of random weights" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def refused(words: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line about a command that must be refused."""
    assert main(["export", *map(str, words)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("memsaver: ")


def test_exports_that_cannot_be_made_are_refused_in_one_line(
    make_run: MakeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = make_run("tiny", *EVERY), tmp_path / "out"
    bare = make_run("tiny", *FEW, "checkpoint.every=0", "checkpoint.export_every=0")
    rule = "holds no run (no metrics.jsonl); give the folder that memsaver run printed"
    assert refused([tmp_path, "--to", out], capsys) == f"export {tmp_path}: {rule}"
    rule = "holds no checkpoint yet; its run saves one every checkpoint.every steps"
    assert refused([bare, "--to", out], capsys) == f"{bare}: {rule}"
    line = f"--step 7: {run} has checkpoints of these steps: 1, 2, 3"
    assert refused([run, "--to", out, "--step", 7], capsys) == line
    line = "--merge: the run trains no adapters; drop --merge"
    assert refused([run, "--to", out, "--merge"], capsys) == line
    rule = "keeps no best checkpoint: nothing beat the initial weights, or none was saved"
    line = f"--best: {run} {rule}; leave --best out for the newest"
    assert refused([run, "--to", out, "--best"], capsys) == line
    assert not out.exists()
    out.mkdir()
    (out / "notes").write_text("mine")
    line = f"--to {out}: is not empty; name a new folder; nothing was written"
    assert refused([run, "--to", out], capsys) == line
    assert contents(out) == {"notes": b"mine"}
    (out / "notes").unlink()
    assert main(["export", str(run), "--to", str(out)]) == 0


def test_base_that_has_changed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_pictures: None, make_run: MakeRun
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    for name, data in contents(make_run("tiny", *EVERY) / "exports" / "step_3").items():
        (base / name).write_bytes(data)
    run = start_run("tiny", [*EVERY, *LORA, f"model.path={base}"], tmp_path / "run")
    weights = make_run("tiny", *EVERY) / "exports" / "step_2" / "model.safetensors"
    (base / "model.safetensors").write_bytes(weights.read_bytes())
    for more in ([], ["--merge"]):
        line = refused([run, "--to", tmp_path / "out", *more], capsys)
        assert "the run began with other weights" in line and line.endswith("nothing was written")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_export_to_a_bad_disk_fails_in_one_line_and_leaves_nothing(
    fault: str,
    make_run: MakeRun,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = make_run("tiny", *EVERY)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if fault == "full":
            patch.setattr(os, "fsync", full)
        else:
            read_only(patch, tmp_path)
        assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 1
    why = "No space left on device" if fault == "full" else "Read-only file system"
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line and line.startswith("memsaver: export failed: ")
    assert line.endswith("; repair that and export again; nothing was left behind")
    assert not list(tmp_path.iterdir())


def test_run_that_cannot_export_keeps_its_checkpoint(
    tmp_path: Path, no_pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export of the last step fails; the checkpoint of that step can still be exported."""
    run, words = tmp_path / "run", [*FEW, "checkpoint.every=1"]

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "save_pretrained", full)
        with pytest.raises(RunError, match="writing the export of step 3 failed: .*No space left"):
            start_run("tiny", words, run)
    assert not exported(run)
    assert main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    continue_run(run, None, ["steps=4"])
    assert exported(run) == ["step_4"]
