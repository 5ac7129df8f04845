"""Conversations of one generation: beside each other, on one engine."""

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from typing import Any, NamedTuple

from recipes.loops.conversation import AgentAccess, Conversation, Talk
from recipes.setup.agent_server import Submit
from recipes.setup.preparation import Setup
from recipes.tasks import Problem, Task
from recipes.tasks.split import hash_text
from rollout import Completion, Engine, EngineLoop, Rollout, SamplingParams


class Begun(NamedTuple):
    """What a conversation begins with.

    Attributes:
        task: Set of the problem.
        problem: The problem.
        seed: What decides the seeds of its turns.
    """

    task: Task
    problem: Problem
    seed: str

    def turn_seeds(self, turns: int) -> list[int]:
        """Return a seed below 2**63 for each turn."""
        return [hash_text(f"{self.seed}/{turn}") >> 1 for turn in range(turns)]


def converse(
    rollout: Rollout, setup: Setup, begun: Sequence[Begun], temperature: float
) -> list[Conversation]:
    """Let conversations run beside each other up to their ends, each with environment or agent.

    Args:
        rollout: The engine, which must be awake.
        setup: The prepared recipe, opened (`Setup.opened`).
        begun: What they begin with.
        temperature: Sampling temperature.

    Returns:
        The conversations, in the order of `begun`.
    """
    found = setup.conversations
    assert found is not None and found.environments is not None, "see Setup.opened"
    agents, began = found.agents, time.monotonic()
    with contextlib.ExitStack() as stack:
        owner = stack.enter_context(_owned(rollout))
        # A turn may begin while an update of engines apart is under way.
        submit = partial(owner.submit, asleep="queue")
        if agents is not None:
            stack.enter_context(agents.answering(submit))
        talk = _talk(setup, submit, temperature)
        futures = [
            found.environments.start(
                talk.converse,
                one.task.environment_of(one.problem),
                one.problem,
                one.turn_seeds(talk.turns),
            )
            for one in begun
        ]
        try:
            talks = [future.result() for future in futures]
        except BaseException:
            for future in futures:
                future.cancel()
            raise
    if isinstance(owner, EngineLoop):
        waited = max(0.0, time.monotonic() - began - owner.busy_seconds)
        for done in talks:
            done.device_waited = waited / len(talks)
    return talks


def _talk(setup: Setup, submit: Submit, temperature: float) -> Talk:
    """Return what the conversations have in common."""
    recipe, found = setup.recipe, setup.conversations
    assert found is not None
    alike: dict[str, Any] = {"temperature": temperature, "adapter": recipe.served_adapter}

    def ask(ids: Sequence[int], most: int, seed: int) -> Completion:
        params = SamplingParams(max_tokens=most, seed=seed, **alike)
        (completion,) = submit(ids, params).result()
        return completion

    agents = None
    if found.agents is not None:
        params, timeout = SamplingParams(**alike), recipe.loop.agent_timeout
        agents = AgentAccess(server=found.agents, params=params, timeout=timeout)
    return Talk(
        form=found.turns,
        ask=ask,
        kinds=found.kinds,
        turns=recipe.loop.turns,
        max_tokens=recipe.sampling.max_tokens,
        agents=agents,
    )


def _owned(rollout: Any) -> AbstractContextManager[Any]:
    """Return what submits requests to the engine: a loop in this process, or a handle of actors."""
    return closing(EngineLoop(rollout)) if isinstance(rollout, Engine) else nullcontext(rollout)
