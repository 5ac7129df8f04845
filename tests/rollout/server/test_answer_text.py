"""Text of answers as their tokens come, and messages with thoughts and tool calls."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.server import AnswerText, ChatFormat
from tests.helpers.recipes.models import save_byte_model


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    return ChatFormat.of(save_byte_model(tmp_path_factory.mktemp("model")))


@given(data=st.data())
def test_parts_are_the_whole_text_up_to_the_first_stop(
    chat: ChatFormat, data: st.DataObject
) -> None:
    """Of any tokens, also such that are no characters, in pieces of any lengths."""
    tokenizer: Any = chat.tokenizer
    letters = st.text("ab€😀", max_size=30)
    ids: list[int] = tokenizer.encode(data.draw(letters), add_special_tokens=False)
    for token in data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=4)):
        ids.insert(data.draw(st.integers(0, len(ids))), token)
    stops = data.draw(
        st.lists(st.text("ab€\N{REPLACEMENT CHARACTER}", min_size=1, max_size=3), max_size=3)
    )
    answer, parts, at = AnswerText(tokenizer, stops), [], 0
    while at < len(ids):
        size = data.draw(st.integers(1, 5))
        parts.append(answer.add(ids[at : at + size]))
        at += size
    parts.append(answer.end())
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    places = [whole.find(stop) for stop in stops if stop in whole]
    assert "".join(parts) == whole[: min(places, default=len(whole))]
    assert answer.stopped == bool(places)
    if not places:
        assert answer.tokens == len(ids)
    elif "\N{REPLACEMENT CHARACTER}" not in whole:  # the last token completes a stop string
        seen = tokenizer.decode(ids[: answer.tokens], skip_special_tokens=True)
        before = tokenizer.decode(ids[: answer.tokens - 1], skip_special_tokens=True)
        assert any(stop in seen for stop in stops) and not any(stop in before for stop in stops)


def test_broken_tool_calls_are_text_and_formats_are_checked(chat: ChatFormat) -> None:
    tokenizer: Any = chat.tokenizer
    with pytest.raises(ValueError, match="Unknown tool_parser 'other'"):
        ChatFormat(tokenizer, "other")
    with pytest.raises(ValueError, match="tools: the model's chat template has no tool calls"):
        chat.encode([{"role": "user", "content": "a"}], [{"type": "function"}])
    ids = tokenizer.encode("<think>why</think>a", add_special_tokens=False)
    message = chat.parse(ids)
    assert (message.reasoning, message.content) == ("why", "a")
