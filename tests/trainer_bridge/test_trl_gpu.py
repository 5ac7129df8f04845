"""TRL's class with a real vLLM on a GPU: in-place syncs write the same weights as TRL's own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.docs.pages import ROOT
from tests.helpers.trainer_bridge.models import write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("vllm", "trl", "accelerate"))),
        reason="vllm, trl or accelerate is not installed",
    ),
]

SCRIPT = """
import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import memsaver.compat
from tests.helpers.trainer_bridge.other_trainers import missing_for_trl

memsaver.compat.install("vllm.device_allocator.cumem")  # as the plugin does
sys.modules.update(missing_for_trl())
import trl.generation.vllm_generation as theirs
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
from trainer_bridge import trl

path, saved = sys.argv[1:]
theirs.LLM = functools.partial(theirs.LLM, skip_tokenizer_init=True, enforce_eager=True)
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(accelerator.device)
made = theirs.VLLMGeneration(
    model, accelerator, None, mode="colocate", enable_sleep_mode=True, gpu_memory_utilization=0.2,
    max_model_length=128, max_num_seqs=16, temperature=0.0, max_completion_length=12,
    generation_kwargs={"detokenize": False, "ignore_eos": True},
)
prompts = [[5, 9, 77, number] for number in range(4)]

def parameters():
    weights = made.llm.collective_rpc(lambda worker: worker.get_model())[0].named_parameters()
    return {name: weight.clone() for name, weight in weights}

def used():
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30

sync = trl.use(SimpleNamespace(vllm_generation=made))
seen = []
for number in range(3):
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.1)
    asleep = used()
    made.sync_weights()
    ours = parameters()
    _, tokens, _, _ = made.generate(prompts, None, 1)
    seen.append(tokens)
    assert sync.receipt.version == number + 1 and used() < asleep + 1
    theirs.VLLMGeneration.sync_weights(made)
    for name, weight in parameters().items():
        assert torch.equal(weight, ours[name]), name
    assert made.generate(prompts, None, 1)[1] == tokens, number
assert seen[0] != seen[1] != seen[2]
print(sync.receipt)
Path(saved).write_text("done")
"""


def test_in_place_sync_writes_and_generates_the_same_as_trl(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model", "qwen2", hidden_size=256, head_dim=64, max_position_embeddings=256
    )
    script, saved = tmp_path / "script.py", tmp_path / "saved"
    script.write_text(SCRIPT)
    path_of = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(script), path, str(saved)],
        capture_output=True, text=True, timeout=150, env={**os.environ, "PYTHONPATH": path_of},
    )  # fmt: skip
    assert saved.exists(), done.stdout[-1500:] + done.stderr[-3000:]
