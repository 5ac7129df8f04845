"""Prompts as token ids: chat templates, system turns, and the tokens that begin a plain text."""

import contextlib
import difflib
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from recipes.config.sections import TaskSection
from recipes.errors import RecipeError, one_line, shown
from recipes.tasks.problem import Problem, Task, Tasks


class TemplateError(ValueError):
    """A prompt that the chat template refuses; the message is the reason.

    Args:
        problem: The problem with the prompt; also an attribute.
        why: The reason.
    """

    def __init__(self, problem: Problem, why: str) -> None:
        self.problem = problem
        super().__init__(why)


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """How prompts become token ids, up to the start of the assistant's answer.

    Attributes:
        tokenizer: The model's tokenizer.
        template: Chat template; None: prompts are plain text, which the tokenizer's own first
            tokens (BOS) precede.
        system_prompt: System turn before prompts that do not begin with one.
        arguments: Further arguments of the template.
        started: Time that the template writes as the present; None: the present itself.
    """

    tokenizer: Any
    template: str | None
    system_prompt: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    started: datetime | None = None

    def encode(self, problems: Sequence[Problem]) -> "list[array[int]]":
        """Return the token ids of each problem's prompt.

        Raises:
            TemplateError: The chat template raised, or lacks what a prompt needs.
        """
        texts = list(map(self._text, problems))
        # A template writes all special tokens of a chat, also the first.
        first = self._first_tokens() if self.template is None else []
        plain = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        rows: list[list[int]] = self.tokenizer(texts, **plain)["input_ids"] if texts else []
        return [array("i", ids if ids[: len(first)] == first else first + ids) for ids in rows]

    def _text(self, problem: Problem) -> str:
        if problem.tools and "tools" not in names_in(self.template):
            raise TemplateError(
                problem, "it takes no tools, and the prompt's row has the column tools"
            )
        if self.template is not None:
            return self._rendered(problem)
        if not isinstance(problem.prompt, str):
            raise TemplateError(problem, "messages need a chat template")
        return problem.prompt

    def _rendered(self, problem: Problem) -> str:
        chat = list(problem.turns)
        if self.system_prompt and chat[0]["role"] != "system":
            chat.insert(0, {"role": "system", "content": self.system_prompt})
        try:
            return self.rendered(chat, tools=[*problem.tools] or None, add_generation_prompt=True)
        except ValueError as error:
            raise TemplateError(problem, str(error)) from error

    def rendered(self, chat: Sequence[Mapping[str, Any]], **how: Any) -> str:
        """Return a chat as the template writes it, without a system turn of the section.

        Raises:
            ValueError: The template refuses the chat; the message is the reason.
        """
        try:
            self._set_present()
            text: str = self.tokenizer.apply_chat_template(
                [*chat], chat_template=self.template, tokenize=False, **how, **self.arguments
            )
        except Exception as error:  # jinja2 errors, or any error of an expression in it
            raise ValueError(one_line(error)) from error
        return text

    def _set_present(self) -> None:
        """Replace `strftime_now` in the compiled template, which transformers keeps for its text.

        transformers 5.24 passes functions among the arguments to the template as text.
        """
        if self.started is not None:
            from transformers.utils.chat_template_utils import _compile_jinja_template

            compiled = _compile_jinja_template(self.template)
            compiled.globals["strftime_now"] = self.started.strftime

    def _first_tokens(self) -> list[int]:
        """Return the special tokens that the tokenizer puts before a text."""
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        ids: list[int] = self.tokenizer("a")["input_ids"]
        starts = (start for start in range(len(ids)) if ids[start : start + len(bare)] == bare)
        return ids[: next(starts, 0)]


def names_in(template: str | None) -> set[str]:
    """Return the words of a chat template, the names of its variables among them."""
    return set(re.findall(r"\w+", template or ""))


def prompt_format(section: TaskSection, tokenizer: Any, started: datetime) -> PromptFormat:
    """Return the format that a recipe's task section asks for.

    Args:
        section: The task section.
        tokenizer: The model's tokenizer.
        started: Time that templates write as the present, such as Llama 3.2's.

    Raises:
        RecipeError: The template cannot be read, or cannot use a key of the section.
    """
    template, setting = _template(section, tokenizer)
    for key in ("system_prompt", "template_arguments"):
        if (value := getattr(section, key)) and template is None:
            rule = f"needs a chat template, and {setting}; set task.template=FILE, or drop it"
            raise RecipeError(f"task.{key}={shown(value, 60)}: {rule}")
    names = names_in(template)
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
        started=started,
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


def encode_prompts(tasks: Tasks, form: PromptFormat) -> Tasks:
    """Return the sets with the token ids of all prompts.

    Raises:
        RecipeError: The chat template refuses the system turn or a prompt.
    """

    def encoded(task: Task) -> Task:
        try:
            rows = iter(form.encode(task.problems()))
        except TemplateError as error:
            raise _refused(task, form, error) from error
        train = tuple(replace(problem, prompt_ids=next(rows)) for problem in task.train)
        held_out = tuple(replace(problem, prompt_ids=next(rows)) for problem in task.held_out)
        return replace(task, train=train, held_out=held_out)

    tasks = tasks.mapped(encoded)
    if form.system_prompt:
        _check_system_turn(form, next(tasks.problems()))
    return tasks


def _check_system_turn(form: PromptFormat, problem: Problem) -> None:
    with contextlib.suppress(TemplateError):  # The template requires a system turn.
        same = replace(form, system_prompt="").encode([problem]) == [problem.prompt_ids]
        if same and problem.turns[0]["role"] != "system":
            raise _no_system_turn(form, "ignores a system turn")


def _refused(task: Task, form: PromptFormat, error: TemplateError) -> RecipeError:
    """Return the error of a refused prompt, or of the system turn if the prompt alone is good."""
    try:
        replace(form, system_prompt="").encode([error.problem])
    except TemplateError as alone:
        rule = f"the chat template refuses the prompt {shown(repr(error.problem.text), 60)}"
        remedy = "correct prompt or template (task.template=FILE)"
        return RecipeError(f"{task.source}: {rule}: {alone}; {remedy}")
    return _no_system_turn(form, f"refuses a system turn: {error}")


def _no_system_turn(form: PromptFormat, how: str) -> RecipeError:
    setting = f"task.system_prompt={shown(form.system_prompt, 60)}"
    return RecipeError(f"{setting}: the model's chat template {how}; drop it")


def without_long(tasks: Tasks, limit: int) -> Tasks:
    """Leave out prompts of more than `limit` tokens; each set counts them and names the longest."""

    def reduced(task: Task) -> Task:
        longest = max(task.problems(), key=lambda problem: len(problem.prompt_ids))
        tokens, begin = len(longest.prompt_ids), shown(repr(longest.text), 40)
        why = f"longer than task.max_prompt_tokens={limit}, up to {tokens} tokens ({begin})"
        return task.keeping(lambda problem: len(problem.prompt_ids) <= limit, why)

    return tasks.mapped(reduced)
