"""Answers in the form of OpenAI's API, as a whole and in pieces."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate, chain
from typing import Any

from rollout.chats import RecordedTurn, SessionRecord
from rollout.requests import Completion, Output, TokenScores
from rollout.server.bodies import ChatBody, CompletionBody, SampledBody
from rollout.server.text import AnswerMessage, AnswerText, ChatFormat, first_stop

Json = dict[str, Any]
_OPEN = "\N{REPLACEMENT CHARACTER}"  # what the first bytes of a character read
_SHARE = 16  # an answer is parsed again when it has grown by one part of so many


class AnsweredSample:
    """One sample, whose pieces become choices of the API.

    Args:
        asked: What the sample answers.
        prompt: Number of its prompt.
        sample: Number of the sample among those of its prompt.

    Attributes:
        ended: Whether its last piece has come.
        cached: Leading tokens of its prompt that were not computed.
    """

    def __init__(self, asked: "Asked", prompt: int, sample: int) -> None:
        self._asked, self._prompt = asked, prompt
        self._index = prompt * asked.body.n + sample
        self._text = AnswerText(asked.format.tokenizer, asked.body.stops)
        self._ids: list[int] = []
        self._parsed_at = 0  # tokens
        self._offset = 0  # characters
        self._told = {"reasoning_content": "", "content": ""}
        self._scores: list[tuple[float, int]] = []  # log-probability and version of each token
        self.ended, self.cached = False, 0

    @property
    def tokens(self) -> int:
        """Return the number of its tokens so far."""
        return self._text.tokens

    def choice(self, output: Output | Completion, *, whole: bool = False) -> Json:
        """Return what tokens add to the sample.

        Args:
            output: The next output of the sample.
            whole: Whether it is the only one, so that the choice is no piece of a stream.
        """
        known, first = self.tokens, not self._ids
        parts = [self._text.add([token]) for token in output.token_ids]
        offsets = [*accumulate(map(len, parts), initial=self._offset)]
        new = "".join(parts)
        if output.finish_reason is not None:
            new += self._text.end()
        reason: str | None = "stop" if self._text.stopped else output.finish_reason
        count = self.tokens - known
        ids = output.token_ids[:count]
        self._ids += ids
        self.ended, self.cached = reason is not None, output.cached_tokens
        choice: Json = {"index": self._index}
        delta = self._message_delta(new)
        if self._asked.record is not None:
            pairs = zip(output.logprobs, output.weight_versions, strict=True)
            self._scores += [*pairs][:count]
            self._record(reason, delta)
        if isinstance(self._asked.body, ChatBody):
            if delta.get("tool_calls"):
                reason = "tool_calls"
            choice |= _whole_message(delta) if whole else _message_piece(delta, first)
        elif isinstance(self._asked.body, CompletionBody):
            choice["text"] = new
        choice |= {"logprobs": self._logprobs(output, offsets[:count]), "finish_reason": reason}
        if output.prompt_logprobs is not None:
            choice["prompt_logprobs"] = [None, *map(self._by_id, output.prompt_logprobs)]
        if self._asked.body.return_token_ids:
            choice |= {"token_ids": ids, "weight_versions": output.weight_versions[:count]}
        self._offset += len(new)
        return choice

    def _message_delta(self, text: str) -> Json:
        """Return what is new of content, thoughts and tool calls."""
        asked = self._asked
        if not asked.parses:
            if asked.record is not None:
                self._told["content"] += text
            return {"content": text}
        if not self.ended and len(self._ids) < self._parsed_at * (1 + 1 / _SHARE):
            return {}
        self._parsed_at = len(self._ids)
        now = asked.format.parse(self._ids, asked.prompts[self._prompt], asked.tools)
        delta: Json = {}
        for name, text in self._settled(now).items():
            if new := _added(self._told[name], text):
                delta[name] = new
                self._told[name] += new
        if self.ended and now.tool_calls:
            delta["tool_calls"] = now.tool_calls
        return delta

    def _record(self, reason: str | None, delta: Json) -> None:
        """Record the sample if it has ended, with the calls of its last piece."""
        record, body = self._asked.record, self._asked.body
        if record is None or reason not in ("stop", "length"):
            return
        turn = RecordedTurn(
            prompt_ids=self._asked.prompts[self._prompt],
            completion=Completion(
                token_ids=self._ids,
                logprobs=[logprob for logprob, _ in self._scores],
                finish_reason="stop" if reason == "stop" else "length",
                weight_versions=[version for _, version in self._scores],
                cached_tokens=self.cached,
            ),
            messages=body.messages if isinstance(body, ChatBody) else (),
            answer=_whole_message({**delta, **self._told})["message"],
        )
        how = (body.tools, body.chat_template_kwargs) if isinstance(body, ChatBody) else ()
        record.add(turn, *how)

    def _settled(self, now: AnswerMessage) -> dict[str, str]:
        """Return the texts of a message that later tokens do not change."""
        stops, texts = self._asked.body.stops, {"reasoning_content": now.reasoning or ""}
        if self.ended:
            texts["content"] = "".join([now.content, *now.unread])
            return {name: text[: first_stop(text, stops)] for name, text in texts.items()}
        texts["content"] = now.content
        held = max([1, *map(len, stops)]) - 1
        whole = {name: text.rstrip(_OPEN) for name, text in texts.items()}
        return {name: text[: max(len(text) - held, 0)] for name, text in whole.items()}

    def _logprobs(self, output: Output | Completion, offsets: Sequence[int]) -> Json | None:
        """Return the log-probabilities of the tokens that begin at `offsets`, if asked for."""
        body, decode, count = self._asked.body, self._asked.decode, len(offsets)
        if body.likeliest is None:
            return None
        texts = [decode(token) for token in output.token_ids[:count]]
        tops: Sequence[TokenScores] = output.top_logprobs[:count] or [[]] * count
        if isinstance(body, ChatBody):
            places = zip(texts, output.logprobs, tops, strict=False)
            return {"content": [self._place(*place) for place in places]}
        likeliest = [self._by_text(scores) for scores in tops]
        return {
            "tokens": texts,
            "token_logprobs": output.logprobs[:count],
            "top_logprobs": likeliest if body.likeliest else None,
            "text_offset": offsets,
        }

    def _by_text(self, scores: TokenScores) -> dict[str, float]:
        return {self._asked.decode(token): value for token, value in scores}

    def _by_id(self, scores: TokenScores) -> Json:
        decode = self._asked.decode
        return {
            str(token): {"logprob": value, "decoded_token": decode(token)}
            for token, value in scores
        }

    def _place(self, text: str, logprob: float, scores: TokenScores) -> Json:
        best = [_scored(self._asked.decode(token), value) for token, value in scores]
        return {**_scored(text, logprob), "top_logprobs": best}


@dataclass(kw_only=True)
class Asked:
    """A request, and the form of its answer.

    Attributes:
        body: The request.
        format: The model's chat format.
        model: Name of the model that answers.
        prompts: Token ids of the prompts.
        kind: "chat.completion", "text_completion" or "token_completion".
        record: Gets the samples that have ended; None: nobody does.
        since: When it came, in seconds of the monotonic clock.
    """

    body: SampledBody
    format: ChatFormat
    model: str
    prompts: Sequence[Sequence[int]]
    kind: str
    record: SessionRecord | None = None
    since: float = field(default_factory=time.monotonic)
    _texts: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._head: Json = {
            "id": f"{'chatcmpl' if self.kind.startswith('chat') else 'cmpl'}-{uuid.uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": self.model,
        }

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tools that the answer may call."""
        return self.body.callable_tools if isinstance(self.body, ChatBody) else ()

    @cached_property
    def parses(self) -> bool:
        """Return whether the answer may have parts that are no plain text."""
        chat = isinstance(self.body, ChatBody)
        return chat and (bool(self.tools) or self.format.thinks)

    @cached_property
    def samples(self) -> list[list[AnsweredSample]]:
        """Return the samples, [prompt][sample]."""
        each = range(self.body.n)
        return [
            [*map(partial(AnsweredSample, self, number), each)]
            for number in range(len(self.prompts))
        ]

    def decode(self, token: int) -> str:
        """Return the text of one token; of a part of a character, its id as vLLM writes it."""
        if token not in self._texts:
            text = self.format.tokenizer.decode([token])
            self._texts[token] = f"token_id:{token}" if _OPEN in text else text
        return self._texts[token]

    def whole(self, choices: Sequence[Json]) -> Json:
        """Return the answer as a whole."""
        ordered = sorted(choices, key=lambda choice: choice["index"])
        return {**self._head, "choices": ordered, "usage": self.usage(), **self._prompt_ids()}

    def chunk(self, *choices: Json, first: bool = False, usage: bool = False) -> Json:
        """Return an event of a stream."""
        kind = f"{self.kind}.chunk" if self.kind.startswith("chat") else self.kind
        chunk: Json = {**self._head, "object": kind, "choices": [*choices]}
        if usage:
            chunk["usage"] = self.usage()
        return chunk | (self._prompt_ids() if first else {})

    def usage(self) -> Json:
        """Return the numbers of tokens so far."""
        prompt = sum(map(len, self.prompts))
        cached = sum(samples[0].cached for samples in self.samples)
        answers = sum(sample.tokens for sample in chain.from_iterable(self.samples))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answers,
            "total_tokens": prompt + answers,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _prompt_ids(self) -> Json:
        if not self.body.return_token_ids:
            return {}
        ids = [[*prompt] for prompt in self.prompts]
        return {"prompt_token_ids": ids[0] if len(ids) == 1 else ids}


def event(content: Json | str) -> str:
    """Return an event of a stream as text."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return f"data: {text}\n\n"


def is_empty(piece: Json) -> bool:
    """Return whether a piece of a stream tells nothing."""
    told = ("finish_reason", "text", "logprobs", "token_ids")
    return not any(piece.get(name) for name in told) and not any(piece.get("delta", {}).values())


def _added(told: str, now: str) -> str:
    """Return what a text adds to what was told of it."""
    return now[len(told) :] if now.startswith(told) else ""


def _whole_message(delta: Json) -> Json:
    message: Json = {"role": "assistant", "content": delta.get("content", "")}
    for name in ("reasoning_content", "tool_calls"):
        if delta.get(name):
            message[name] = delta[name]
    return {"message": message}


def _message_piece(delta: Json, first: bool) -> Json:
    if "tool_calls" in delta:
        numbered = enumerate(delta["tool_calls"])
        delta = {**delta, "tool_calls": [{"index": at, **call} for at, call in numbered]}
    return {"delta": {"role": "assistant", **delta} if first else delta}


def _scored(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": [*text.encode()]}
