"""What follows an answer, by the chat templates that TRL ships, beside whole renderings."""

from __future__ import annotations

from typing import Any

import pytest

from recipes.environments import Environments
from recipes.errors import RecipeError
from recipes.loops.conversation import Talk
from recipes.setup.chat_turns import ChatTurns
from recipes.setup.model_files import toy_tokenizer
from recipes.setup.prompts import PromptFormat
from recipes.tasks import Problem
from rollout import Completion
from tests.helpers.recipes.chat_forms import ENDS, form_of

REFUSED = {
    "user": {"gptoss"},
    "tool": {
        "cohere", "cohere2", "gemma", "gemma3", "gemma4", "glm4moe", "gptoss", "lfm2", "phi3",
        "deepseek_r1_distill",
    },
}  # fmt: skip
"""Templates that have no such replies, or write them before the end token of an answer."""
THOUGHTS = {
    "deepseek_r1_distill", "glm4moe", "nemotron_3_nano", "qwen3", "qwen3_5_think", "qwen3_8",
}  # fmt: skip
"""Templates that write the thoughts of older answers otherwise than these were sampled."""


def ids(form: PromptFormat, text: str) -> list[int]:
    found: list[int] = form.tokenizer(text, add_special_tokens=False)["input_ids"]
    return found


def reply_of(role: str, content: str) -> dict[str, Any]:
    tool = {"tool_call_id": "call_1", "name": "f"} if role == "tool" else {}
    return {"role": role, "content": content, **tool}


@pytest.mark.parametrize("role", ["user", "tool"])
@pytest.mark.parametrize("name", sorted(ENDS))
def test_replies_follow_an_answer_as_the_template_writes_them(name: str, role: str) -> None:
    """The next answer begins as the first one does, and nothing of the answer is written again."""
    form = form_of(name)
    turns = ChatTurns(form=form)
    if name in REFUSED[role]:
        with pytest.raises(ValueError, match="end token|roles|concatenate|Conversation|expected"):
            turns.follows.check(role)
        return
    turns.follows.check(role)
    bridge = turns.bridge([reply_of(role, "R?R")])
    text = form.tokenizer.decode(bridge)
    assert text.count("R?R") == 1 and "memsaver" not in text
    prompt = form.encode([Problem(prompt="Q")])[0].tolist()
    begins = form.tokenizer.decode(prompt).partition("Q")[2]
    last = text.partition("R?R")[2]
    assert last.endswith(begins) or begins.endswith(last.lstrip('"')) or role == "tool"
    if role == "tool" or name in THOUGHTS:
        return
    end = [form.tokenizer.eos_token_id]
    row = [*prompt, *ids(form, "A1"), *end, *bridge, *ids(form, "A2"), *end]
    chat = [("user", "Q"), ("assistant", "A1"), ("user", "R?R"), ("assistant", "A2")]
    messages = [{"role": role, "content": content} for role, content in chat]
    whole = ids(form, form.rendered(messages, add_generation_prompt=False))
    assert whole[: len(row)] == row


def test_an_observation_ends_the_last_message() -> None:
    form = form_of("qwen2_5")
    turns = ChatTurns(form=form)
    chat = ({"role": "user", "content": "one"}, {"role": "user", "content": "two"})
    begun = turns.begin(Problem(prompt=chat), " three").tolist()
    wanted = Problem(prompt=(chat[0], {"role": "user", "content": "two three"}))
    assert begun == form.encode([wanted])[0].tolist()


def test_replies_with_end_tokens_are_kept_whole() -> None:
    """A reply that writes an end token cannot cut what follows the answer."""
    form = form_of("qwen2_5")
    bridge = ChatTurns(form=form).bridge([reply_of("user", "a<|im_end|>b")])
    text = "\n<|im_start|>user\na<|im_end|>b<|im_end|>\n<|im_start|>assistant\n"
    assert bridge == ids(form, text)


def test_several_tools_answer_one_turn() -> None:
    form = form_of("qwen2_5")
    replies = [reply_of("tool", "first"), reply_of("tool", "second")]
    text = form.tokenizer.decode(ChatTurns(form=form).bridge(replies))
    assert text.count("<tool_response>") == 2
    assert text.index("first") < text.index("second")


def test_answers_are_read_as_messages() -> None:
    turns = ChatTurns(form=form_of("qwen2_5"))
    message = turns.read(ids(turns.form, "yes"), [], ())
    assert message == {"role": "assistant", "content": "yes"}


def test_tool_calls_are_read_from_ids() -> None:
    turns = ChatTurns.of(form_of("qwen3"), "task.environment", tools=True, replies=False)
    text = 'so\n<tool_call>\n{"name": "f", "arguments": {"a": [1, 2]}}\n</tool_call>'
    message = turns.read(ids(turns.form, text), [], [{"type": "function"}])
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"a": [1, 2]}'}
    assert message["content"].strip() == "so"


@pytest.mark.parametrize(
    ("name", "tools", "why"),
    [
        ("gemma3", True, "shows no form of tool calls"),
        ("gptoss", False, "cannot add a message of the role user: it writes no end token"),
    ],
)
def test_templates_that_are_not_fit_are_refused_by_key(name: str, tools: bool, why: str) -> None:
    with pytest.raises(RecipeError, match=f"^task.environment: .*{why}"):
        ChatTurns.of(form_of(name), "task.environment", tools=tools, replies=not tools)


def test_plain_prompts_have_no_turns() -> None:
    form = PromptFormat(tokenizer=toy_tokenizer(["a"]), template=None)
    with pytest.raises(RecipeError, match="needs a chat template"):
        ChatTurns.of(form, "task.environment", tools=False, replies=True)


def test_a_model_calls_tools_of_an_environment_in_its_process() -> None:
    """Two calls, of which one fails, in one answer; then one; then words, which end it."""
    world = "tests.helpers.recipes.worlds:World"
    environments = Environments(parallel=1, timeout=20.0)
    kind = environments.describe(world, "task.environment")
    turns = ChatTurns.of(form_of("qwen3"), "task.environment", tools=True, replies=False)
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    said = [
        call % ("add", '{"a": 2}') + "\n" + call % ("fail", "{}"),
        call % ("add", '{"a": 3, "b": 4}'),
        "nine",
    ]
    given = iter([[*ids(turns.form, text), turns.form.tokenizer.eos_token_id] for text in said])
    prompts = list[str]()

    def ask(prompt: list[int], most: int, seed: int) -> Completion:
        prompts.append(turns.form.tokenizer.decode(prompt))
        own = next(given)
        numbers = [0.0] * len(own)
        return Completion(
            token_ids=own, logprobs=numbers, finish_reason="stop", weight_versions=[0] * len(own)
        )

    talk = Talk(form=turns, ask=ask, kinds={world: kind}, turns=5, max_tokens=5000)
    (prompt_ids,) = turns.form.encode([Problem(prompt="Q", tools=tuple(kind.tools))])
    problem = Problem(prompt="Q", prompt_ids=prompt_ids)
    done = environments.start(talk.converse, world, problem, range(5)).result()
    environments.close()
    assert (done.calls, done.errors, done.turns, done.ended) == (3, 1, 3, True)
    assert done.scores[""].reward == 2.0 and done.text == "nine"
    tools = [str(item["content"]) for item in done.messages if item["role"] == "tool"]
    assert tools == ["3", "{'error': 'no luck at all'}", "7"]
    assert "Add two numbers." in prompts[0]
    for before, after, answer in zip(prompts, prompts[1:], said, strict=False):
        assert after.startswith(f"{before}{answer}<|im_end|>")
    assert prompts[1].count("<tool_response>\n") == 2
