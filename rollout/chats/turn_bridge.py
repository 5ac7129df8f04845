"""What a chat template writes between two answers, as token ids: earlier ones are never rendered.

What follows an answer is taken from a chat of its own, in which the template writes it after the
end token of another answer. So it does not matter what the template does to older turns.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
_ANSWER = "memsaver"  # a text that no template has
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "f", "arguments": {"x": _ANSWER}},
}


class TurnBridge:
    """Token ids from the end of an answer to the begin of the next one.

    Args:
        tokenizer: The model's tokenizer.
        render: Returns a chat as the template writes it, up to the begin of the next answer; a
            ValueError says why it refuses the chat.
    """

    def __init__(self, tokenizer: Any, render: Callable[[Sequence[Message]], str]) -> None:
        self._tokenizer, self._render = tokenizer, render

    def ids(self, replies: Sequence[Message]) -> list[int]:
        """Return what follows the end token of an answer.

        Args:
            replies: The messages after the answer, at least one.

        Returns:
            The token ids.

        Raises:
            ValueError: The template does not write an answer and its end token before the replies.
        """
        text, end = self._after_answer(replies)
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        eos = self._tokenizer.eos_token_id
        ends = [place for place, token in enumerate(ids) if token == eos]
        return ids[ends[text[:end].count(self._tokenizer.eos_token) - 1] + 1 :]

    def check(self, role: str) -> None:
        """Raise a ValueError if the template cannot add a message of a role after an answer.

        Args:
            role: "user" or "tool".
        """
        reply = {"role": role, "content": "replied"}
        if role == "tool":
            reply |= {"tool_call_id": "call_1", "name": "f"}
        text, end = self._after_answer([reply])
        if reply["content"] not in text[end:]:
            raise ValueError("it writes it before the end token of the answer")

    def _after_answer(self, replies: Sequence[Message]) -> tuple[str, int]:
        """Return a chat with an answer and replies, and where the answer's end token ends."""
        answer: Message = {"role": "assistant", "content": _ANSWER}
        if replies[0]["role"] == "tool":
            answer = {**answer, "content": "", "tool_calls": [_CALL]}
        text = self._render([{"role": "user", "content": "x"}, answer, *replies])
        eos = self._tokenizer.eos_token
        end = text.find(eos, text.find(_ANSWER)) if _ANSWER in text else -1
        if end < 0:
            raise ValueError("it writes no end token after an answer")
        return text, end + len(eos)
