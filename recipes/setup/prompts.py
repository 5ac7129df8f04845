"""Prompts as token ids: chat templates, system turns, and the tokens that begin a plain text."""

from __future__ import annotations

import contextlib
import difflib
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipes.config.sections import TaskSection
from recipes.errors import RecipeError, one_line, shown
from recipes.tasks.problem import Message, Task, Tasks

Prompt = str | Sequence[Message]
Encoded = dict[str, "array[int]"]
"""Token ids of prompts by the text of their problems."""


class TemplateError(ValueError):
    """A prompt that the chat template refuses; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How prompts become token ids, up to the start of the assistant's answer.

    Attributes:
        tokenizer: The model's tokenizer.
        template: Chat template; None: prompts are plain text, which the tokenizer's own first
            tokens (BOS) precede.
        system_prompt: System turn before prompts that do not begin with one.
        arguments: Further arguments of the template.
    """

    tokenizer: Any
    template: str | None
    system_prompt: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def encode(self, prompts: Sequence[Prompt]) -> list[array[int]]:
        """Return the token ids of each prompt.

        Raises:
            TemplateError: The chat template raised, or messages have no template.
        """
        texts = list(map(self._text, prompts)) if self.template is None else self._rendered(prompts)
        # A template writes all special tokens of a chat, also the first.
        first = self._first_tokens() if self.template is None else []
        plain = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        rows: list[list[int]] = self.tokenizer(texts, **plain)["input_ids"]
        return [array("i", ids if ids[: len(first)] == first else first + ids) for ids in rows]

    def _text(self, prompt: Prompt) -> str:
        if not isinstance(prompt, str):
            raise TemplateError("messages need a chat template")
        return prompt

    def _rendered(self, prompts: Sequence[Prompt]) -> list[str]:
        try:
            return self.tokenizer.apply_chat_template(
                [self._chat(prompt) for prompt in prompts],
                chat_template=self.template,
                add_generation_prompt=True,
                tokenize=False,
                **self.arguments,
            )
        except Exception as error:  # jinja2 errors, or any error of an expression in it
            raise TemplateError(one_line(error)) from error

    def _chat(self, prompt: Prompt) -> list[Message]:
        user: list[Message] = [{"role": "user", "content": str(prompt)}]
        chat = user if isinstance(prompt, str) else list(prompt)
        if self.system_prompt and chat[0]["role"] != "system":
            return [{"role": "system", "content": self.system_prompt}, *chat]
        return chat

    def _first_tokens(self) -> list[int]:
        """Return the special tokens that the tokenizer puts before a text."""
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        ids: list[int] = self.tokenizer("a")["input_ids"]
        starts = (start for start in range(len(ids)) if ids[start : start + len(bare)] == bare)
        return ids[: next(starts, 0)]


def prompt_format(section: TaskSection, tokenizer: Any) -> PromptFormat:
    """Return the format that a recipe's task section asks for.

    Raises:
        RecipeError: The template cannot be read, or cannot use a key of the section.
    """
    template, setting = _template(section, tokenizer)
    for key in ("system_prompt", "template_arguments"):
        if (value := getattr(section, key)) and template is None:
            rule = f"needs a chat template, and {setting}; set task.template=FILE, or drop it"
            raise RecipeError(f"task.{key}={shown(value, 60)}: {rule}")
    names = set(re.findall(r"\w+", template or ""))
    for name, value in section.template_arguments.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            remedy = f"did you mean {close[0]}?" if close else "drop it"
            rule = f"the chat template has no {name}; {remedy}"
            raise RecipeError(f"task.template_arguments.{name}={shown(value, 60)}: {rule}")
    return PromptFormat(
        tokenizer=tokenizer,
        template=template,
        system_prompt=section.system_prompt,
        arguments=section.template_arguments,
    )


def _template(section: TaskSection, tokenizer: Any) -> tuple[str | None, str]:
    """Return the chat template, and why there is none, for messages."""
    if section.template == "none":
        return None, "task.template=none"
    if section.template is None:
        own = tokenizer.chat_template
        return own and tokenizer.get_chat_template(), "the model's tokenizer has none"
    try:
        return Path(section.template).expanduser().read_text(encoding="utf-8"), ""
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        rule = f"cannot be read: {why}; name a Jinja file, or none for plain text"
        raise RecipeError(f"task.template={section.template}: {rule}") from None


def encode_prompts(tasks: Tasks, form: PromptFormat) -> Encoded:
    """Return the token ids of all prompts.

    Raises:
        RecipeError: The chat template refuses the system turn or a prompt.
    """
    prompts = {problem.text: problem.prompt for problem in tasks.problems()}
    try:
        rows = form.encode([*prompts.values()])
    except TemplateError as error:
        raise _refused(tasks, form, error) from error
    if form.system_prompt:
        _check_system_turn(form, next(iter(prompts.values())), rows[0])
    return dict(zip(prompts, rows, strict=True))


def _check_system_turn(form: PromptFormat, prompt: Prompt, ids: array[int]) -> None:
    alone = replace(form, system_prompt="")
    with contextlib.suppress(TemplateError):  # The template requires a system turn.
        if isinstance(prompt, str) and alone.encode([prompt])[0] == ids:
            raise _no_system_turn(form, "ignores a system turn")


def _refused(tasks: Tasks, form: PromptFormat, error: TemplateError) -> RecipeError:
    """Return the error of a refused prompt, or of the system turn if no prompt is refused."""
    plain = replace(form, system_prompt="")
    for task in tasks.all:
        for problem in task.problems():
            try:
                plain.encode([problem.prompt])
            except TemplateError as alone:
                rule = f"the chat template refuses the prompt {shown(repr(problem.text), 60)}"
                remedy = "correct prompt or template (task.template=FILE)"
                return RecipeError(f"{task.source}: {rule}: {alone}; {remedy}")
    return _no_system_turn(form, f"refuses a system turn: {error}")


def _no_system_turn(form: PromptFormat, how: str) -> RecipeError:
    setting = f"task.system_prompt={shown(form.system_prompt, 60)}"
    return RecipeError(f"{setting}: the model's chat template {how}; drop it")


def without_long(tasks: Tasks, prompts: Encoded, limit: int) -> Tasks:
    """Leave out prompts of more than `limit` tokens; each set counts them and names the longest."""

    def reduced(task: Task) -> Task:
        over = {p.text for p in task.problems() if len(prompts[p.text]) > limit}
        if not over:
            return task
        longest = max(over, key=lambda text: (len(prompts[text]), text))
        tokens, begin = len(prompts[longest]), shown(repr(longest), 40)
        why = f"longer than task.max_prompt_tokens={limit}, up to {tokens} tokens ({begin})"
        return task.without(over, why)

    trained, evaluated = (tuple(map(reduced, sets)) for sets in (tasks.trained, tasks.evaluated))
    return Tasks(trained=trained, evaluated=evaluated)
