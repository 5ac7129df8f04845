"""Sliding windows through the engine: answers of transformers, and slots that are really given back.

Before every step all slots that no query may read hold NaN, in both pools.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from rollout import Engine, SamplingParams
from tests.helpers.models import SIZES, forward_logprobs, greedy, save_tiny

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
LENGTHS = (1, 7, 8, 17, 40, 111, 200)
MAX_TOKENS = 24
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(0, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def poison(engine: Engine) -> dict[str, int]:
    """NaN into all slots but those of computed tokens that a later query sees; how many keep what they hold."""
    cache = engine.cache
    table = cache.table.req_to_token
    kept: dict[str, int] = {}
    full, sliding = getattr(cache.pool, "full_pool", cache.pool), cache.sliding
    views = [("kv", full, cache.window, None)]
    if sliding is not None:
        views.append(("window", cache.pool.window_pool, *sliding))  # type: ignore[attr-defined]
    for name, pool, window, mapping in views:
        keep = torch.zeros(pool._k.shape[1], dtype=torch.bool, device=table.device)
        for sample in engine.scheduler.running:
            assert sample.handle is not None
            known = sample.length - 1 if sample.prefilled else sample.computed  # the last token is not computed yet
            slots = table[sample.handle.row, max(0, known - window + 1) if window else 0 : known].long()
            keep[slots if mapping is None else mapping[slots]] = True
        if mapping is not None:
            assert not keep[0], "a token in the window has no slot"
        for each in (pool._k, pool._v):
            each.masked_fill_(~keep[None, :, None, None], float("nan"))
        kept[name] = int(keep.sum())
    return kept


class Watched:
    """Runs an engine with poison between steps, and writes down the pages in use."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.used: list[dict[str, int]] = []
        poison(engine)

    def look(self, *_: int) -> None:
        poison(self.engine)
        self.engine.check_integrity()
        self.used.append({each.name: each.total - each.available for each in self.engine.blocks.ledgers})

    def peak(self, name: str) -> int:
        return max(each[name] for each in self.used)

    def check(self, model: Any, prompts: list[list[int]], params: SamplingParams = GREEDY) -> None:
        out = self.engine.generate(prompts, params, on_progress=self.look)
        gaps = []
        for prompt, answers in zip(prompts, out, strict=True):
            for answer in answers:
                if params.temperature == 0:
                    assert answer.token_ids == greedy(model, prompt, MAX_TOKENS), f"prompt of {len(prompt)} tokens"
                expected = forward_logprobs(model, prompt, answer.token_ids, params.temperature or 1.0)
                gaps.append(torch.tensor(answer.logprobs) - expected)
        gap = torch.cat(gaps).abs()
        assert gap.mean() <= 1e-5 and gap.max() <= 5e-5
        self.engine.check_integrity()
        assert set(self.used[-1].values()) == {0}


def watched(path: Path, **options: Any) -> Watched:
    # poison spares running samples only, and would reach what a prefix cache keeps
    return Watched(Engine.from_pretrained(path, max_context_len=256, prefix_cache=False, **options))


def across(tokens: int, page_size: int) -> int:
    return (tokens - 1 + page_size - 1) // page_size + 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(tmp_path: Path, name: str, page_size: int, device: str) -> None:
    kind, overrides = MODELS[name]
    model = save_tiny(tmp_path, kind, **overrides)
    run = watched(tmp_path, device=device, kv_tokens=1024, page_size=page_size, max_prefill_tokens=48)
    run.check(model, random_prompts(LENGTHS))


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_groups_share_their_prompt_and_part_from_it(tmp_path: Path, name: str, device: str) -> None:
    """Each sample leaves the shared pages by itself, at another time than the others where answers end early."""
    kind, overrides = MODELS[name]
    model = save_tiny(tmp_path, kind, **overrides)
    run = watched(tmp_path, device=device, kv_tokens=1024, page_size=4, max_prefill_tokens=32)
    params = SamplingParams(max_tokens=40, temperature=1.0, n=4, seed=5, stop_token_ids=tuple(range(12)))
    run.check(model, random_prompts((3, 30, 77)), params)
    ends = {
        len(sample.token_ids) for samples in run.engine.generate(random_prompts((30,)), params) for sample in samples
    }
    assert len(ends) > 1


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3"])
def test_preemption(tmp_path: Path, name: str, device: str) -> None:
    """Pools that hold a few of the samples at a time."""
    kind, overrides = MODELS[name]
    model = save_tiny(tmp_path, kind, **overrides)
    small = {"kv_tokens": 64} if kind == "mistral" else {"kv_tokens": 1024, "window_tokens": 64}
    run = watched(tmp_path, device=device, page_size=4, max_prefill_tokens=16, **small)
    run.check(
        model, random_prompts((2, 3, 1, 4, 60, 2, 5, 90, 1, 3)), SamplingParams(max_tokens=30, temperature=1.0, n=2)
    )
    assert run.engine.scheduler.preemptions > 0


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_one_pool_of_sliding_layers_holds_windows_only(tmp_path: Path, page_size: int) -> None:
    """Prompts far longer than the pool: what has left the window makes room."""
    model = save_tiny(tmp_path, "mistral", sliding_window=10)
    run = watched(tmp_path, kv_tokens=64, page_size=page_size, max_prefill_tokens=16)
    run.check(model, random_prompts((200, 150)))
    assert run.peak("kv") <= 2 * across(9, page_size) + 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_the_window_pool_holds_windows_only(tmp_path: Path, page_size: int) -> None:
    model = save_tiny(tmp_path, *MODELS["qwen2"][:1], **MODELS["qwen2"][1])
    run = watched(tmp_path, kv_tokens=1024, window_tokens=64, page_size=page_size, max_prefill_tokens=16)
    run.check(model, random_prompts((200, 150)))
    assert run.peak("kv") >= 200 // page_size
    assert run.peak("window") <= 2 * across(12, page_size) + 1


def test_the_default_window_pool_lets_everyone_run(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", **MODELS["qwen2"][1])
    run = watched(tmp_path, kv_tokens=2048, page_size=4, max_running=6, max_prefill_tokens=32)
    assert [each.total * 4 for each in run.engine.blocks.ledgers] == [2048, 6 * 16 + 32]
    run.engine.generate(random_prompts((50, 60, 70, 80, 90, 100)), GREEDY, on_progress=run.look)
    assert run.engine.scheduler.preemptions == 0


def test_what_can_never_fit_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen2", **MODELS["qwen2"][1])
    engine = watched(tmp_path, kv_tokens=512, window_tokens=32, page_size=4, max_prefill_tokens=64).engine
    with pytest.raises(ValueError, match="prompt 1 needs 80 window tokens .*has 32; raise window_tokens or .*prefill"):
        engine.generate([[1], [1] * 100], GREEDY)
    engine.check_integrity()
    assert len(engine.generate([[1] * 8], GREEDY)[0][0].token_ids) == MAX_TOKENS
    for options, match in [
        ({"window_tokens": 1024}, "window_tokens=1024 must be in 1..kv_tokens=512"),
        ({"window_tokens": 30}, "window_tokens=30 is not a multiple of page_size=4; use window_tokens=32"),
    ]:
        with pytest.raises(ValueError, match=match):
            watched(tmp_path, kv_tokens=512, page_size=4, **options)
    save_tiny(tmp_path, "mistral")
    with pytest.raises(ValueError, match="window_tokens=64 is for models that mix"):
        watched(tmp_path, kv_tokens=512, window_tokens=64)


class Unrecorded:
    """In place of CUDA graphs: decode from device tensors alone, the batch padded with row 0, but run each time."""

    max_batch = 8

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
def test_triton_path_equals_transformers(tmp_path: Path, name: str) -> None:
    """Chunks and mixed steps, then decode as a CUDA graph records it."""
    kind, overrides = MODELS[name]
    model = save_tiny(tmp_path, kind, **overrides, num_key_value_heads=1)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    run = watched(tmp_path, device=device, kv_tokens=256, page_size=4, max_prefill_tokens=32, attention="triton")
    graphs: Any = Unrecorded(run.engine.runner)
    run.engine.runner.graphs = graphs
    prompts = random_prompts((1, 40, 70))
    out = run.engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0), on_progress=run.look)
    for prompt, (completion,) in zip(prompts, out, strict=True):
        assert completion.token_ids == greedy(model, prompt, 8)
    assert graphs.replays > 5


@pytest.mark.parametrize("name", ["mistral", "qwen2"])
def test_sleep_in_between(tmp_path: Path, name: str, device: str) -> None:
    """Preempted by sleep, recomputed in memory whose content was lost."""
    kind, overrides = MODELS[name]
    model = save_tiny(tmp_path, kind, **overrides)
    run = watched(tmp_path, device=device, kv_tokens=512, page_size=4, max_prefill_tokens=32)
    prompts = random_prompts((30, 60))

    def nap(*_: int) -> None:
        if len(run.used) == 9:
            run.engine.sleep(unfinished="preempt")
            run.engine.wake_up()
        run.look()

    out = run.engine.generate(prompts, GREEDY, on_progress=nap)
    assert [answer.token_ids for (answer,) in out] == [greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    assert run.engine.scheduler.preemptions == 2
