"""Every architecture in fp32: answers and log-probabilities equal transformers', token for token.

After every step, all slots and states that no query may read are set to NaN. On a GPU, decode uses
CUDA graphs.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from kvcache.allocators import Int64Array
from rollout import Completion, Engine, Output, SamplingParams
from rollout.ops.token_sampling import SLOTS, HostResults, Sent
from rollout.ops.torch_attention import BatchShape
from rollout.running.graph_inputs import DecodeInputs, pack_prompts
from tests.helpers.case_selection import some
from tests.helpers.models import DEEPSEEK_MOE, MLA, RELEASE
from tests.helpers.rollout.answers import LLAMA3, YARN, check, ids, random_prompts
from tests.helpers.rollout.poison import check_idle, poison
from tests.helpers.rollout.saved import Saved

# Triton's interpreter, `tl.range`
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")
V3, V2, NEXT = "deepseek_v3", "deepseek_v2", "qwen3_next"
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
MIXED, FIVE = [FULL, SLIDING, SLIDING, FULL], [LINEAR, LINEAR, FULL, LINEAR, FULL]
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
FOUR = {"num_hidden_layers": 4}
CONV: dict[str, Any] = {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2}
SLIDE: dict[str, Any] = {"use_sliding_window": True}
WINDOWED: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"sliding_window": 20, "head_dim": 32}),
    ("ministral", {"sliding_window": 9, "layer_types": MIXED[:2], "head_dim": 12}),
    ("qwen2", {**SLIDE, "sliding_window": 13, "max_window_layers": 1}),
    ("qwen2", {**SLIDE, "sliding_window": 11, "max_window_layers": 0}),
    ("qwen3", {**SLIDE, "sliding_window": 16, "layer_types": MIXED, "head_dim": 8, **FOUR}),
]


TIED = {"tie_word_embeddings": True}
NINE = {"head_dim": 8, "num_attention_heads": 9, "num_key_value_heads": 3}
PART = "partial_rotary_factor"
MODELS: list[tuple[str, dict[str, Any]]] = some(
    ("llama", {"rope_parameters": LLAMA3}),
    ("qwen3", {"rope_parameters": YARN}),
    ("llama", {**TIED, "attention_bias": True, "num_key_value_heads": 4}),
    ("llama", {**NINE, "head_dim": 32, "num_attention_heads": 6, "rms_norm_eps": 1e-5}),
    ("qwen2", {"num_key_value_heads": 1}),
    ("qwen3", NINE | TIED),
    ("qwen3", {"head_dim": 16, "num_key_value_heads": 4, "attention_bias": True}),
    (V3, {"q_lora_rank": None, "rope_interleave": False, **TIED}),
    (V3, {"attention_bias": True, "rms_norm_eps": 1e-4, "qk_rope_head_dim": 6, "kv_lora_rank": 24}),
    (V3, {"num_attention_heads": 6, "num_key_value_heads": 6, "rope_parameters": LLAMA3}),
    (V2, {"q_lora_rank": None, "v_head_dim": 24, "rope_parameters": YARN}),
    (V3, {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}),
    (V3, DEEPSEEK_MOE | {"norm_topk_prob": True}),
    (V3, DEEPSEEK_MOE | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    (V2, DEEPSEEK_MOE | {"topk_method": "group_limited_greedy", "n_shared_experts": 2}),
    (V2, DEEPSEEK_MOE | {"n_routed_experts": 9, "first_k_dense_replace": 0}),
    (NEXT, {"layer_types": FIVE, "num_hidden_layers": 5, **TIED}),
    (NEXT, {"layer_types": [FULL, LINEAR], "attention_bias": True, **CONV}),
    (NEXT, {"num_experts": 8, "mlp_only_layers": [0, 1], "head_dim": 32, PART: 0.5}),
    (NEXT, {"layer_types": [FULL, FULL], "num_key_value_heads": 1, PART: 1.0}),
    ("mistral", {"sliding_window": None}),
    ("qwen3_moe", MOE | {"num_experts": 64, "num_experts_per_tok": 7, "hidden_size": 36}),
    ("qwen3_moe", MOE | {"num_experts": 2, "num_experts_per_tok": 1, "mlp_only_layers": [1]}),
    ("qwen3_moe", MOE | {"decoder_sparse_step": 2, "num_hidden_layers": 3, **TIED}),
    (NEXT, {"shared_expert_intermediate_size": 11, "norm_topk_prob": False, **MOE}),
    whole=[
        ("qwen2", {**TIED, "hidden_size": 64}),
        ("qwen3", {"head_dim": 32}),
        (V3, {}),
        (V2, {}),
        (NEXT, {}),
        (NEXT, {**MOE, "mlp_only_layers": [0]}),
        ("qwen3_moe", MOE | {"num_experts": 31, "norm_topk_prob": True}),
    ],
)
PAGED = some(
    (("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 40}), 4),
    *zip(WINDOWED, [1, 4, 16, 4, 1, 1], strict=True),
    whole=list(product(WINDOWED, [1, 4, 16])),
)
LENGTHS = some(1, 3, 16, 17, 65, 200, whole=[2, 7, 15, 64, 500])
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
# One model of each kind of cache (pages, pages with a window, two pools, latent rows, pages with
# states), and one with experts.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "pages": ("qwen3", {"head_dim": 32}),
    "experts": ("qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 4}),
    "window": WINDOWED[0],
    "pools": WINDOWED[3],
    "latent": (V3, MLA),
    "states": (NEXT, {"layer_types": [LINEAR, FULL, LINEAR], "num_hidden_layers": 3}),
}
Make = Callable[..., tuple[Engine, Any]]


@pytest.fixture
def make(saved: Saved) -> Make:
    """Return a function that builds an engine with a poisoned cache, and transformers' model."""

    def make(name: str, **fields: Any) -> tuple[Engine, Any]:
        kind, overrides = KINDS[name]
        path, model = saved(kind, **overrides)
        sizes = {"kv_tokens": 1024, "page_size": 4, "max_prefill_tokens": 32}
        engine = Engine.from_pretrained(path, **{**sizes, "max_context_len": 256, **fields})
        poison(engine)
        return engine, model

    return make


def answer(
    engine: Engine, prompts: list[list[int]], params: SamplingParams = GREEDY
) -> list[list[Completion]]:
    """Generate, poison the cache after every step, and check that the engine is idle afterwards."""
    out = engine.generate(prompts, params, on_progress=lambda *_: poison(engine))
    check_idle(engine)
    return out


@pytest.mark.parametrize(("model", "page_size"), [*((model, 16) for model in MODELS), *PAGED])
def test_answers_equal_transformers(
    saved: Saved, model: tuple[str, dict[str, Any]], page_size: int, device: str
) -> None:
    # prompts of 1 to 500 tokens in one batch; prompts over 48 tokens are prefilled in chunks
    kind, overrides = model
    alone = overrides.get("layer_types") == [FULL, FULL]
    if RELEASE < (5, 13) and (alone or (kind == V2 and "topk_method" in overrides)):
        pytest.skip("transformers itself fails")
    path, theirs = saved(kind, **(MLA if kind in (V2, V3) else {}) | overrides)
    sizes = {"kv_tokens": 2048, "max_prefill_tokens": 48, "max_context_len": 520}
    engine = Engine.from_pretrained(path, device=device, page_size=page_size, **sizes)
    poison(engine)
    # shorter prompts for linear layers, whose states pass through every token
    most = 150 if kind == NEXT else max(LENGTHS)
    prompts = random_prompts([min(length, most) for length in LENGTHS])
    out = answer(engine, prompts)
    check(theirs, prompts, out)
    for (sample,) in out:
        assert (sample.finish_reason, sample.score) == ("length", None)
        assert sample.weight_versions == [0] * GREEDY.max_tokens
    linear = kind == NEXT and not alone
    captures = device != "cpu" and not linear
    assert (engine.graphs is not None) == engine.runner.capturable == captures
    assert engine.graphs is None or engine.graphs.replays > 0


@pytest.mark.parametrize("name", KINDS)
def test_samples_that_share_a_prompt_have_log_probs_of_transformers(
    make: Make, name: str, device: str
) -> None:
    # the samples of a prompt differ, and some end early
    engine, model = make(name, device=device, max_prefill_tokens=16)
    prompts, ends = random_prompts((3, 40, 90)), tuple(range(12))
    params = SamplingParams(
        max_tokens=20, temperature=1.7, top_k=60, top_p=0.95, n=4, seed=3, stop_token_ids=ends
    )
    out = answer(engine, prompts, params)
    check(model, prompts, out, temperature=1.7)
    for samples in ids(out):
        assert len({tuple(sample) for sample in samples}) == 4 and len(set(map(len, samples))) > 1


@pytest.mark.parametrize(
    ("name", "fields"),
    some(
        ("pages", {"kv_tokens": 128}),
        ("window", {"kv_tokens": 64}),
        ("pools", {"window_tokens": 64}),
        ("states", {"kv_tokens": 128}),
        whole=[("experts", {"kv_tokens": 128})],
    ),
)
def test_preempted_requests_have_log_probs_of_transformers(
    make: Make, name: str, fields: dict[str, Any], device: str
) -> None:
    # the pools have room for a few of the samples
    engine, model = make(name, device=device, max_prefill_tokens=16, **fields)
    prompts = random_prompts((2, 3, 1, 4, 60, 2, 5, 90, 1, 3))
    out = answer(engine, prompts, SamplingParams(max_tokens=20, temperature=1.0, n=2))
    check(model, prompts, out, temperature=1.0)
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize("name", KINDS)
def test_answers_equal_transformers_after_sleep_between_and_during_calls(
    make: Make, name: str, device: str
) -> None:
    # Sleep preempts the requests. They are recomputed in memory that lost its content, except
    # padding, which is zero.
    engine, model = make(name, device=device)
    prompts, naps = random_prompts((3, 50, 20)), [["kv_cache"], None]

    def nap(done: int, total: int, generated: int) -> None:
        if naps and generated >= (9 if len(naps) == 1 else 0):
            engine.sleep(unfinished="recompute", tags=naps.pop())
            assert engine.report().tags["kv_cache"].committed_bytes == 0
            engine.wake_up()
            poison(engine)
            engine.cache.on_resume()
            states = engine.cache.states
            assert states is None or not any(
                state[:, 0].any() for state in (*states.conv, states.temporal)
            )
        poison(engine)

    nap(0, 0, 0)
    check(model, prompts, engine.generate(prompts, GREEDY, on_progress=nap))
    assert not naps and engine.scheduler.preemptions > 0
    check_idle(engine)


# ---------------------------------------------------------------- Triton's kernels


class Unrecorded:
    """Substitute for CUDA graphs that runs the decode step each time.

    As with graphs, decode reads device tensors only, and row 0 pads the batch.
    """

    max_batch = 4

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.results = HostResults.of(self.max_batch, runner.device)
        self.replays = self.continued = 0

    def padded(self, count: int) -> int:
        return self.max_batch

    def replay(self, count: int, packed: Int64Array | None) -> tuple[torch.Tensor, Sent]:
        device, slot = self.runner.device, self.replays % SLOTS
        if packed is None:
            self.continued += 1
        else:
            self.packed = torch.tensor(packed, device=device)
        logits = torch.zeros((self.max_batch, self.runner.config.vocab_size), device=device)
        inputs = DecodeInputs.of(self.packed, self.max_batch)
        self.runner.decode(inputs, logits, self.results)
        self.replays += 1
        sent = Sent(self.results.tokens[slot, :count], self.results.logprobs[slot, :count])
        self.runner.wait()
        return logits[:count], sent


class UnrecordedPrompts:
    """Substitute for the graphs of steps with prompts; new memory holds NaN."""

    max_tokens = 40

    def __init__(self, runner: Any, max_running: int) -> None:
        self.runner, self.most = runner, min(self.max_tokens, max_running)
        self.replays = 0

    def replay(self, ids: Int64Array, positions: Int64Array, shape: BatchShape) -> torch.Tensor:
        packed = pack_prompts(ids, positions, shape, self.max_tokens, self.most)
        inputs = torch.tensor(packed, device=self.runner.device)
        tokens, requests = inputs[: 3 * self.max_tokens], inputs[3 * self.max_tokens :]
        hidden = torch.full(
            (self.max_tokens, self.runner.config.hidden_size), torch.nan, device=inputs.device
        )
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
        try:
            self.runner.compute(tokens.view(3, -1), requests.view(4, -1), hidden)
        finally:
            torch.use_deterministic_algorithms(False)
        assert hidden.isfinite().all()  # padding must not reach experts as NaN
        self.replays += 1
        return hidden[: len(positions)]


@pytest.mark.parametrize(
    ("kind", "overrides", "graphs"),
    some(
        ("qwen3", {"head_dim": 32, "num_hidden_layers": 1}, True),
        (V3, {**MLA, "num_hidden_layers": 1}, True),
        ("qwen3_moe", {**MOE, "num_hidden_layers": 1}, True),
        (*WINDOWED[2], True),
        ("qwen3", {"head_dim": 32, "num_hidden_layers": 1}, False),
        whole=[(*WINDOWED[0], True), (V3, {**MLA, "num_hidden_layers": 1}, False)],
    ),
)
def test_triton_path_equals_transformers(
    saved: Saved, kind: str, overrides: dict[str, Any], graphs: bool
) -> None:
    # The kernels are interpreted without a GPU. The run has chunks, mixed steps, a fork in the
    # middle of a page, then decode, all as CUDA graphs record it or with a plan for each step.
    path, model = saved(kind, **overrides)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    sizes = {"kv_tokens": 256, "page_size": 4, "max_prefill_tokens": 32}
    triton = {"attention": "triton", "cuda_graphs": False}
    engine = Engine.from_pretrained(path, device=device, **sizes, **triton)
    replacement: Any = Unrecorded(engine.runner) if graphs else None
    prompts_too: Any = UnrecordedPrompts(engine.runner, 64) if graphs else None
    engine.runner.graphs, engine.runner.prompt_graphs = replacement, prompts_too
    poison(engine)
    prompts = random_prompts((1, 41))
    check(model, prompts, answer(engine, prompts, SamplingParams(max_tokens=5, temperature=0, n=2)))
    assert not graphs or min(replacement.replays, prompts_too.replays) > 1 < replacement.continued


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_graphs_choose_the_tokens_of_steps_without_graphs(saved: Saved, depth: int) -> None:
    """Compare drawn, greedy, filtered and forced tokens that a graph and the host's steps choose.

    Requests end at different steps, so that a graph goes on with its rows, and gets others.
    """
    path, _ = saved("qwen3", head_dim=32, num_hidden_layers=1)
    plain = SamplingParams(temperature=0.9, seed=1, max_tokens=9)
    params = [plain, replace(plain, temperature=0, max_tokens=6), replace(plain, n=2)]
    others = replace(plain, top_p=0.7, max_tokens=4), replace(plain, forced=(5, 6), max_tokens=3)
    answers = []
    for graphs in (True, False):
        engine = Engine.from_pretrained(
            path, kv_tokens=256, page_size=4, attention="triton", cuda_graphs=False
        )
        engine.steps.depth = depth
        replacement: Any = Unrecorded(engine.runner) if graphs else None
        engine.runner.graphs = replacement
        poison(engine)
        answers += [
            engine.generate(random_prompts((3, 9, 5)[: len(several)]), several)
            for several in (params, others)
        ]
        assert not graphs or 0 < replacement.continued < replacement.replays
        check_idle(engine)
    assert answers[:2] == answers[2:]


# ---------------------------------------------------------------- pages and windows


def across(tokens: int, page_size: int) -> int:
    return (tokens - 1 + page_size - 1) // page_size + 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("name", "window"), [("window", 8), ("pools", 13)])
def test_sliding_layers_free_pages_behind_the_window(
    make: Make, name: str, window: int, page_size: int
) -> None:
    # the prompts are far longer than the pool
    tokens = {"kv_tokens": 64} if name == "window" else {"window_tokens": 64}
    engine, model = make(name, page_size=page_size, max_prefill_tokens=16, **tokens)
    used: list[list[int]] = []

    def look(*_: int) -> None:
        poison(engine)
        used.append([ledger.total - ledger.available for ledger in engine.prefixes.ledgers])

    prompts = random_prompts((200, 150))
    check(model, prompts, engine.generate(prompts, GREEDY, on_progress=look))
    *full, sliding = (max(pages) for pages in zip(*used, strict=True))
    assert sliding <= 2 * across(window - 1, page_size) + 1
    assert len(full) == (name == "pools") and min(full, default=200) >= 200 // page_size
    check_idle(engine)


def test_engine_refuses_window_tokens_that_are_too_few_or_invalid(make: Make) -> None:
    engine, _ = make("pools", window_tokens=32, max_prefill_tokens=64)
    with pytest.raises(ValueError, match="needs 80 window tokens .*has 32; raise window_tokens or"):
        engine.generate([[1], [1] * 100], GREEDY)
    assert len(answer(engine, [[1] * 8])[0][0].token_ids) == GREEDY.max_tokens
    for name, tokens, match in [
        ("pools", 1028, "window_tokens=1028 must be in 1..kv_tokens=1024"),
        ("pools", 30, "window_tokens=30 is not a multiple of page_size=4; use window_tokens=32"),
        ("window", 64, "window_tokens=64 is for models that mix"),
    ]:
        with pytest.raises(ValueError, match=match):
            make(name, window_tokens=tokens)


# ---------------------------------------------------------------- latent rows and states


def test_latent_attention_uses_new_weights_after_load(
    saved: Saved, make: Make, device: str
) -> None:
    # the halves of kv_b_proj are views of the store, so no stale copy of the old weights remains
    engine, _ = make("latent", device=device)
    prompts = random_prompts((9, 30))
    before = ids(answer(engine, prompts))
    path, model = saved(V3, seed=1, **MLA)
    engine.load(path)
    after = answer(engine, prompts)
    check(model, prompts, after)
    assert before != ids(after)


@pytest.mark.parametrize("name", ["latent", "states"])
def test_all_bytes_of_cache_are_on_tag_kv_cache(make: Make, name: str, device: str) -> None:
    engine, _ = make(name, device=device, kv_tokens=512, page_size=16, max_running=5)
    cache, tag = engine.cache, engine.report().tags["kv_cache"]
    # the model with states has one layer with pages
    assert cache.pool.nbytes == (512 + 16) * cache.layout.bytes_per_token
    wanted = cache.pool.nbytes
    if cache.states is not None:
        assert cache.states.nbytes == (5 + 16 + 1) * cache.layout.state_bytes
        wanted += cache.states.nbytes
    most = wanted + 2 * engine.saver.backend.granularity
    assert wanted <= tag.live_bytes <= tag.committed_bytes < most


@pytest.mark.parametrize(
    ("chunk", "running", "taken"), some((1, 8, 2), (5, 3, 0), whole=[(64, 8, 2)])
)
def test_answers_equal_transformers_when_few_states_are_reused(
    make: Make, chunk: int, running: int, taken: int, device: str
) -> None:
    # `taken` slots are allocated first, so that a request's row and its slot have different numbers
    engine, model = make("states", device=device, max_prefill_tokens=chunk, max_running=running)
    assert engine.cache.states is not None
    mine = [engine.cache.states.alloc() for _ in range(taken)]
    prompts = random_prompts((1, 3, 12, 70, 5))
    check(model, prompts, engine.generate(prompts, GREEDY, on_progress=lambda *_: poison(engine)))
    for slot in mine:
        assert slot is not None
        engine.cache.states.free(slot)
    check_idle(engine)


def test_requests_continue_correctly_after_failed_steps(
    make: Make, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    # A step fails between two linear layers, after it has changed the states of the first. It
    # begins a prompt, so no graph replays it.
    engine, model = make("states", device=device, max_prefill_tokens=16)
    prompts, due = random_prompts((3, 50, 20)), [4, 5, 12]

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("device lost")

    ids, parts = [engine.submit(prompt, GREEDY) for prompt in prompts], defaultdict(list)
    generated = 0
    while engine.unfinished:
        outputs: list[Output] = []
        if due and generated >= due[0]:
            due.pop(0)
            prompts.append([1, 2, 3])
            ids.append(engine.submit(prompts[-1], GREEDY))
            with monkeypatch.context() as patch:
                first, _, last = engine.runner.decoder.mixers
                patch.setattr(engine.runner.decoder, "mixers", [first, fail, last])
                outputs = engine.step()
            engine.check_integrity()
        for output in [*outputs, *engine.step()]:
            parts[output.id].append(output)
            generated += len(output.token_ids)
    check(model, prompts, [[Completion.joined(parts[id])] for id in ids])
    assert not due
    check_idle(engine)
