"""Text at the door of an engine: messages become token ids, and answers text and tool calls."""

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from rollout.chats import TurnBridge
from rollout.model.hub import resolve_model

_MARKS = {"<arg_key>": "glm", "<function=": "qwen3.5", "tool▁sep": "deepseek-v3"}
_MARKS["<tool_call>"] = "qwen3"  # the last: others have it, too
"""Format of tool calls by what a chat template has of it, in the names of `renderers`."""


class AnswerText:
    """The text of one answer, as its tokens come.

    A character is told when all of its bytes are there, and what may begin a stop string when it is
    known not to. Together, the parts are the text of all tokens, up to the first stop string.

    Args:
        tokenizer: The model's tokenizer.
        stop: Strings that end the answer, none of which is empty.

    Attributes:
        tokens: Number of tokens, up to the one that completes a stop string.
        stopped: Whether a stop string has come; what follows changes nothing.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stop = tokenizer, stop
        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._decoded = 0  # characters
        self._held = ""
        self.stopped = False

    @property
    def tokens(self) -> int:
        return len(self._ids)

    def add(self, token_ids: Sequence[int]) -> str:
        """Take tokens, and return the text that they add."""
        return "".join(map(self._add, token_ids))

    def end(self) -> str:
        """Return what was held back: the beginnings of stop strings and of characters."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        return self._told(whole[self._decoded :]) + self._held

    def _add(self, token: int) -> str:
        if self.stopped:
            return ""
        self._ids.append(token)
        new = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self._decoded += len(new)
        return self._told(new)

    def _told(self, new: str) -> str:
        """Return what can be told of the held text with new one, and hold the rest."""
        text = self._held + new
        if (at := first_stop(text, self._stop)) is not None:
            self.stopped, self._held = True, ""
            return text[:at]
        kept = len(text) - max((_begun(text, stop) for stop in self._stop), default=0)
        self._held = text[kept:]
        return text[:kept]


def first_stop(text: str, stop: Sequence[str]) -> int | None:
    """Return where the first of some strings begins in a text; None if there is none."""
    return min((at for string in stop if (at := text.find(string)) >= 0), default=None)


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text may begin a stop string."""
    longest = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((count for count in longest if text.endswith(stop[:count])), 0)


@dataclass(frozen=True, kw_only=True)
class AnswerMessage:
    """What an answer says.

    Attributes:
        content: Text outside of thoughts and tool calls.
        reasoning: Text of its thoughts; None if it has none.
        tool_calls: Calls in the form of OpenAI's API.
        unread: Texts of calls that cannot be read; of a part of an answer, the last is not whole.
    """

    content: str
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    unread: Sequence[str] = ()


class ChatFormat:
    """The chat format of a model: its tokenizer, chat template, and form of tool calls.

    Args:
        tokenizer: The model's tokenizer, of transformers.
        tool_format: "qwen3" (also of Hermes), "qwen3.5", "glm" or "deepseek-v3"; None: what the
            chat template shows.
        template_arguments: Further arguments of the chat template, which requests may replace.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_format: str | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer, self._arguments = tokenizer, template_arguments or {}
        template = str(tokenizer.chat_template or "")
        shown = (name for mark, name in _MARKS.items() if mark in template)
        self.tool_format = tool_format or next(shown, None)
        self.thinks = "</think>" in template
        # By whether tool calls are read. An unknown format is refused here.
        self._readers = {calls: self._renderer({}, calls) for calls in (False, True)}

    @classmethod
    def of(cls, path: str | Path, tool_format: str | None = None) -> Self:
        """Load the format of a model.

        Args:
            path: Model directory, or ORG/NAME of the Hub.
            tool_format: As above.

        Raises:
            ValueError: The model has no tokenizer that can be read, or `tool_format` is unknown.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(resolve_model(path, weights=False))
        except Exception as error:  # a bad file can raise anything
            raise ValueError(f"{path}: has no readable tokenizer: {error}") from error
        return cls(tokenizer, tool_format)

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, up to the start of the next answer.

        Args:
            messages: Messages in the form of OpenAI's API.
            tools: Tools in the same form.
            template_arguments: Further arguments of the chat template.

        Raises:
            ValueError: The model has no chat template, it takes no tools, or it refuses the
                messages.
        """
        if not self.tokenizer.chat_template:
            raise ValueError("messages: the model has no chat template; use completions")
        if tools and self.tool_format is None:
            raise ValueError("tools: the model's chat template has no tool calls; leave them out")
        renderer = self._renderer({**self._arguments, **(template_arguments or {})})
        chat, given = [dict(message) for message in messages], [dict(tool) for tool in tools]
        try:
            return list(renderer.render_ids(chat, tools=given or None, add_generation_prompt=True))
        except Exception as error:  # of Jinja, or of any expression in the template
            raise ValueError(f"messages: the chat template refuses them: {error}") from error

    def bridge(
        self,
        replies: Sequence[Mapping[str, Any]],
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids from the end token of an answer to the begin of the next one.

        Args:
            replies: The messages after the answer, at least one.
            template_arguments: Further arguments of the chat template.

        Raises:
            ValueError: The template does not write an answer and its end token before them.
        """
        arguments = {**self._arguments, **(template_arguments or {})}

        def render(chat: Sequence[Mapping[str, Any]]) -> str:
            how: Any = {"tokenize": False, "add_generation_prompt": True, **arguments}
            try:
                return str(self.tokenizer.apply_chat_template([*chat], **how))
            except Exception as error:  # as in `encode`
                raise ValueError(f"messages: the chat template refuses them: {error}") from error

        return TurnBridge(self.tokenizer, render).ids(replies)

    def parse(
        self,
        token_ids: Sequence[int],
        prompt_ids: Sequence[int] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> AnswerMessage:
        """Read an answer, whole or in part.

        Args:
            token_ids: The answer.
            prompt_ids: Its prompt, which may begin its thoughts.
            tools: The tools; without any, calls are text.
        """
        given = [dict(tool) for tool in tools] or None
        reader = self._readers[bool(tools)]
        parsed = reader.parse_response([*token_ids], tools=given, prompt_ids=[*prompt_ids])
        calls = [call for call in parsed.tool_calls if call.status == "ok"]
        return AnswerMessage(
            content=parsed.content,
            reasoning=parsed.reasoning_content,
            tool_calls=[_tool_call(call.name, call.arguments) for call in calls],
            unread=[call.raw for call in parsed.tool_calls if call.status != "ok"],
        )

    def _renderer(self, arguments: Mapping[str, Any], calls: bool = True) -> Any:
        from renderers import DefaultRendererConfig
        from renderers.default import DefaultRenderer

        tool_parser = self.tool_format if calls else None
        config = DefaultRendererConfig(**arguments, tool_parser=tool_parser)
        return DefaultRenderer(self.tokenizer, config)


def _tool_call(name: str, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": text}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
