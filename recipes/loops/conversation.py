"""A conversation: turns of a model with an environment, or with an agent that asks it."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

from recipes.environments import EnvironmentFault, EnvironmentKind, EnvironmentProcess
from recipes.rewards import Score
from recipes.rewards.score import score_of
from recipes.setup.agent_server import AgentServer
from recipes.tasks.problem import Message
from rollout import Completion, SamplingParams
from rollout.chats import RecordedRow


class ConversationFormat(Protocol):
    """How messages become token ids, and answers messages."""

    def begin(self, problem: Any, observation: str) -> array[int]:
        """Return the token ids of a prompt whose last message an observation ends."""

    def read(self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Any) -> Message:
        """Return an answer, without its end token, as a message; without tools, it is content."""

    def bridge(self, replies: Sequence[Message]) -> list[int]:
        """Return the token ids from the end of an answer to the begin of the next one."""


@dataclass(kw_only=True)
class Conversation:
    """One conversation as it was sampled.

    Attributes:
        rows: Its token ids: one row with an environment; with an agent, one more for each fork.
        turns: Number of answers.
        text: Content of the last answer.
        ended: Whether the end came before the limit of tokens.
        calls: Tool calls.
        errors: Those that failed.
        seconds: Time in the environment, or of the agent.
        device_waited: Its share of the time in which an engine in this process had nothing to do.
        scores: What the environment or the agent says (""), or why it says nothing, and what reward
            functions that take the environment say, by name.
    """

    rows: list[RecordedRow]
    turns: int = 0
    text: str = ""
    ended: bool = False
    calls: int = 0
    errors: int = 0
    seconds: float = 0.0
    device_waited: float = 0.0
    scores: dict[str, Score] = field(default_factory=dict)

    @property
    def messages(self) -> list[Message]:
        """Return the messages after the prompt, of one row after the other."""
        first, *forks = self.rows
        told = ([{"role": "fork", "content": ""}, *row.messages] for row in forks)
        return [*first.messages, *chain.from_iterable(told)]

    @property
    def recomputed(self) -> int:
        """Return the tokens of earlier turns that were computed again."""
        return sum(row.recomputed for row in self.rows)

    def answered(self, message: Message) -> None:
        """Count an answer."""
        self.turns, self.text = self.turns + 1, str(message["content"] or "")


@dataclass(frozen=True, kw_only=True)
class AgentAccess:
    """How agents reach the model.

    Attributes:
        server: The server that they ask.
        params: How its answers are sampled.
        timeout: Seconds that one conversation may take.
    """

    server: AgentServer
    params: SamplingParams
    timeout: float


@dataclass(frozen=True, kw_only=True)
class Talk:
    """What all conversations of one generation have in common.

    Attributes:
        form: How messages become token ids.
        ask: Answers token ids; gets these, the most tokens, and a seed.
        kinds: What each environment has, by name.
        turns: Most answers of a conversation.
        max_tokens: Most tokens after the prompt, an observation among them.
        agents: How agents reach the model; None: there are none.
    """

    form: ConversationFormat
    ask: Callable[[Sequence[int], int, int], Completion]
    kinds: Mapping[str, EnvironmentKind]
    turns: int
    max_tokens: int
    agents: AgentAccess | None = None

    def converse(
        self, process: EnvironmentProcess, name: str | None, problem: Any, seeds: Sequence[int]
    ) -> Conversation:
        """Let the model and an environment talk to each other, or an agent ask the model.

        Args:
            process: Process of the environment or agent.
            name: Its name; None: the model answers once.
            problem: What the conversation begins with.
            seeds: Seed of each turn.

        Returns:
            The conversation. A fault of its environment or agent ends it without a reward.
        """
        done = Conversation(rows=[RecordedRow(prompt_ids=problem.prompt_ids.tolist())])
        if name is None:
            self._answer(done, seeds[0], self.max_tokens, ())
            return done
        served = _Served(process, name, self.kinds[name], done)
        try:
            if served.kind.agent:
                self._solve(served, problem, seeds[0])
            else:
                self._talk(served, problem, seeds)
                self._judge(served, problem)
        except EnvironmentFault as error:
            done.scores = {"": Score(fault=str(error))}
        return done

    def _solve(self, served: _Served, problem: Any, seed: int) -> None:
        """Let an agent ask the model as often as it likes; what it returns is the reward."""
        done = served.conversation
        row = {"prompt": problem.prompt, "answer": problem.answer, **problem.columns}
        agents = self.agents
        assert agents is not None, "opened with the environments"
        with agents.server.session(agents.params, seed) as (access, record):
            try:
                said = served.ask("solve", row, access, seconds=agents.timeout)
            finally:
                turns = [*record.turns]
                done.rows = record.rows() or done.rows
        for turn in turns:
            done.answered(turn.answer)
            done.calls += len(turn.answer.get("tool_calls", ()))
        done.ended = not record.cut_off
        if not turns:
            raise EnvironmentFault(f"{served.name}: asked for no answer; let it use base_url")
        with _blamed(served.name):
            done.scores[""] = score_of(said)

    def _judge(self, served: _Served, problem: Any) -> None:
        """Ask for the rewards of a conversation that has ended."""
        done = served.conversation
        given = {**problem.columns, "prompts": [*problem.turns], "completions": done.messages}
        with _blamed(served.name):
            if served.kind.rewards:
                done.scores[""] = score_of(served.ask("reward"))
            for name in served.kind.judges:
                done.scores[name] = score_of(served.ask("judged", name, given))

    def _talk(self, served: _Served, problem: Any, seeds: Sequence[int]) -> None:
        done, row = served.conversation, served.conversation.rows[0]
        given = row.prompt_ids
        said = served.ask("reset", {**problem.columns})
        with _blamed(served.name):
            begun = self.form.begin(problem, said).tolist() if said else given
        left = room = self.max_tokens - (len(begun) - len(given))
        if room < 1:
            rule = f"leaves no room in sampling.max_tokens={self.max_tokens}"
            raise EnvironmentFault(f"{served.name}: what reset returns {rule}")
        row.prompt_ids = begun
        for turn in range(self.turns):
            message = self._answer(done, seeds[turn], left, served.kind.tools)
            if not done.ended or not (replies := served.replies(message)):
                return
            if turn + 1 == self.turns:
                row.messages += replies  # nobody reads them any more
                return
            with _blamed(served.name):
                ids = self.form.bridge(replies)
            left = room - len(row.response_ids) - len(ids)
            if left < 1:
                done.ended = False
                return
            row.replied(ids, replies)

    def _answer(self, done: Conversation, seed: int, most: int, tools: Any) -> Message:
        """Add the next answer; return it as a message."""
        row = done.rows[0]
        before = row.ids
        completion = self.ask(before, most, seed)
        done.ended = completion.finish_reason == "stop"
        body = completion.token_ids[: -1 if done.ended else None]
        message = self.form.read(body, before, tools)
        row.answered(completion, message)
        done.answered(message)
        return message


@contextlib.contextmanager
def _blamed(name: str) -> Iterator[None]:
    """Turn a ValueError about what an environment says into its fault."""
    try:
        yield
    except ValueError as error:
        raise EnvironmentFault(f"{name}: {error}") from error


@dataclass(frozen=True)
class _Served:
    """The environment of a conversation, which notes what it does."""

    process: EnvironmentProcess
    name: str
    kind: EnvironmentKind
    conversation: Conversation

    def ask(self, method: str, *arguments: Any, seconds: float | None = None) -> Any:
        began = time.monotonic()
        try:
            return self.process.ask(self.name, method, *arguments, seconds=seconds)
        finally:
            self.conversation.seconds += time.monotonic() - began

    def replies(self, message: Message) -> list[Message]:
        """Return what follows an answer; nothing ends the conversation."""
        if self.kind.replies:
            said = self.ask("reply", message["content"])
            return [] if said is None else [{"role": "user", "content": said}]
        return [self._called(call) for call in message.get("tool_calls", ())]

    def _called(self, call: Mapping[str, Any]) -> Message:
        name = call["function"]["name"]
        said, failed = self.ask("tool", name, call["function"]["arguments"])
        self.conversation.calls += 1
        self.conversation.errors += failed
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": said}
