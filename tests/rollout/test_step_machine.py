"""Random walks over requests, steps, failures, sleeps and updates, compared with a model.

No request is lost or answered twice, and each token is the one that transformers chooses after the
tokens before it, by the weights of the token's version.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout import Engine, KVTiers, SamplingParams
from rollout.scheduling.samples import Step
from tests.helpers.case_selection import rounds
from tests.helpers.models import greedy
from tests.helpers.rollout.answers import random_prompts
from tests.helpers.rollout.updates import checkpoint, tiny, update

LENGTH = 6
STOPS = (*range(0, 199, 4),)  # a quarter of the vocabulary
BEGINNING = tuple(random_prompts((17,))[0])
PROMPTS = [(5, 3), BEGINNING, (*BEGINNING, 7, 7, 9), (*BEGINNING, *BEGINNING, 1), (8,) * 33]


@cache
def chosen(seed: int, tokens: tuple[int, ...]) -> int:
    return greedy(tiny(seed), list(tokens), 1)[0]


@dataclass
class Asked:
    """A request in the model."""

    prompt: tuple[int, ...]
    stops: tuple[int, ...]
    samples: dict[int, list[int]]
    versions: dict[int, list[int]]
    ends: dict[int, str] = field(default_factory=dict)
    may_end: set[str] = field(default_factory=lambda: {"length"})
    old_keys: bool = False  # whether an update has kept its keys and values


class StepMachine(RuleBasedStateMachine):
    @initialize(
        cache=st.sampled_from(["none", "device", "host"]),
        chunk=st.sampled_from([8, 64]),
        depth=st.integers(0, 2),
    )
    def build(self, cache: str, chunk: int, depth: int) -> None:
        sizes: dict[str, Any] = {"kv_tokens": 128, "max_running": 4}
        sizes["prefix_cache"] = cache != "none"
        sizes["tiers"] = KVTiers(host_ratio=2.0) if cache == "host" else None
        self.engine = Engine.from_pretrained(checkpoint(), max_prefill_tokens=chunk, **sizes)
        self.asked: dict[int, Asked] = {}
        self.seeds = {0: 0}  # of the models, by version
        self.failing, self.failures = "launch", 0  # what is still to fail, and how often
        self.engine.steps.depth = depth
        runner, scheduler = self.engine.runner, self.engine.scheduler
        forward, receive = runner.forward, scheduler.receive

        def launch(step: Step) -> Any:
            self._may_fail("launch")
            logits = forward(step)
            runner.last_tokens.fill_(1)  # each token is read once, and written before
            return logits

        def collect(*result: Any) -> None:
            self._may_fail("collect")
            receive(*result)

        runner.forward = launch  # type: ignore[method-assign]
        scheduler.receive = collect  # type: ignore[method-assign]

    def _may_fail(self, what: str) -> None:
        if self.failures and self.failing == what:
            self.failures -= 1
            raise RuntimeError("out of memory")

    @rule(
        which=st.sampled_from(PROMPTS),
        n=st.integers(1, 3),
        stream=st.booleans(),
        stops=st.sampled_from([(), STOPS]),
    )
    def submit(self, which: tuple[int, ...], n: int, stream: bool, stops: tuple[int, ...]) -> None:
        greedily: dict[str, Any] = {"max_tokens": LENGTH, "temperature": 0, "ignore_eos": True}
        params = SamplingParams(**greedily, n=n, stop_token_ids=stops)
        id = self.engine.submit(which, params, stream=stream)
        assert id not in self.asked
        empty = range(n)
        asked = Asked(which, stops, {i: [] for i in empty}, {i: [] for i in empty})
        self.asked[id] = asked
        asked.may_end |= {"stop"} if stops else set()

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.engine.step():
                asked = self.asked[output.id]
                assert output.sample not in asked.ends, "a sample ended twice"
                asked.samples[output.sample] += output.token_ids
                asked.versions[output.sample] += output.weight_versions
                if output.finish_reason is not None:
                    asked.ends[output.sample] = output.finish_reason

    @precondition(lambda self: self.engine.unfinished)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(self.engine.unfinished))
        self.asked[id].may_end.add("abort")
        self.engine.abort(id)

    @rule(times=st.integers(1, 2), what=st.sampled_from(["launch", "collect"]))
    def fail(self, times: int, what: str) -> None:
        """Let the next steps fail; two in a row end requests."""
        self.failing, self.failures = what, times
        for id in self.engine.unfinished:
            self.asked[id].may_end |= {"error", "abort"}
        self.step(times)
        self.failures = 0  # An idle engine has run no step, and later requests must not fail.

    @rule(level=st.integers(1, 2), abort=st.booleans())
    def nap(self, level: int, abort: bool) -> None:
        if abort:
            for id in self.engine.unfinished:
                self.asked[id].may_end.add("abort")
        self.engine.sleep(level, unfinished="abort" if abort else "recompute")
        self.engine.wake_up()
        if level == 2:
            self.update(self.seeds[self.engine.weights_version], "refuse", False)

    @rule(
        seed=st.integers(0, 2),
        how=st.sampled_from(["recompute", "keep"]),
        shadow=st.booleans(),
    )
    def update(self, seed: int, how: str, shadow: bool) -> None:
        version = self.engine.weights_version + 1
        if how == "keep":
            for sample in self.engine.scheduler.running:
                self.asked[sample.request].old_keys = True
        update(self.engine, version, seed, shadow=shadow, in_flight=how)
        self.seeds[version] = seed

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check_integrity()
            left = [id for id, asked in self.asked.items() if len(asked.ends) < len(asked.samples)]
            assert self.engine.unfinished == left, "a request is lost"

    def teardown(self) -> None:
        while self.engine.unfinished:
            self.step(1)
        self.agrees()
        for asked in self.asked.values():
            assert {*asked.ends.values()} <= asked.may_end
            for number, tokens in asked.samples.items():
                versions = asked.versions[number]
                assert len(tokens) == len(versions) and versions == sorted(versions)
                if asked.ends[number] == "length":
                    assert len(tokens) == LENGTH
                ends = [token in asked.stops for token in tokens]
                assert not any(ends[:-1]) and any(ends) == (asked.ends[number] == "stop")
                if not asked.old_keys:
                    self._check(asked.prompt, tokens, versions)
        self.engine.saver.close()

    def _check(self, prompt: tuple[int, ...], tokens: list[int], versions: list[int]) -> None:
        for at, (token, version) in enumerate(zip(tokens, versions, strict=True)):
            assert chosen(self.seeds[version], (*prompt, *tokens[:at])) == token


StepMachine.TestCase.settings = settings(max_examples=rounds(32, 500), stateful_step_count=40)
TestSteps = pytest.mark.soak(StepMachine.TestCase)
