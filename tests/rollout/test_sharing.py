"""What the engine shares: PagedAttention's figure 9 by a real beam search, groups whose prompt is computed once."""

from pathlib import Path
from typing import Any

import pytest

from rollout import Engine, SamplingParams
from tests.helpers.rollout.answers import random_prompts

PAGE = 4


class Script:
    """Log-probabilities that make a beam search of width 4 go on from chosen branches: {token: {parent: branches}}.

    Elsewhere every branch goes on by itself.
    """

    def __init__(self, engine: Engine, turns: dict[int, dict[int, int]]) -> None:
        self.engine, self.turns = engine, turns
        self.number = 0
        self.before: list[list[int]] = []  # pages of each branch before it was chosen who goes on
        self.free: set[int] = set()  # those of nobody, then

    def __call__(self, logits: Any, rows: list[int], count: int) -> list[list[tuple[int, float]]]:
        """Rows come in the order of `running`; a group's slots are found through its samples."""
        self.number += 1
        members = members_of(self.engine)
        self.before = [pages_of(self.engine, each) for each in members]
        self.free = free_pages(self.engine)
        plan = self.turns.get(self.number, {0: 1, 1: 1, 2: 1, 3: 1})
        offers = {}
        for slot, member in enumerate(members):
            likely = plan.get(slot, 0)
            # distinct tokens: a likely one costs 0.001 to 0.004, so that order never changes who goes on
            offers[member] = [(10 * slot + i, -0.001 * (1 + i) if i < likely else -1000.0 - i) for i in range(count)]
        return [offers[each] for each in self.engine.scheduler.running]


def members_of(engine: Engine) -> list[Any]:
    group = engine.scheduler.running[0].beams
    assert group is not None
    return group.members


def pages_of(engine: Engine, sample: Any) -> list[int]:
    assert sample.handle is not None
    return list(engine.blocks.pages(sample.handle).tolist())


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_paged_attention_figure_9(path: Path, monkeypatch: pytest.MonkeyPatch, prefix_cache: bool) -> None:
    """Blocks of 4 tokens, a prompt of one. Branches 0 to 2 share three blocks and part in the fourth, 3 parted from the
    second on; then the best four all come from 1 and 2. Exactly 0's last block and 3's last three become free, and four
    new ones are taken. Tokens are computed a step after they were chosen."""
    engine = Engine.from_pretrained(path, kv_tokens=256, page_size=PAGE, prefix_cache=prefix_cache)
    # the first 8 tokens: lines 0 and 3, which matter, and 1 and 2, which die behind the third block
    script = Script(engine, {1: {0: 4}, 9: {0: 3, 3: 1}, 13: {1: 2, 2: 2}})
    monkeypatch.setattr(engine.runner, "candidates", script)
    seen = []

    def watch(*_: int) -> None:
        engine.check_integrity()
        if script.number not in (9, 13, 14):
            return
        now = [pages_of(engine, each) for each in members_of(engine)]
        seen.append(script.number)
        if script.number == 9:  # one line has three branches, which share all of their three blocks
            assert now[0] == now[1] == now[2] and len(now[0]) == 3 and now[3][0] == now[0][0]
            assert not set(now[3][1:]) & set(now[0])
        elif script.number == 13:
            zero, one, two, three = script.before
            shared = one[:3]  # blocks 0, 1 and 3 of the figure
            assert zero[:3] == two[:3] == shared and three[0] == shared[0]
            assert len({zero[3], one[3], two[3], *three[1:]}) == 6  # 5, 6, 7 and 2, 4, 8
            assert now == [one, one, two, two]
            assert free_pages(engine) - script.free == {zero[3], *three[1:]} and script.free < free_pages(engine)
            owners = engine.blocks.allocator.ref_counts([*shared, one[3], two[3]]).tolist()
            assert owners == [4 + prefix_cache, 4, 4, 2, 2]
        else:
            assert len({each[4] for each in now}) == 4  # 9 to 12
            assert [each[:4] for each in now] == [each[:4] for each in script.before]

    params = SamplingParams(max_tokens=16, beam_width=4, ignore_eos=True)
    engine.generate(random_prompts((PAGE,)), params, on_progress=watch)
    assert seen == [9, 13, 14]
    assert engine.blocks.available_pages == engine.blocks.total_pages - prefix_cache


def free_pages(engine: Engine) -> set[int]:
    every = range(1, engine.blocks.total_pages + 1)
    owners = engine.blocks.allocator.ref_counts(list(every)).tolist()
    return {page for page, count in zip(every, owners, strict=True) if count == 0}


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_a_group_of_8_computes_its_long_prompt_once(path: Path, prefix_cache: bool) -> None:
    """300 tokens in chunks of 64: as many go through the model as for one sample, until samples differ. Requests of
    their own compute it 8 times, or find it."""
    engine = Engine.from_pretrained(path, kv_tokens=4096, max_prefill_tokens=64, prefix_cache=prefix_cache)
    (prompt,) = random_prompts((300,))
    computed = [0, 0]  # by prefill, by decode
    forward = engine.runner.forward

    def count(step: Any) -> Any:
        computed[0] += sum(chunk.length for chunk in step.chunks)
        computed[1] += len(step.decode)
        return forward(step)

    engine.runner.forward = count  # type: ignore[method-assign]
    (group,) = engine.generate([prompt], SamplingParams(max_tokens=6, temperature=1.0, n=8, seed=1))
    assert len({tuple(each.token_ids) for each in group}) == 8
    assert computed == [300, 8 * 5] and engine.stats.prefix_hit_tokens == 0
    engine.generate([prompt] * 8, SamplingParams(max_tokens=1, temperature=0))
    hit = 8 * (299 // 16 * 16) if prefix_cache else 0
    assert computed == [300 + 8 * 300 - hit, 8 * 5] and sum(computed) == engine.stats.computed_tokens
    assert engine.stats.prefix_hit_tokens == hit
