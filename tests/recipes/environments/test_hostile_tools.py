"""Many conversations at once, whose tools do their worst: none is lost, and nothing grows."""

from __future__ import annotations

import json
import random
from array import array
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from recipes.environments import EnvironmentKind, Environments
from recipes.loops.conversation import Conversation, Talk
from rollout import Completion
from tests.helpers.case_selection import rounds
from tests.helpers.memory import settled_fds, status_bytes

WORLD = "tests.helpers.recipes.worlds:World"
CALLS = {
    "add": {"a": 1}, "talk": {"count": 1_000_000}, "print_much": {}, "fail": {}, "leave": {},
    "fork": {}, "crash": {}, "hang": {},
}  # fmt: skip
TIMEOUT = 1.0


class CallingFormat:
    """Each answer's token is the number of the tool that it calls; 99 calls none."""

    def begin(self, problem: Any, observation: str) -> array[int]:
        return array("i", problem.prompt_ids)

    def read(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Any) -> Any:
        (token,) = token_ids
        calls: list[Any] = []
        if token != 99:
            name = [*CALLS][token]
            function = {"name": name, "arguments": json.dumps(CALLS[name])}
            calls = [{"id": "c", "function": function}]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def bridge(self, replies: Sequence[Any]) -> list[int]:
        return [50]


def talk_once(environments: Environments, count: int, seed: int) -> list[Conversation]:
    draws = random.Random(seed)
    weights = [40, 8, 3, 8, 4, 6, 4, 2]

    def ask(ids: Sequence[int], most: int, turn_seed: int) -> Completion:
        token = draws.choices([*range(len(CALLS)), 99], [*weights, 25])[0]
        return Completion(
            token_ids=[token, 1], logprobs=[0.0] * 2, finish_reason="stop", weight_versions=[0] * 2
        )

    kind = EnvironmentKind(tools=[{}], replies=False, rewards=True)
    talk = Talk(form=CallingFormat(), ask=ask, kinds={WORLD: kind}, turns=4, max_tokens=100)
    problem = SimpleNamespace(prompt_ids=array("i", [7]), columns={}, turns=())
    futures = [environments.start(talk.converse, WORLD, problem, range(4)) for _ in range(count)]
    return [future.result(timeout=300) for future in futures]


@pytest.mark.soak
def test_no_conversation_is_lost_and_nothing_grows() -> None:
    count, parallel = rounds(24, 512), rounds(4, 16)
    others = {*psutil.Process().children(recursive=True)}  # of other tests
    environments = Environments(parallel, TIMEOUT)
    talk_once(environments, count, 0)
    before = status_bytes("VmRSS"), settled_fds()
    faults = Counter[str]()
    for number in range(1, 1 + rounds(1, 20)):
        talks = talk_once(environments, count, number)
        assert len(talks) == count
        for talk in talks:
            assert talk.turns >= 1 and len(talk.rows[0].learned) == len(talk.rows[0].response_ids)
            score = talk.scores[""]
            assert (score.reward is None) == bool(score.fault)
            faults[score.fault.partition("tool ")[2]] += 1
    assert {"took longer than 1 s", "ended its process: exit status 3", ""} >= {*faults}
    assert status_bytes("VmRSS") - before[0] < 64 << 20
    assert settled_fds() <= before[1] + 2 * parallel, "at most a new connection for each process"
    environments.close()
    assert {*psutil.Process().children(recursive=True)} <= others
