"""What a session of an agent said and heard, as the token ids that the engine computed."""

import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Protocol

from rollout.chats.turn_bridge import Message
from rollout.requests import Completion, SamplingParams

_SHAPING = (
    "top_k", "top_p", "min_p", "ignore_eos", "min_tokens", "presence_penalty", "allowed_token_ids",
    "frequency_penalty", "repetition_penalty", "logit_bias", "json_schema",
)  # fmt: skip


class TurnFormat(Protocol):
    """How messages become token ids; `rollout.server.ChatFormat` is one."""

    tokenizer: Any

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to the begin of the next answer."""

    def bridge(
        self, replies: Sequence[Message], template_arguments: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return those from the end of an answer to the begin of the next one."""


@dataclass(frozen=True, kw_only=True)
class RecordedTurn:
    """One answer, and what it answers.

    Attributes:
        prompt_ids: Token ids before the answer.
        completion: The answer as it was sampled; it ends with "stop" at a stop string, too.
        messages: What is answered, in the form of OpenAI's API; empty for plain prompts.
        answer: The answer in this form.
    """

    prompt_ids: Sequence[int]
    completion: Completion
    messages: Sequence[Message]
    answer: Message

    @property
    def ids(self) -> list[int]:
        """Return the token ids of prompt and answer."""
        return [*self.prompt_ids, *self.completion.token_ids]


@dataclass(kw_only=True)
class RecordedRow:
    """Turns of which each continues the one before, as one sequence to learn from.

    Attributes:
        prompt_ids: Token ids before the first answer; of a fork, answers of another row may be
            among them.
        response_ids: All later ones: of answers exactly as generated, and between them those of
            tools and replies.
        learned: Whether the policy generated each of them.
        logprobs: Log-probability in the rollout of each; 0 where `learned` is false.
        weight_versions: Version of the weights of each; of other tokens, that of the token before.
        messages: The messages after those of the first prompt.
        ended: Whether the last answer came to its end.
        recomputed: Tokens of earlier turns that went through the model again for a later one, since
            the prefix cache had them no more or has whole pages only.
    """

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    learned: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    ended: bool = False
    recomputed: int = 0
    _known: int = 0  # leading tokens that went through the model: all but the last of an answer

    @property
    def ids(self) -> list[int]:
        """Return all token ids."""
        return [*self.prompt_ids, *self.response_ids]

    def answered(self, completion: Completion, message: Message) -> None:
        """Add an answer.

        Args:
            completion: The answer as it was sampled.
            message: The answer as a message.
        """
        self._add(completion.token_ids, completion.logprobs, completion.weight_versions, True)
        self.messages.append(message)
        self.recomputed += max(0, self._known - completion.cached_tokens)
        self._known = len(self.prompt_ids) + len(self.response_ids) - 1
        self.ended = completion.finish_reason == "stop"

    def replied(self, ids: Sequence[int], messages: Sequence[Message]) -> None:
        """Add what is not the model's own, after an answer.

        Args:
            ids: Its token ids.
            messages: Its messages.
        """
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


class SessionRecord:
    """The turns of one session, whose answers are sampled alike and are never rendered again.

    A prompt that continues an earlier turn begins with the ids of its prompt and answer; what the
    agent appended follows them as the chat template writes it. Anything else begins anew. Requests
    that would change the distribution of answers are refused, since their log-probabilities would
    not be those of the policy.

    Args:
        format: The model's chat format.
        params: How answers are sampled: temperature and adapter.
        longest: Most tokens of prompt and answer.
        seed: Decides, with the prompt, the seed of each answer.

    Attributes:
        turns: The answers, in the order of their ends.
    """

    def __init__(self, format: TurnFormat, params: SamplingParams, longest: int, seed: int) -> None:
        self.turns: list[RecordedTurn] = []
        self._format, self._params, self._longest, self._seed = format, params, longest, seed
        self._asked: Counter[bytes] = Counter()
        self._known: dict[bytes, RecordedTurn] = {}  # by the digest of messages and answer

    def params(
        self, prompt_ids: Sequence[int], asked: SamplingParams, named: set[str]
    ) -> SamplingParams:
        """Return the sampling parameters of an answer.

        Args:
            prompt_ids: The prompt.
            asked: What the request asks for.
            named: The fields that the request has.

        Returns:
            The parameters. Equal prompts get different seeds, in their order.

        Raises:
            ValueError: The request asks for another distribution.
        """
        if "temperature" in named and asked.temperature != self._params.temperature:
            rule = f"this session samples at {self._params.temperature:g}; leave it out"
            raise ValueError(f"temperature: {rule}")
        plain = SamplingParams()
        for name in _SHAPING:
            if getattr(asked, name) != getattr(plain, name):
                raise ValueError(f"{name}: changes what is sampled, which is learned; leave it out")
        prompt = hashlib.sha256(json.dumps([self._seed, *prompt_ids]).encode()).digest()
        self._asked[prompt] += 1
        seed = hashlib.sha256(prompt + bytes([self._asked[prompt] % 256])).digest()
        return replace(
            asked,
            seed=int.from_bytes(seed[:8]) >> 1,
            max_tokens=min(asked.max_tokens, self._longest - len(prompt_ids)),
            temperature=self._params.temperature,
            adapter=self._params.adapter,
        )

    @property
    def cut_off(self) -> bool:
        """Return whether an answer has used up the `longest` tokens."""
        lengths = (
            len(turn.ids) for turn in self.turns if turn.completion.finish_reason == "length"
        )
        return any(length >= self._longest for length in lengths)

    def encode(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, as `ChatFormat.encode` does.

        It begins with the ids of the deepest turn that it continues.
        """
        digests = _digests(messages, tools, template_arguments)
        for count in range(len(messages) - 1, 0, -1):
            if (known := self._known.get(digests[count])) is not None:
                ids, end = known.ids, self._format.tokenizer.eos_token_id
                if ids[-1] != end:  # the answer was cut off, or ended by a stop string
                    ids.append(end)
                try:
                    return ids + self._format.bridge(messages[count:], template_arguments)
                except ValueError:  # the template has no such messages after an answer: a fork
                    break
        return self._format.encode(messages, tools, template_arguments)

    def add(
        self,
        turn: RecordedTurn,
        tools: Sequence[Message] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Add an answer that has ended; one without tokens is left out."""
        if not turn.completion.token_ids:
            return
        turn = replace(turn, prompt_ids=array("i", turn.prompt_ids))  # of many turns, much memory
        self.turns.append(turn)
        said = [*turn.messages, turn.answer]
        self._known[_digests(said, tools, template_arguments)[-1]] = turn

    def rows(self) -> list[RecordedRow]:
        """Return the turns as sequences to learn from, in which each answer is learned once.

        A turn continues the longest row with which its prompt begins, or begins a row. The order
        does not depend on which answers ended first.
        """
        rows: list[tuple[RecordedRow, RecordedTurn]] = []  # with the last turn of each
        for turn in sorted(self.turns, key=attrgetter("ids", "completion.logprobs")):
            leading = [
                at for at, (_, last) in enumerate(rows) if _begins(turn.prompt_ids, last.ids)
            ]
            if leading:
                at = max(leading, key=lambda at: len(rows[at][1].ids))
                row, last = rows[at]
                between = turn.messages[len(last.messages) + 1 :]
                row.replied(turn.prompt_ids[len(last.ids) :], between)
                rows[at] = row, turn
            else:
                row = RecordedRow(prompt_ids=[*turn.prompt_ids])
                rows.append((row, turn))
            row.answered(turn.completion, turn.answer)
        return [row for row, _ in rows]


def _begins(ids: Sequence[int], with_ids: Sequence[int]) -> bool:
    return [*ids[: len(with_ids)]] == [*with_ids]


def _digests(
    messages: Sequence[Message], tools: Sequence[Message], arguments: Mapping[str, Any] | None
) -> list[bytes]:
    """Return a digest of each number of first messages, from 0 on, with all that renders them."""
    state = hashlib.sha256(json.dumps([tools, arguments or {}], sort_keys=True).encode())
    digests = [state.digest()]
    try:
        for message in messages:
            state.update(json.dumps(_compared(message), sort_keys=True).encode())
            digests.append(state.digest())
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"messages: not in the form of OpenAI's API: {error!r}") from error
    return digests


def _compared(message: Message) -> Any:
    """Return what decides whether two messages are the same, however clients send them back."""
    calls = [
        [call.get("id"), call["function"]["name"], _value(call["function"]["arguments"])]
        for call in message.get("tool_calls") or ()
    ]
    own = [message.get(name) for name in ("role", "tool_call_id", "name")]
    return [*own, message.get("content") or "", calls]


def _value(arguments: Any) -> Any:
    """Return the arguments of a call, whose spaces and order of keys do not matter."""
    try:
        return json.loads(arguments)
    except (TypeError, ValueError):
        return arguments
