"""Double-sparse decode: the chosen tokens, and equality with full attention if all are chosen."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rollout import DoubleSparsity, Engine, SamplingParams, heavy_channels
from rollout.model.double_sparsity import decode_sparse
from rollout.ops.torch_attention import (
    BatchShape,
    DecodeBucket,
    StoredKV,
    decode_bucket,
    plan_torch,
)
from tests.helpers.rollout.answers import CLOSE, GAP, random_prompts
from tests.helpers.rollout.saved import Saved

GREEDY = SamplingParams(max_tokens=8, temperature=0)
PROMPTS = random_prompts((3, 50, 20))
MODELS: dict[str, dict[str, Any]] = {"llama": {"head_dim": 16}, "qwen3": {"head_dim": 32}}


def sparsity(tokens: int, count: int = 4, **fields: Any) -> DoubleSparsity:
    return DoubleSparsity(heavy_channel_num=count, heavy_token_num=tokens, **fields)


@pytest.fixture
def make(saved: Saved) -> Callable[..., Engine]:
    def make(
        device: str, chosen: DoubleSparsity | None, kind: str = "llama", **config: Any
    ) -> Engine:
        path, _ = saved(kind, **MODELS[kind])
        return Engine.from_pretrained(
            path, device=device, double_sparsity=chosen, **{"kv_tokens": 512, **config}
        )

    return make


Make = Callable[..., Engine]


def answers(engine: Engine, params: SamplingParams = GREEDY) -> list[tuple[list[int], list[float]]]:
    return [
        (sample.token_ids, sample.logprobs)
        for samples in engine.generate(PROMPTS, params)
        for sample in samples
    ]


# ---------------------------------------------------------------- one bucket


class Case:
    """Requests of 60, 24 and 5 tokens in one bucket.

    There are 2 KV heads with 3 query heads each. Slots of no request are NaN.
    """

    lens = (60, 24, 5)

    def __init__(self, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        total = sum(self.lens)
        slots = torch.randperm(100, generator=generator)[:total]
        k, v = torch.full((101, 2, 16), float("nan")), torch.full((101, 2, 8), float("nan"))
        k[slots] = torch.randn(total, 2, 16, generator=generator)
        v[slots] = torch.randn(total, 2, 8, generator=generator)
        table = torch.full((4, 70), 100, dtype=torch.int32)
        for row, mine in enumerate(slots.split(self.lens), start=1):
            table[row, : len(mine)] = mine.int()
        shape = BatchShape(rows=[1, 2, 3], q_lens=[1] * 3, kv_lens=self.lens, num_decode=3)
        (self.bucket,) = plan_torch(shape, table.to(device)).buckets
        self.stored = StoredKV(k=k.to(device), v=v.to(device))
        self.channels = torch.tensor([[1, 8, 2], [0, 15, 7]], device=device)
        self.labels = torch.stack(
            [self.stored.k[:, head, chosen] for head, chosen in enumerate(self.channels)], 1
        )
        self.q = torch.randn(3, 6, 16, generator=generator).to(device)

    def decode(self, tokens: int, recent: int) -> torch.Tensor:
        made = (self.stored, self.labels, self.channels, tokens, recent)
        return decode_sparse(*made, self.q, self.bucket, 0.3)

    def expected(self, tokens: int, recent: int) -> torch.Tensor:
        """Compute the expected output in fp64, one query head at a time."""
        out = torch.zeros(3, 6, 8, dtype=torch.float64)
        for i, token in enumerate(self.bucket.tokens.tolist()):
            length = self.lens[token]
            for head in range(6):
                mine = self.bucket.slots[i, :length], head // 3
                k, v, label = (
                    rows[mine].double().cpu()
                    for rows in (self.stored.k, self.stored.v, self.labels)
                )
                q = self.q[i, head].double().cpu()
                scores = label @ q[self.channels[head // 3].cpu()]
                ranked = sorted(range(length), key=lambda at: (at < length - recent, -scores[at]))
                chosen = sorted(ranked[:tokens])
                out[i, head] = (k[chosen] @ q * 0.3).softmax(0) @ v[chosen]
        return out


@pytest.mark.parametrize(("tokens", "recent"), [(59, 1), (24, 10), (12, 12), (7, 2), (1, 1)])
def test_decode_attends_to_exactly_the_best_and_the_newest_tokens(
    tokens: int, recent: int, device: str
) -> None:
    case = Case(device)
    out = case.decode(tokens, recent).cpu()
    torch.testing.assert_close(out.double(), case.expected(tokens, recent), atol=CLOSE, rtol=0)


def test_decode_reads_no_keys_and_values_of_tokens_that_are_not_chosen(device: str) -> None:
    # Keys and values that are not chosen are NaN. The labels choose position 3 and the last one.
    case = Case(device)
    # the score of a label of ones is always positive
    labels, q = torch.zeros_like(case.labels), case.q.abs()
    labels[case.bucket.slots[:, 3]] = 1.0
    lens = [case.lens[token] for token in case.bucket.tokens.tolist()]
    slots = torch.stack([case.bucket.slots[i, [3, length - 1]] for i, length in enumerate(lens)])
    k = torch.full_like(case.stored.k, float("nan"))
    v = torch.full_like(case.stored.v, float("nan"))
    k[slots], v[slots] = case.stored.k[slots], case.stored.v[slots]
    stored = StoredKV(k=k, v=v)
    out = decode_sparse(stored, labels, case.channels, 2, 1, q, case.bucket, 0.3)
    none = torch.zeros((3, 1, 2), dtype=torch.bool, device=device)
    pairs = DecodeBucket(tokens=case.bucket.tokens, slots=slots, padding=none)
    torch.testing.assert_close(out, decode_bucket(stored.rows, q, pairs, 0.3))


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("kind", MODELS)
def test_answers_equal_full_attention_bit_for_bit_when_all_tokens_are_kept(
    make: Make, kind: str, device: str
) -> None:
    # steps mix chunked prefill and decode, and groups copy pages
    config = {"max_prefill_tokens": 24, "attention": "torch"}
    full = make(device, None, kind, **config)
    sparse = make(device, sparsity(62), kind, **config)
    assert sparse.kv_pool.bytes_per_token > full.kv_pool.bytes_per_token and sparse.graphs is None
    params = SamplingParams(max_tokens=12, n=3, seed=2)
    assert answers(sparse, params) == answers(full, params)
    sparse.check_integrity()


def test_labels_are_chosen_channels_of_rotated_keys(make: Make, device: str) -> None:
    channels = (((3, 0), (15, 9)), ((1, 2), (8, 7)))
    engine = make(device, sparsity(8, 2, channels=channels))
    answers(engine)
    for layer, heads in enumerate(channels):
        keys, _ = engine.kv_pool.get_kv_buffer(layer)
        labels = engine.kv_pool.get_label_buffer(layer)  # type: ignore[attr-defined]
        written = labels.abs().sum((1, 2)).nonzero().squeeze(1)
        assert len(written) >= sum(map(len, PROMPTS))
        for head, chosen in enumerate(heads):
            assert torch.equal(labels[written, head], keys[written, head][:, list(chosen)])


def test_answers_do_not_depend_on_batch_chunks_or_sleep(make: Make, device: str) -> None:
    # NaN labels in free slots and page 0 have no effect
    engine = make(device, sparsity(10), max_prefill_tokens=16)
    parts = engine.kv_pool.stored.values()  # type: ignore[attr-defined]
    together = answers(engine)
    engine.sleep()
    engine.wake_up()
    for part in parts:
        part.fill_(float("nan"))
    engine.kv_pool.on_resume()
    assert not any(part[:, : engine.config.page_size].any() for part in parts)
    for part in parts:
        part.fill_(float("nan"))
    for prompt, (tokens, logprobs) in zip(PROMPTS, together, strict=True):
        ((alone,),) = engine.generate([prompt], GREEDY)
        assert alone.token_ids == tokens
        torch.testing.assert_close(
            torch.tensor(alone.logprobs), torch.tensor(logprobs), atol=GAP, rtol=0
        )


# ---------------------------------------------------------------- configuration


def test_heavy_channels_have_largest_mean_absolute_key() -> None:
    keys = torch.zeros(5, 2, 6)
    keys[:, 0, 4] = -3
    keys[:, 0, 1] = 2
    keys[:, 1, 0] = 1
    keys[:, 1, 3] = torch.tensor([9.0, -9, 9, -9, 9])
    assert heavy_channels([keys, -keys], 2) == (((1, 4), (0, 3)),) * 2


@pytest.mark.parametrize(
    ("config", "match"),
    [
        (
            {"double_sparsity": sparsity(8, 17)},
            "heavy_channel_num=17 exceeds the 16 channels of keys",
        ),
        (
            {"double_sparsity": sparsity(8, 1, channels=(((0,), (1,)),))},
            r"for each of 2 KV heads in each of 2 layers; got \(\(\(0,\), \(1,\)\),\)",
        ),
        (
            {"double_sparsity": sparsity(8, 1, channels=(((0,), (16,)),) * 2)},
            r"heavy_channel_num=1 different ones of channels 0..15",
        ),
    ],
)
def test_engine_refuses_channels_that_do_not_fit_the_model(
    saved: Saved, config: dict[str, Any], match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        Engine.from_pretrained(saved("llama", head_dim=16)[0], **config)
