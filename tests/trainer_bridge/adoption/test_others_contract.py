"""Claims of docs/how-to/other-trainers.md about verl and torchtitan, checked in their sources.

The sources are not imported. `make setup` downloads them.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from transformers import AutoConfig

from rollout.model import parameter_shapes
from tests.helpers.models import save_tiny
from tests.helpers.rollout.package_names import Wheel

VERL, TITAN = Wheel("verl"), Wheel("torchtitan")
with_verl = pytest.mark.skipif(VERL.may_skip, reason="verl is not installed")
with_titan = pytest.mark.skipif(TITAN.may_skip, reason="torchtitan is not installed")
# Lines that each file of verl must contain.
WORDS = {
    "workers/rollout/vllm_rollout/vllm_async_server.py": [
        '"enable_sleep_mode": self.config.enable_sleep_mode',
        "self.engine.sleep(level=self._resolve_sleep_level())",
        "self.engine.wake_up(tags=tags or self._get_wake_up_tags())",
        "        return 2",
        "if weight_transfer_backend not in {None, VERL_DELTA_WEIGHT_TRANSFER_BACKEND}:",
        '"worker_extension_cls": self._get_worker_extension_cls(),',
        "            **engine_kwargs,",
        "prefix = self._get_server_name_prefix()",
        "server = self.server_class.options(",
        "        await self.engine.collective_rpc(\n            method=method,",
    ],
    "single_controller/ray/base.py": ['"RANK": str(rank),'],
    "workers/rollout/vllm_rollout/vllm_rollout.py": ["BucketedWeightSender("],
    "workers/rollout/sglang_rollout/async_sglang_server.py": ['"enable_memory_saver": True'],
    "workers/engine_workers.py": [
        'self.rollout.resume(tags=["weights"])',
        'self.rollout.resume(tags=["kv_cache"])',
        "self.actor.engine.get_per_tensor_param(",
    ],
    "workers/rollout/base.py": ["_ROLLOUT_REGISTRY = {"],
    "workers/rollout/replica.py": ["def register(cls, name: str, loader:"],
    "workers/engine/base.py": ["class EngineRegistry:", 'os.getenv("VERL_ENGINE_VENDOR")'],
    "__init__.py": ['_entry_points(group="verl.plugins")', "            _ep.load()\n"],
    "trainer/main_ppo.py": ['ray_init_kwargs.get("runtime_env", {})', "OmegaConf.merge("],
}


@with_verl
@pytest.mark.parametrize("place", WORDS)
def test_verl_puts_engines_to_sleep_by_their_own_calls(place: str) -> None:
    assert VERL.folder is not None
    text = (VERL.folder / place).read_text()
    assert [word for word in WORDS[place] if word not in text] == []


def torchtitan_names() -> dict[str, str]:
    """Read torchtitan's names of a Qwen3, by those of Hugging Face, from its adapter's table."""
    (adapter,) = TITAN.classes("Qwen3StateDictAdapter")
    (table,) = [
        node.value
        for node in ast.walk(adapter)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self.from_hf_map"
    ]
    names: dict[str, str] = ast.literal_eval(table)
    return names


@with_titan
def test_torchtitan_adapter_renames_all_parameters_of_dense_qwen3(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3", tie_word_embeddings=False)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "qwen3"
    names = torchtitan_names()
    ours = {re.sub(r"\.\d+\.", ".{}.", name) for name in parameter_shapes(tmp_path)[0]}
    assert ours - names.keys() == set()
    assert len({names[name] for name in ours}) == len(ours)
    (adapter,) = TITAN.classes("Qwen3StateDictAdapter")
    assert "hf_state_dict[new_key] = value\n" in ast.unparse(adapter) + "\n"
