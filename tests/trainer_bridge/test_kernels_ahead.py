"""Kernels compiled while a trainer starts are those that its first step launches; and the thread
that does it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from memsaver.system.machine import WarmUp
from tests.helpers.compiler import compile_alone
from tests.helpers.trainer_bridge.models import config, make_batch, write_model
from trainer_bridge import Cycle, Trainer, open_inprocess
from trainer_bridge.training.device import to_compile

CPU = torch.device("cpu")
# Triton asks a driver for the GPU, and a hook whether to compile: it is told no, and nothing is
# launched.
KEYS = """
import json, sys, tempfile, torch, triton
from pathlib import Path
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from memsaver.ops.digest import Digest
from trainer_bridge import TrainerConfig
from trainer_bridge.ops.token_scores import token_scores
from trainer_bridge.sync.cast_copy import CastCopy, Placement
from trainer_bridge.training.device import to_compile

stub = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
stub.get_current_target = lambda: GPUTarget("cuda", 90, 32)
triton.runtime.driver.set_active(stub)
keys = set()
def asked(*, key, repr, **_):
    keys.add((repr.partition("[")[0], key))
    return True
triton.knobs.runtime.jit_cache_hook = asked

def taken():
    found = sorted(keys)
    keys.clear()
    return found

for dtype, words, tokens in CASES:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({"vocab_size": words}))
        config = TrainerConfig(model_path=folder, dtype="float32", param_dtype=dtype)
        for job in to_compile(config, torch.device("cuda:0"), served=False):
            job()
    ahead, kind = taken(), getattr(torch, dtype)
    master, target = torch.zeros(16384), torch.zeros(16384, dtype=kind)
    placed = Placement(source=master, offset=0, dtype=kind, index_base=0)
    CastCopy([placed], "triton").start(target.view(torch.uint8))
    Digest([(target, 0)], "triton").start()
    hidden, weight = (torch.zeros(n, 64, dtype=kind, requires_grad=True) for n in (tokens, words))
    labels = torch.zeros(tokens, dtype=torch.int64)
    token_scores(hidden, weight, labels, 0.7, "triton")[0].sum().backward()
    print(json.dumps([ahead, taken()]))
"""
# COPY either way, ALIGNED, VECTOR; BLOCK
WHOLE = re.compile(r"\('constexpr', \w+\), \('constexpr', True\), \('constexpr', 8\)")
CASES = [("bfloat16", 151936, 37), ("bfloat16", 300, 5), ("float32", 49152, 16)]


def test_what_is_compiled_ahead_is_what_the_first_step_launches() -> None:
    lines = compile_alone(f"CASES = {CASES!r}\n{KEYS}").splitlines()
    assert len(lines) == len(CASES)
    for (dtype, *_), (ahead, launched) in zip(CASES, map(json.loads, lines), strict=True):
        assert [name for name, _ in ahead] == ["_reduce", "_to_gradient", *["run_segments"] * 2]
        assert ahead == launched
        whole = [bool(WHOLE.search(key)) for _, key in ahead]
        assert whole == [False, False, *[dtype == "bfloat16"] * 2]


def warming() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "warm-up"]


def test_close_waits_for_the_job_under_way_and_leaves_the_others() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        begun.set()
        assert go_on.wait(10)
        done.append("first")

    warm_up = WarmUp([first, lambda: done.append("second")], CPU)
    assert begun.wait(10) and len(warming()) == 1
    closing = threading.Thread(target=warm_up.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive() and not done
    go_on.set()
    closing.join(10)
    assert done == ["first"] and not warming()
    warm_up.close()  # again


def test_a_job_that_fails_is_logged_and_the_next_one_is_done(
    caplog: pytest.LogCaptureFixture,
) -> None:
    done = list[int]()

    def fails() -> None:
        raise RuntimeError("no ptxas here")

    with caplog.at_level(logging.DEBUG, "memsaver"):
        warm_up = WarmUp([fails, lambda: done.append(1)], CPU)
        for thread in warming():
            thread.join(10)
        warm_up.close()
    assert done == [1] and "no ptxas here" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.DEBUG}


def test_python_ends_after_the_job_under_way() -> None:
    code = "import time, torch\nfrom memsaver.system.machine import WarmUp\n"
    code += "done = lambda name: (time.sleep(0.5), print(name))\n"
    code += "WarmUp([lambda: done(1), lambda: done(2)], torch.device('cpu'))"
    assert compile_alone(code).split() == ["1"]


def test_a_trainer_ends_its_thread_with_itself_also_where_it_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, left = write_model(tmp_path / "model"), list[Any]()
    assert to_compile(config(path), CPU, served=False) == [], "none without a GPU"
    jobs = [lambda: time.sleep(0.2), lambda: left.append(1)]
    monkeypatch.setattr("trainer_bridge.trainer.to_compile", lambda *_: jobs)
    with pytest.raises(ValueError, match="config.json"):
        Trainer(config(str(tmp_path)))
    assert not warming() and not left
    trainer = Trainer(config(path))
    trainer.close()
    assert not warming()


@pytest.mark.gpu
def test_a_first_step_compiles_nothing_that_was_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import triton

    from memsaver.ops import segments_triton
    from trainer_bridge.ops import token_scores

    compiled: list[tuple[str, str, bool]] = []

    def note(*, key: str, fn: Any, is_manual_warmup: bool, **_: Any) -> None:
        compiled.append((fn.name, key, is_manual_warmup))

    for module in (segments_triton, token_scores):
        for kernel in vars(module).values():
            if isinstance(kernel, triton.JITFunction):
                kernel.device_caches.clear()  # of tests before
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    dtypes = {"dtype": "float32", "param_dtype": "bfloat16"}
    trained = config(write_model(tmp_path / "model"), device="cuda:0", **dtypes)
    engine = {"kv_tokens": 512, "page_size": 16, "dtype": "bfloat16"}
    with open_inprocess(trained, engine) as (trainer, rollout):
        for thread in warming():
            thread.join()
        ahead = [(name, key) for name, key, manual in compiled if manual]
        assert [name for name, _ in ahead] == ["run_segments"] * 2 + ["_reduce", "_to_gradient"]
        compiled.clear()
        cycle = Cycle(trainer, rollout)
        cycle.to_rollout(1)
        cycle.to_train()
        batch = make_batch(4)
        trainer.compute_log_prob(batch)
        trainer.update_actor(batch)
        later = [(name, key) for name, key, _ in compiled]
    whole = [key for name, key in later if name == "run_segments" and WHOLE.search(key)]
    assert not whole and not {"_reduce", "_to_gradient"} & {name for name, _ in later}
