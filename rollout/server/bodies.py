"""Bodies of requests in the form of OpenAI's API; every other field is refused by its name."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.requests import SamplingParams

_SAMPLING = (
    "temperature", "top_p", "min_p", "n", "seed", "stop_token_ids", "ignore_eos", "min_tokens",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "priority", "prompt_logprobs",
)  # fmt: skip


class StreamOptions(BaseModel):
    """What a stream tells besides its pieces."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class NamedSchema(BaseModel):
    """A JSON schema."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    name: str = ""
    description: str = ""
    strict: bool | None = None
    rules: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """What the content of a message is."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: NamedSchema | None = None

    @property
    def schema_text(self) -> str | None:
        """Return the JSON schema of the content; None: any text.

        Raises:
            ValueError: There is none, where one is needed.
        """
        if self.type == "json_schema":
            if self.json_schema is None:
                raise ValueError("response_format.json_schema: is missing")
            return json.dumps(self.json_schema.rules)
        return '{"type": "object"}' if self.type == "json_object" else None


class SampledBody(BaseModel):
    """What all requests for answers have; a field that is null has its default.

    The values of `SamplingParams` are checked there.
    """

    model_config = ConfigDict(extra="forbid")
    usual_tokens: ClassVar[int | None] = 16  # of an answer without max_tokens; None: all that fit

    model: str | None = None
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = Field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    priority: int = 0
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        return {name: value for name, value in given.items() if value is not None}

    @property
    def stops(self) -> Sequence[str]:
        """Return the stop strings.

        Raises:
            ValueError: One of them is empty.
        """
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if not all(stops):
            raise ValueError("stop: an empty text would end every answer; leave it out")
        return stops

    @property
    def likeliest(self) -> int | None:
        """Return how many likeliest tokens are told; None: no log-probabilities at all."""
        return None

    @property
    def schema_text(self) -> str | None:
        """Return the JSON schema that answers follow; None: they are free."""
        return None

    def params(self, room: int, adapter: str | None) -> SamplingParams:
        """Return the sampling parameters.

        Args:
            room: The most tokens that an answer can have.
            adapter: Name of the adapter that answers; None: the base alone.

        Raises:
            ValueError: Names a value that is out of range.
        """
        default = room if self.usual_tokens is None else min(self.usual_tokens, room)
        return SamplingParams(
            **{name: getattr(self, name) for name in _SAMPLING},
            top_k=0 if self.top_k == -1 else self.top_k,  # -1: vLLM's "off"
            max_tokens=max(default, 1) if self.max_tokens is None else self.max_tokens,
            top_logprobs=self.likeliest or 0,
            json_schema=self.schema_text,
            adapter=adapter,
        )


class CompletionBody(SampledBody):
    """A request for completions of texts, or of token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: Literal[False] = False

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """Return the prompts, of which there is at least one.

        Raises:
            ValueError: There is none.
        """
        given: Any = self.prompt
        single = isinstance(given, str) or (given and isinstance(given[0], int))
        if not single and not given:
            raise ValueError("prompt: has no prompts")
        return [given] if single else given


class ChatBody(SampledBody):
    """A request for the next message of a conversation."""

    usual_tokens: ClassVar[int | None] = None

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0)
    tools: list[dict[str, Any]] = Field(default_factory=list)
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: Literal[True] = True
    response_format: ResponseFormat = ResponseFormat()
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @property
    def schema_text(self) -> str | None:
        return self.response_format.schema_text

    @property
    def callable_tools(self) -> list[dict[str, Any]]:
        """Return the tools whose calls are read. The prompt has all tools."""
        return [] if self.tool_choice == "none" else self.tools

    @model_validator(mode="after")
    def _settle(self) -> "ChatBody":
        if self.max_completion_tokens is not None:
            if self.max_tokens is not None:
                raise ValueError("max_tokens and max_completion_tokens are the same; give one")
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.callable_tools and self.response_format.type != "text":
            raise ValueError(
                "response_format: tools are called in free text; leave one of both out"
            )
        self.messages = [_as_text(message) for message in self.messages]
        return self

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class TokenBody(SampledBody):
    """A request in token ids, which is answered in token ids."""

    token_ids: list[int]
    logprobs: int | None = None
    return_token_ids: Literal[True] = True

    @property
    def likeliest(self) -> int | None:
        return self.logprobs


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without nulls, whose content is one text; a ValueError names others."""
    message = {name: value for name, value in message.items() if value is not None}
    parts = message.setdefault("content", "")
    if not isinstance(parts, list):
        return message
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ValueError(f"messages: content of type {kind!r} is not served; send text")
    return {**message, "content": "".join(str(part.get("text", "")) for part in parts)}
