"""A conversation of a model with an environment: turns of answers, tool calls and replies."""

from __future__ import annotations

import contextlib
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from recipes.environments.environments import EnvironmentFault, EnvironmentKind, EnvironmentProcess
from recipes.rewards import Score
from recipes.rewards.score import score_of

if TYPE_CHECKING:
    from rollout import Completion

Message = Mapping[str, Any]


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
        prompt_ids: Token ids before the first answer.
        response_ids: All later ones: of answers exactly as generated, and between them those of
            tools and replies.
        learned: Whether the policy generated each of them.
        logprobs: Log-probability in the rollout of each; 0 where `learned` is false.
        weight_versions: Version of the weights of each; of other tokens, that of the token before.
        messages: The messages after the prompt.
        ended: Whether the end came before the limit of tokens.
        calls: Tool calls.
        errors: Those that failed.
        seconds: Time in the environment.
        scores: What the environment says (""), or why it says nothing, and what reward functions
            that take the environment say, by name.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    ended: bool = False
    calls: int = 0
    errors: int = 0
    seconds: float = 0.0
    scores: dict[str, Score] = field(default_factory=dict)

    @property
    def turns(self) -> int:
        """Return the number of answers."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def text(self) -> str:
        """Return the content of the last answer."""
        said = [message["content"] for message in self.messages if message["role"] == "assistant"]
        return str(said[-1]) if said else ""

    def answered(self, completion: Completion, message: Message) -> None:
        """Add an answer."""
        self._add(completion.token_ids, completion.logprobs, completion.weight_versions, True)
        self.messages.append(message)

    def replied(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Add what is not the model's own."""
        version = self.weight_versions[-1]
        self._add(ids, [0.0] * len(ids), [version] * len(ids), False)
        self.messages += messages

    def _add(
        self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], own: bool
    ) -> None:
        self.response_ids += ids
        self.logprobs += logprobs
        self.weight_versions += versions
        self.learned += [own] * len(ids)


@dataclass(frozen=True, kw_only=True)
class Talk:
    """What all conversations of one generation have in common.

    Attributes:
        form: How messages become token ids.
        ask: Answers token ids; gets these, the most tokens, and a seed.
        kinds: What each environment has, by name.
        turns: Most answers of a conversation.
        max_tokens: Most tokens after the prompt, an observation among them.
    """

    form: ConversationFormat
    ask: Callable[[Sequence[int], int, int], Completion]
    kinds: Mapping[str, EnvironmentKind]
    turns: int
    max_tokens: int

    def converse(
        self, process: EnvironmentProcess, name: str | None, problem: Any, seeds: Sequence[int]
    ) -> Conversation:
        """Let the model and an environment talk to each other.

        Args:
            process: Process of the environment.
            name: Name of the environment; None: the model answers once.
            problem: What the conversation begins with.
            seeds: Seed of each turn.

        Returns:
            The conversation. A fault of its environment ends it without a reward.
        """
        done = Conversation(prompt_ids=problem.prompt_ids.tolist())
        if name is None:
            self._answer(done, seeds[0], self.max_tokens, ())
            return done
        served = _Served(process, name, self.kinds[name], done)
        try:
            self._talk(served, problem, seeds)
            self._judge(served, problem)
        except EnvironmentFault as error:
            done.scores = {"": Score(fault=str(error))}
        return done

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
        done = served.conversation
        given = done.prompt_ids
        said = served.ask("reset", {**problem.columns})
        with _blamed(served.name):
            begun = self.form.begin(problem, said).tolist() if said else given
        left = room = self.max_tokens - (len(begun) - len(given))
        if room < 1:
            rule = f"leaves no room in sampling.max_tokens={self.max_tokens}"
            raise EnvironmentFault(f"{served.name}: what reset returns {rule}")
        done.prompt_ids = begun
        for turn in range(self.turns):
            message = self._answer(done, seeds[turn], left, served.kind.tools)
            if not done.ended or not (replies := served.replies(message)):
                return
            if turn + 1 == self.turns:
                done.messages += replies  # nobody reads them any more
                return
            with _blamed(served.name):
                ids = self.form.bridge(replies)
            left = room - len(done.response_ids) - len(ids)
            if left < 1:
                done.ended = False
                return
            done.replied(ids, replies)

    def _answer(self, done: Conversation, seed: int, most: int, tools: Any) -> Message:
        """Add the next answer; return it as a message."""
        before = [*done.prompt_ids, *done.response_ids]
        completion = self.ask(before, most, seed)
        done.ended = completion.finish_reason == "stop"
        body = completion.token_ids[: -1 if done.ended else None]
        message = self.form.read(body, before, tools)
        done.answered(completion, message)
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

    def ask(self, method: str, *arguments: Any) -> Any:
        began = time.monotonic()
        try:
            return self.process.ask(self.name, method, *arguments)
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
