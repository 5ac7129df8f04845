"""TRL's class with a real vLLM on a GPU: in-place syncs write the trainer's weights.

They write the same bits as TRL's own sync. Adapters are merged with a single rounding.
"""

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

BEGIN = """
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
from trainer_bridge.adoption import trl

path, saved = sys.argv[1:]
theirs.LLM = functools.partial(theirs.LLM, skip_tokenizer_init=True, enforce_eager=True)
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(accelerator.device)

def start(model):
    return theirs.VLLMGeneration(
        model, accelerator, None, mode="colocate", enable_sleep_mode=True,
        gpu_memory_utilization=0.2, max_model_length=128, max_num_seqs=16, temperature=0.0,
        max_completion_length=12, generation_kwargs={"detokenize": False, "ignore_eos": True},
    )

prompts = [[5, 9, 77, number] for number in range(4)]

def weights():
    return made.llm.collective_rpc(lambda worker: worker.get_model())[0]

def parameters():
    return {name: weight.clone() for name, weight in weights().named_parameters()}

def used():
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30
"""

WHOLE = """
made = start(model)
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

ADAPTERS = """
import peft
from tests.helpers.trainer_bridge.adapters import assert_one_rounding, exact_weights, randomize

config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", modules_to_save=["norm"])
model = peft.get_peft_model(model.bfloat16(), config)
made = start(model)
sync = trl.use(SimpleNamespace(vllm_generation=made))
frozen = [param.clone() for param in model.parameters() if not param.requires_grad]
seen = []
for number in range(3):
    randomize(model, number)
    made.sync_weights()
    assert_one_rounding(SimpleNamespace(model=weights()), *exact_weights(model))
    seen.append(made.generate(prompts, None, 1)[1])
still = [param for param in model.parameters() if not param.requires_grad]
assert all(map(torch.equal, frozen, still))
assert seen[0] != seen[1] != seen[2]
made.sync_weights()
every = sync.receipt.nbytes
made.sync_weights()  # vLLM holds the last sync
assert sync.receipt.nbytes < every
print(sync.receipt)
Path(saved).write_text("done")
"""


@pytest.mark.parametrize("script", [WHOLE, ADAPTERS], ids=["whole", "adapters"])
def test_in_place_sync_writes_the_trainers_weights(script: str, tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "model", "qwen2", hidden_size=256, head_dim=64, max_position_embeddings=256
    )
    file, saved = tmp_path / "script.py", tmp_path / "saved"
    file.write_text(BEGIN + script)
    path_of = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(file), path, str(saved)],
        capture_output=True, text=True, timeout=150, env={**os.environ, "PYTHONPATH": path_of},
    )  # fmt: skip
    assert saved.exists(), done.stdout[-1500:] + done.stderr[-3000:]
