"""Turns of a conversation as token ids: what a model said stays as it was sampled."""

import copy
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from recipes.errors import RecipeError
from recipes.setup.model_files import decode
from recipes.setup.prompts import PromptFormat
from recipes.tasks.problem import Message, Problem

_ANSWER, _REPLY = "memsaver", "replied"  # texts that no template has
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": _ANSWER}},
}
_TOOL_REPLY = {"role": "tool", "tool_call_id": "call_1", "name": "f", "content": _REPLY}


@dataclass(frozen=True, kw_only=True)
class ChatTurns:
    """The chat format of conversations.

    What follows an answer is taken from a chat of its own, in which the template writes it after
    the end token of another answer. So earlier tokens are never rendered anew, whatever the
    template does to older turns.

    Attributes:
        form: Format of the prompts.
        reader: Reads tool calls (`rollout.server.ChatFormat`); None: nothing calls tools.
    """

    form: PromptFormat
    reader: Any = None
    _turn: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    """Of the tokenizer, which threads cannot share."""

    @classmethod
    def of(cls, form: PromptFormat, key: str, *, tools: bool, replies: bool) -> "ChatTurns":
        """Return the format for environments with `tools`, `replies`, or both.

        Raises:
            RecipeError: The model's chat template is not fit for the key's environments.
        """
        if form.template is None:
            rule = "needs a chat template, and prompts are plain text; set task.template=FILE"
            raise RecipeError(f"{key}: {rule}")
        turns = cls(form=form, reader=_reader(form, key) if tools else None)
        user = {"role": "user", "content": _REPLY}
        for reply in [*[_TOOL_REPLY] * tools, *[user] * replies]:
            try:
                turns.check(reply)
            except ValueError as error:
                rule = f"the chat template cannot add a message of the role {reply['role']}"
                raise RecipeError(f"{key}: {rule}: {error}; set task.template=FILE") from error
        return turns

    def begin(self, problem: Problem, observation: str) -> "array[int]":
        """Return the token ids of a prompt whose last message an observation ends."""
        *before, last = problem.turns
        said = {**last, "content": f"{last['content']}{observation}"}
        with self._turn:
            return self.form.encode([replace(problem, prompt=(*before, said))])[0]

    def read(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[Any]
    ) -> Message:
        """Return an answer, without its end token, as a message; without tools, it is content."""
        with self._turn:
            if not tools:
                content = decode(self.form.tokenizer, [[*token_ids]])[0]
                return {"role": "assistant", "content": content}
            read = self.reader.parse(token_ids, prompt_ids, tools)
        content = "".join([read.content, *read.unread])
        message = {"role": "assistant", "content": content, "reasoning_content": read.reasoning}
        message["tool_calls"] = [*read.tool_calls]
        return {name: value for name, value in message.items() if value or name == "content"}

    def bridge(self, replies: Sequence[Message]) -> list[int]:
        """Return the token ids from the end of an answer to the begin of the next one.

        Raises:
            ValueError: The template does not write an answer and its end token before the replies.
        """
        with self._turn:
            text, end = self._after_answer(replies)
            ids: list[int] = self.form.tokenizer(text, add_special_tokens=False)["input_ids"]
        eos = self.form.tokenizer.eos_token_id
        ends = [place for place, token in enumerate(ids) if token == eos]
        return ids[ends[text[:end].count(self.form.tokenizer.eos_token) - 1] + 1 :]

    def check(self, reply: Message) -> None:
        """Raise a ValueError if the template cannot add a reply after an answer."""
        text, end = self._after_answer([reply])
        if reply["content"] not in text[end:]:
            raise ValueError("it writes it before the end token of the answer")

    def _after_answer(self, replies: Sequence[Message]) -> tuple[str, int]:
        """Return a chat with an answer and replies, and where the answer's end token ends."""
        answer: Message = {"role": "assistant", "content": _ANSWER}
        if replies[0]["role"] == "tool":
            answer = {**answer, "content": "", "tool_calls": [_CALL]}
        chat = [{"role": "user", "content": "x"}, answer, *replies]
        text = self.form.rendered(chat, add_generation_prompt=True)
        eos = self.form.tokenizer.eos_token
        end = text.find(eos, text.find(_ANSWER)) if _ANSWER in text else -1
        if end < 0:
            raise ValueError("it writes no end token after an answer")
        return text, end + len(eos)


def _reader(form: PromptFormat, key: str) -> Any:
    try:
        from rollout.server import ChatFormat
    except ImportError as error:
        rule = f"reading tool calls needs {error.name}; run: pip install 'memsaver[serve]'"
        raise RecipeError(f"{key}: {rule}") from error
    tokenizer = copy.copy(form.tokenizer)
    tokenizer.chat_template = form.template
    reader = ChatFormat(tokenizer)
    if reader.tool_format is None:
        rule = "the model's chat template shows no form of tool calls that can be read"
        remedy = "take an environment with __call__, or another model"
        raise RecipeError(f"{key}: {rule}; {remedy}")
    return reader
