"""Every benchmark runs once, at tiny sizes: each case passes its checks and saves its figures."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoTokenizer

import recipes
from benchmarks import (
    bench_exact_learning,
    bench_losses,
    bench_sync,
    bench_verl,
    common,
    gate,
    verl_side,
)
from recipes.errors import RecipeError
from tests.helpers.recipes.tiny_runs import without_pictures
from tests.helpers.rollout.package_names import Wheel
from trainer_bridge.adoption.verl import CLIENTS

# The arguments of each script, and names in its saved results.
SCRIPTS: dict[str, tuple[list[str], set[str]]] = {
    "bench_memory": (
        [],
        {"memsaver, kept", "driver's floor, clean", "memsaver, 60 GiB handed over"},
    ),
    "bench_backup": ([], {"pinned copy", "marked clean", "swap 16 GiB"}),
    "bench_sync": (
        ["--shape", "qwen3-30b-a3b", "--cases", "one", "two"],
        {"floors", "memsaver", "offloaded", "IPC buckets", *bench_sync.TWO},
    ),
    "bench_generate": ([], {"ms", "mismatch"}),
    "bench_steps": ([], {"ms", "beside"}),
    "bench_async": ([], {"streams of blocking", "keep: sleep, ms"}),
    "bench_serve": ([], {"blocking", "memsaver serve"}),
    "bench_turns": ([], {"floor", "host tier", "no tier"}),
    "bench_exact": ([], {"decode", "prefill", "step"}),
    "bench_switch": ([], {"everything stays", "everything is offloaded"}),
    "bench_update": ([], {"updates"}),
    "bench_vllm": ([], set()),
}
COUNTING = {"bench_memory", "bench_backup", "bench_sync"}  # these count bytes of the whole device
ON_GPU = {"bench_sync": {"IPC buckets"}}
MARKS = {name: [pytest.mark.alone] for name in COUNTING}
for _long in (
    "bench_sync",
    "bench_switch",
    "bench_serve",
    "bench_turns",
):  # other tests cover the code that they run
    MARKS[_long] = [*MARKS.get(_long, []), pytest.mark.extended]


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=MARKS.get(name, [])) for name in SCRIPTS]
)
def test_script_prints_and_saves_its_table(
    script: str, device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton is not interpreted here: the scripts run on the GPU")
    arguments, names = SCRIPTS[script]
    if device != "cpu":
        names = ON_GPU.get(script, names)
        arguments = [word for word in arguments if word != "two"]
    importlib.import_module(f"benchmarks.{script}").main(
        ["--tiny", "--out", str(tmp_path), *arguments]
    )
    assert "| --- | --- |" in capsys.readouterr().out
    saved = json.loads((tmp_path / f"{script}.json").read_text())
    assert names | {"conditions"} <= saved.keys()
    assert all(saved[name] for name in names)


def test_other_cases_are_saved_when_a_case_fails_or_is_skipped(tmp_path: Path) -> None:
    def fail() -> common.Figures:
        raise ZeroDivisionError

    def skip() -> common.Figures:
        raise common.Skipped("no reason")

    cases = {"bad": fail, "absent": skip, "good": lambda: common.figures({"it": 1.0})}
    with pytest.raises(SystemExit, match="failed, see above: bad$"):
        common.run_cases("some", cases, tmp_path, bar=lambda name, figure: (name, figure.what))
    saved = json.loads((tmp_path / "some.json").read_text())
    assert saved.keys() == {"conditions", "good"} and (tmp_path / "some.png").exists()


def test_mismatch_and_scores_of_exact_and_other_runs_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tiny", "--out", str(tmp_path), "--recipe", "tiny", "--score", "correct"]
    with without_pictures():  # of the runs themselves
        bench_exact_learning.main([*words, "--cases", "exact", "fp8 cache, corrected"])
    table = capsys.readouterr().out
    assert re.search(r"\| exact \| \d+ \| 0 \| 0 \|", table), table
    assert (tmp_path / "bench_exact_learning.png").stat().st_size > 10_000


def test_losses_are_drawn_from_finished_runs_when_another_run_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--tiny", "--seeds", "1", "--out", str(tmp_path), "--cases"]
    with without_pictures():  # of the run itself
        bench_losses.main([*words, "GSPO"])
    picture = tmp_path / "bench_losses.png"
    picture.unlink()

    def fail(recipe: str, settings: Sequence[str], folder: Path) -> None:
        raise RecipeError("no luck")

    monkeypatch.setattr(bench_losses, "start_run", fail)
    with pytest.raises(SystemExit, match="failed, see above: RLOO$"):
        bench_losses.main([*words, "RLOO", "GSPO"])
    saved = json.loads((tmp_path / "bench_losses.json").read_text())
    assert saved.keys() == {"conditions", "GSPO"} and len(saved["GSPO"]["reward"][0]) == 2
    printed = capsys.readouterr().out
    assert "rloo-0 ... FAILED: no luck" in printed and "\n| GSPO | " in printed
    assert picture.stat().st_size > 10_000
    with pytest.raises(SystemExit, match="failed, see above: GSPO$"):
        bench_losses.main([*words, "GSPO", "--set", "trainer.learning_rate=1e-3"])
    assert "holds a run of other keys" in capsys.readouterr().out


@pytest.mark.parametrize("case", bench_losses.CASES)
@pytest.mark.parametrize("recipe", ["tiny", "smollm2-135m"])
def test_keys_of_losses_fit_recipe(recipe: str, case: str) -> None:
    settings = bench_losses.settings_of(case, ["steps=2"], recipes.load(recipe))
    assert recipes.load(recipe, settings).steps == 2


VERL = Wheel("verl")


@pytest.mark.skipif(VERL.may_skip, reason="verl is not installed")
@pytest.mark.parametrize("side", bench_verl.SIDES)
def test_verl_has_every_key_that_its_benchmark_sets(side: str, tmp_path: Path) -> None:
    assert VERL.folder is not None
    path = VERL.folder / "trainer/config/_generated_ppo_trainer.yaml"
    known = yaml.safe_load(path.read_text())
    args = argparse.Namespace(out=tmp_path, steps=3, gpus=1, tensor_parallel=1)
    keys = [setting.partition("=")[0] for setting in bench_verl.keys(side, args)]
    added = "+actor_rollout_ref.model.override_config.attn_implementation"
    assert [key for key in keys if not has_key(known, key)] == [added]


def test_verl_benchmark_times_the_rollouts_that_the_plugin_registers() -> None:
    wanted = {name: where.rpartition(".")[::2] for name, where in CLIENTS.items()}
    wanted["vllm"] = ("verl.workers.rollout.vllm_rollout", "ServerAdapter")
    assert wanted == verl_side.CLASSES and {*bench_verl.SIDES.values()} == {*wanted}
    assert not any(name in vars(verl_side) for name in wanted)  # else `__getattr__` is not called


def has_key(config: Any, key: str) -> bool:
    first, _, rest = key.partition(".")
    return first in config and (not rest or has_key(config[first], rest))


def test_verl_benchmark_writes_a_model_whose_tokenizer_has_a_chat_template(tmp_path: Path) -> None:
    args = argparse.Namespace(out=tmp_path, tiny=True, shape="qwen2.5-0.5b")
    bench_verl.write_model(args)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    message = [{"role": "user", "content": "write a"}]
    tokens = tokenizer.apply_chat_template(message, tokenize=True, return_dict=False)
    assert tokenizer.decode(tokens) == "write a\n" and len(tokens) == 8


def test_gate_names_ratios_that_are_slower_beyond_their_noise() -> None:
    stored = {name: {"ratio": 2.0, "noise": 0.1} for name in ("faster", "noisy", "slower")}
    measured = {"faster": 1.0, "noisy": 2.19, "slower": 2.21, "absent": None, "new": 5.0}
    rows, slower = gate.judge(measured, stored)
    assert slower == ["slower"]
    assert [row[-1] for row in rows] == ["ok", "ok", "SLOWER", "not measured", "nothing stored"]


def test_gate_reads_its_ratios_from_saved_results(tmp_path: Path, device: str) -> None:
    """Store ratios of quick scripts at tiny sizes; fail without any, and with ratios close to 0."""
    stored, quick = tmp_path / "gate.json", ["bench_memory", "bench_generate"]
    words = ["--tiny", "--stored", str(stored), "--cases", *quick]
    other = {"another GPU": {"kept": {"ratio": 1.0, "noise": 0.1}}}
    stored.write_text(json.dumps(other))
    with pytest.raises(SystemExit, match="no ratio is accepted for "):
        gate.main(words[:-1])
    gate.main([*words, "--accept"])
    accepted = json.loads(stored.read_text())
    assert accepted == {**other, common.device_name(): accepted[common.device_name()]}
    names = {ratio.name for ratio in gate.RATIOS if ratio.script in quick}
    assert accepted[common.device_name()].keys() == names
    low = {name: {"ratio": 1e-9, "noise": 0.0} for name in names}
    stored.write_text(json.dumps({common.device_name(): low}))
    with pytest.raises(SystemExit, match="slower than accepted, beyond noise: "):
        gate.main(words[:-1])


def test_gate_reads_only_the_named_figure() -> None:
    [paused] = [ratio for ratio in gate.RATIOS if ratio.name.startswith("8 GiB paused")]
    cases = {
        "host, extents kept": {"first pause": 9.0, "pause": 3.0},
        "pinned copy": {"pause": 2.0},
    }
    results = {
        name: [{"what": what, "value": value, "unit": "ms"} for what, value in figures.items()]
        for name, figures in cases.items()
    }
    assert paused.read(results) == 1.5 and paused.read({}) is None


def test_gate_measures_every_accepted_ratio() -> None:
    stored = json.loads(gate.STORED.read_text())
    known = {ratio.name for ratio in gate.RATIOS}
    assert all(accepted.keys() <= known for accepted in stored.values())
    assert {ratio.script for ratio in gate.RATIOS} == gate.ARGUMENTS.keys()
