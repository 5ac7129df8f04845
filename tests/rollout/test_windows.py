"""Sliding windows through the engine: answers of transformers, and slots that are really given back.

Before every step all slots that no query may read hold NaN, in both pools.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch

from rollout import Engine, SamplingParams
from tests.helpers.effort import some
from tests.helpers.rollout.answers import check, random_prompts
from tests.helpers.rollout.poison import poison
from tests.helpers.rollout.saved import Saved

MIXED = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {"sliding_window": 8}),
    "mistral-wide": ("mistral", {"sliding_window": 20, "head_dim": 32}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "ministral": ("ministral", {"sliding_window": 9, "layer_types": MIXED[:2], "head_dim": 12}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1}),
    "qwen2-all": ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 0}),
    "qwen3": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 16, "layer_types": MIXED, "num_hidden_layers": 4, "head_dim": 8},
    ),
}
COMBINED = some(*zip(MODELS, [1, 4, 16, 1, 4, 16, 1], strict=True), whole=list(product(MODELS, [1, 4, 16])))
LENGTHS = (1, 7, 8, 17, 40, 111, 200)
MAX_TOKENS = 24
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)


class Watched:
    """Runs an engine with poison between steps, and writes down the pages in use."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.used: list[dict[str, int]] = []
        poison(engine)

    def look(self, *_: int) -> None:
        poison(self.engine)
        self.engine.check_integrity()
        self.used.append({each.name: each.total - each.available for each in self.engine.prefixes.ledgers})

    def peak(self, name: str) -> int:
        return max(each[name] for each in self.used)

    def check(self, model: Any, prompts: list[list[int]], params: SamplingParams = GREEDY) -> None:
        out = self.engine.generate(prompts, params, on_progress=self.look)
        check(model, prompts, out, params.temperature)
        self.engine.check_integrity()
        assert set(self.used[-1].values()) == {0}


@pytest.fixture
def watched(saved: Saved) -> Callable[..., tuple[Watched, Any]]:
    def make(name: str, **options: Any) -> tuple[Watched, Any]:
        kind, overrides = MODELS[name]
        path, model = saved(kind, **overrides)
        return Watched(Engine.from_pretrained(path, max_context_len=256, **options)), model

    return make


Make = Callable[..., tuple[Watched, Any]]


def across(tokens: int, page_size: int) -> int:
    return (tokens - 1 + page_size - 1) // page_size + 1


@pytest.mark.parametrize(("name", "page_size"), COMBINED)
def test_equals_transformers(watched: Make, name: str, page_size: int, device: str) -> None:
    run, model = watched(name, device=device, kv_tokens=1024, page_size=page_size, max_prefill_tokens=48)
    run.check(model, random_prompts(LENGTHS))


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_groups_share_their_prompt_and_part_from_it(watched: Make, name: str, device: str) -> None:
    """Each sample leaves the shared pages by itself, at another time than the others where answers end early."""
    run, model = watched(name, device=device, kv_tokens=1024, page_size=4, max_prefill_tokens=32)
    params = SamplingParams(max_tokens=40, temperature=1.0, n=4, seed=5, stop_token_ids=tuple(range(12)))
    prompts = random_prompts((3, 30, 77))
    run.check(model, prompts, params)
    (samples,) = run.engine.generate(prompts[1:2], params)
    assert len({len(sample.token_ids) for sample in samples}) > 1


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3"])
def test_preemption(watched: Make, name: str, device: str) -> None:
    """Pools that hold a few of the samples at a time."""
    small = {"kv_tokens": 64} if name == "mistral" else {"kv_tokens": 1024, "window_tokens": 64}
    run, model = watched(name, device=device, page_size=4, max_prefill_tokens=16, **small)
    prompts = random_prompts((2, 3, 1, 4, 60, 2, 5, 90, 1, 3))
    run.check(model, prompts, SamplingParams(max_tokens=30, temperature=1.0, n=2))
    assert run.engine.scheduler.preemptions > 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_pool_of_sliding_layers_holds_windows_only(watched: Make, page_size: int) -> None:
    """Prompts far longer than the pool: what has left the window makes room."""
    run, model = watched("mistral", kv_tokens=64, page_size=page_size, max_prefill_tokens=16)
    run.check(model, random_prompts((200, 150)))
    assert run.peak("kv") <= 2 * across(7, page_size) + 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_window_pool_holds_windows_only(watched: Make, page_size: int) -> None:
    run, model = watched("qwen2", kv_tokens=1024, window_tokens=64, page_size=page_size, max_prefill_tokens=16)
    run.check(model, random_prompts((200, 150)))
    assert run.peak("kv") >= 200 // page_size
    assert run.peak("window") <= 2 * across(12, page_size) + 1


def test_the_default_window_pool_lets_everyone_run(watched: Make) -> None:
    run, _ = watched("qwen2", kv_tokens=2048, page_size=4, max_running=6, max_prefill_tokens=32)
    assert [each.total * 4 for each in run.engine.blocks.ledgers] == [2048, 6 * 16 + 32]
    run.engine.generate(random_prompts((50, 60, 70, 80, 90, 100)), GREEDY, on_progress=run.look)
    assert run.engine.scheduler.preemptions == 0


def test_what_can_never_fit_is_refused(watched: Make, saved: Saved) -> None:
    engine = watched("qwen2", kv_tokens=512, window_tokens=32, page_size=4, max_prefill_tokens=64)[0].engine
    with pytest.raises(ValueError, match="prompt 1 needs 80 window tokens .*has 32; raise window_tokens or .*prefill"):
        engine.generate([[1], [1] * 100], GREEDY)
    engine.check_integrity()
    assert len(engine.generate([[1] * 8], GREEDY)[0][0].token_ids) == MAX_TOKENS
    for name, tokens, match in [
        ("qwen2", 1024, "window_tokens=1024 must be in 1..kv_tokens=512"),
        ("qwen2", 30, "window_tokens=30 is not a multiple of page_size=4; use window_tokens=32"),
        ("mistral", 64, "window_tokens=64 is for models that mix"),
    ]:
        with pytest.raises(ValueError, match=match):
            watched(name, kv_tokens=512, page_size=4, window_tokens=tokens)


class Unrecorded:
    """In place of CUDA graphs: decode from device tensors alone, the batch padded with row 0, but run each time."""

    max_batch = 4

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.replays = 0

    def replay(self, *lists: list[int]) -> torch.Tensor:
        device = self.runner.device
        inputs = torch.tensor([each + [0] * (self.max_batch - len(each)) for each in lists], device=device)
        logits = torch.zeros((self.max_batch, self.runner.config.vocab_size), device=device)
        self.runner.decode(*inputs, logits)
        self.replays += 1
        return logits[: len(lists[0])]


@pytest.mark.parametrize("name", ["mistral", "ministral"])
def test_triton_path_equals_transformers(watched: Make, name: str) -> None:
    """Chunks and mixed steps, then decode as a CUDA graph records it."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    run, model = watched(name, device=device, kv_tokens=256, page_size=4, max_prefill_tokens=32, attention="triton")
    graphs: Any = Unrecorded(run.engine.runner)
    run.engine.runner.graphs = graphs
    run.check(model, random_prompts((1, 40)), SamplingParams(max_tokens=5, temperature=0))
    assert graphs.replays > 2


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_sleep_in_between(watched: Make, name: str, device: str) -> None:
    """Preempted by sleep, recomputed in memory whose content was lost."""
    run, model = watched(name, device=device, kv_tokens=512, page_size=4, max_prefill_tokens=32)
    prompts = random_prompts((30, 60))

    def nap(*_: int) -> None:
        if len(run.used) == 9:
            run.engine.sleep(unfinished="preempt")
            run.engine.wake_up()
        run.look()

    check(model, prompts, run.engine.generate(prompts, GREEDY, on_progress=nap))
    assert run.engine.scheduler.preemptions == 2
