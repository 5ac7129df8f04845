"""The environment of the task `guess`."""

from typing import Any


class Guess:
    """It replies `higher` or `lower` to a guess until it is right.

    The reward is 1.5 for a right guess, less a tenth for each wrong one before. Without a right
    one, each guess that agrees with all earlier replies earns a tenth.
    """

    def reset(self, number: int, largest: int, **row: Any) -> None:
        """Take the number to guess."""
        self._number, self._guess = number, 0
        self._low, self._high = 1, largest
        self._wrong = self._sound = 0

    def __call__(self, answer: str) -> str | None:
        """Reply to a guess; the end if it is right, or no number."""
        self._guess = int(answer) if answer.isdecimal() else 0
        if self._guess in (0, self._number):
            return None
        self._wrong += 1
        self._sound += self._low <= self._guess <= self._high
        if self._number > self._guess:
            self._low = max(self._low, self._guess + 1)
            return "higher"
        self._high = min(self._high, self._guess - 1)
        return "lower"

    def get_reward(self) -> float:
        """Return the reward of the conversation."""
        return 1.5 - 0.1 * self._wrong if self._guess == self._number else 0.1 * self._sound
