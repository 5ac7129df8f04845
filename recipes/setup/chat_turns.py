"""Turns of a conversation as token ids: what a model said stays as it was sampled."""

import copy
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from recipes.errors import RecipeError
from recipes.setup.model_files import decode
from recipes.setup.prompts import PromptFormat
from recipes.tasks.problem import Message, Problem
from rollout.chats import TurnBridge


@dataclass(frozen=True, kw_only=True)
class ChatTurns:
    """The chat format of conversations.

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
        for role in [*["tool"] * tools, *["user"] * replies]:
            try:
                turns.follows.check(role)
            except ValueError as error:
                rule = f"the chat template cannot add a message of the role {role}"
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
            return self.follows.ids(replies)

    @property
    def follows(self) -> TurnBridge:
        """Return what the template writes after answers."""
        rendered = partial(self.form.rendered, add_generation_prompt=True)
        return TurnBridge(self.form.tokenizer, rendered)


def chat_of(form: PromptFormat, key: str) -> Any:
    """Return the format of messages (`rollout.server.ChatFormat`), with a tokenizer of its own.

    Raises:
        RecipeError: A package that the key needs is missing.
    """
    try:
        from rollout.server import ChatFormat
    except ImportError as error:
        rule = f"needs {error.name}; run: pip install 'memsaver[serve]'"
        raise RecipeError(f"{key}: {rule}") from error
    tokenizer = copy.deepcopy(form.tokenizer)
    tokenizer.chat_template = form.template
    return ChatFormat(tokenizer, template_arguments=form.arguments)


def _reader(form: PromptFormat, key: str) -> Any:
    reader = chat_of(form, key)
    if reader.tool_format is None:
        rule = "the model's chat template shows no form of tool calls that can be read"
        remedy = "take an environment with __call__, or another model"
        raise RecipeError(f"{key}: {rule}; {remedy}")
    return reader
