"""Qwen3-Next, attention beside gated delta nets, against transformers: every token advances a request's states once."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache import HybridReqToTokenPool
from rollout import Engine, SamplingParams
from tests.helpers.effort import some
from tests.helpers.rollout.answers import check, random_prompts
from tests.helpers.rollout.configs import assert_refused
from tests.helpers.rollout.saved import Saved

LINEAR, FULL = "linear_attention", "full_attention"
LENGTHS = (1, 2, 3, 15, 16, 17, 64, 65, 150)
MAX_TOKENS = 10
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0)
MODELS: list[dict[str, Any]] = some(
    {"layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL], "num_hidden_layers": 5, "tie_word_embeddings": True},
    {"layer_types": [FULL, LINEAR], "linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "attention_bias": True},
    {"num_experts": 8, "mlp_only_layers": [0, 1], "head_dim": 32, "partial_rotary_factor": 0.5},
    {"layer_types": [FULL, FULL], "num_key_value_heads": 1, "partial_rotary_factor": 1.0},
    whole=[{}],
)
THREE = {"layer_types": [LINEAR, FULL, LINEAR], "num_hidden_layers": 3}
Make = Callable[..., Engine]


@pytest.fixture
def make(saved: Saved, device: str) -> Make:
    path, _ = saved("qwen3_next", **THREE)
    return lambda **fields: Engine.from_pretrained(path, device=device, **{"kv_tokens": 1024, **fields})


@pytest.fixture
def model(saved: Saved) -> Any:
    return saved("qwen3_next", **THREE)[1]


def check_empty(engine: Engine) -> None:
    engine.check_integrity()
    assert engine.cache.states is not None
    assert engine.cache.states.available_size() == engine.config.max_running


def poison(engine: Engine, *_: int) -> None:
    """NaN in every state slot and every page that no request holds, and in the padding ones."""
    cache, states = engine.cache, engine.cache.states
    assert states is not None and isinstance(cache.table, HybridReqToTokenPool)
    free = [0, *sorted(set(range(1, states.size + 1)) - set(cache.table.req_to_mamba.tolist()))]
    for layer in range(states.config.num_layers):
        convs, temporal = states.states(layer)
        for state in (*convs, temporal):
            state[free] = float("nan")
    counts = cache.blocks.allocator.ref_counts(list(range(1, cache.blocks.total_pages + 1)))
    unused = torch.tensor([True, *(counts == 0).tolist()]).repeat_interleave(engine.config.page_size)
    for layer in cache.layout.layers("full"):
        for part in cache.pool.get_kv_buffer(layer):
            part[unused.to(part.device)] = float("nan")


@pytest.mark.parametrize("overrides", MODELS)
def test_equals_transformers(saved: Saved, overrides: dict[str, Any], device: str) -> None:
    """Prompts of 1 to 150 tokens in one mixed batch, those past 48 tokens prefilled in chunks beside decoding."""
    path, model = saved("qwen3_next", **overrides)
    engine = Engine.from_pretrained(path, device=device, kv_tokens=1024, max_prefill_tokens=48)
    prompts = random_prompts(LENGTHS)
    check(model, prompts, engine.generate(prompts, GREEDY))
    engine.check_integrity()


@pytest.mark.parametrize("chunk", some(1, 5, whole=[64]))
def test_prefill_in_chunks(model: Any, make: Make, chunk: int) -> None:
    prompts = random_prompts((1, 3, 12, 70))
    engine = make(max_prefill_tokens=chunk)
    assert engine.cache.states is not None
    mine = engine.cache.states.alloc(2)  # from here on a request's row and its slot are different numbers
    assert mine is not None
    check(model, prompts, engine.generate(prompts, GREEDY))
    engine.cache.states.free(mine)
    check_empty(engine)


def test_few_slots_are_used_again_and_poison_in_free_ones_is_not_seen(model: Any, make: Make) -> None:
    engine = make(max_running=3, max_prefill_tokens=16)
    prompts = random_prompts((1, 40, 5, 70, 17))
    poison(engine)
    check(model, prompts, engine.generate(prompts, GREEDY, on_progress=partial(poison, engine)))
    check_empty(engine)


def test_groups_diverge_from_one_prompt(model: Any, make: Make) -> None:
    prompts = random_prompts((3, 40))
    params = SamplingParams(max_tokens=12, temperature=1.7, n=4, seed=3)
    engine = make(max_prefill_tokens=16)
    poison(engine)
    out = engine.generate(prompts, params, on_progress=partial(poison, engine))
    assert all(len({tuple(sample.token_ids) for sample in samples}) == 4 for samples in out)
    check(model, prompts, out, temperature=1.7)
    check_empty(engine)


def test_preempted_requests_begin_again(model: Any, make: Make) -> None:
    engine = make(kv_tokens=96, page_size=4, max_prefill_tokens=24)
    prompts = random_prompts((40, 7, 60, 20, 33, 5))
    out = engine.generate(prompts, GREEDY, on_progress=partial(poison, engine))
    assert engine.scheduler.preemptions > 0
    check(model, prompts, out)
    check_empty(engine)


@pytest.mark.parametrize("tags", [["kv_cache"], None])
def test_sleep_and_wake_up(model: Any, make: Make, tags: list[str] | None) -> None:
    """Between calls, and in the middle of one; what the memory holds after a resume is poison."""
    engine = make()
    states = engine.cache.states
    assert states is not None
    prompts = random_prompts((3, 50, 20))

    def nap(done: int, total: int, generated: int) -> None:
        if generated in (0, 9):
            engine.sleep(unfinished="preempt", tags=tags)
            assert engine.report().tags["kv_cache"].committed_bytes == 0
            engine.wake_up()
            poison(engine)
            engine.cache.on_resume()
            assert not any(state[:, 0].any() for state in (*states.conv, states.temporal)), "padding is zero"

    nap(0, 0, 0)
    check(model, prompts, engine.generate(prompts, GREEDY, on_progress=nap))
    check_empty(engine)


def test_a_failed_step_leaves_no_state_half_advanced(model: Any, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call inside a call fails between two linear layers; the requests of the outer one go on, and right."""
    engine = make(max_prefill_tokens=16)
    prompts = random_prompts((3, 50, 20))

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("device lost")

    def meddle(done: int, total: int, generated: int) -> None:
        if generated in (4, 5, 12):
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="device lost"):
                first, _, last = engine.runner.mixers
                patch.setattr(engine.runner, "mixers", [first, fail, last])
                engine.generate([[1, 2, 3]], GREEDY)

    check(model, prompts, engine.generate(prompts, GREEDY, on_progress=meddle))
    check_empty(engine)


def test_all_bytes_of_the_cache_are_on_its_tag(make: Make) -> None:
    engine = make(kv_tokens=512, max_running=5)
    cache, tag = engine.cache, engine.report().tags["kv_cache"]
    assert cache.states is not None
    assert cache.pool.nbytes == (512 + 16) * cache.layout.bytes_per_token  # the full layer's only
    assert cache.states.nbytes == (5 + 1) * cache.layout.state_bytes
    wanted = cache.pool.nbytes + cache.states.nbytes
    assert wanted <= tag.live_bytes <= tag.committed_bytes < wanted + 2 * engine.saver.backend.granularity


def test_decode_is_not_captured(make: Make) -> None:
    engine = make()
    assert not engine.runner.capturable and engine.graphs is None and engine.tags == ("weights", "kv_cache")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"num_experts": 8}, r"num_experts=8: layers \[0, 1\] are mixtures of experts"),
        ({"num_experts": 8, "mlp_only_layers": [0]}, r"num_experts=8: layers \[1\] are mixtures of experts"),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads=3 is not a multiple of linear_num_key_heads=2"),
        ({"layer_types": [LINEAR, "sliding_attention"]}, "layer_types=.*sliding_attention"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, "rotary_dim=3 must be even"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
)
def test_refuses_by_name(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    assert_refused(tmp_path, "qwen3_next", {}, changes, match)
