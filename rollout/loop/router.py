"""Which of several engines, replicas of each other, answers a request."""

import threading
from collections import Counter
from collections.abc import Hashable, Sequence, Sized
from typing import TypeVar

from rollout.requests import SamplingParams, not_token_ids

_Replica = TypeVar("_Replica", bound=Hashable)
KEYS = 1 << 16
"""How many keys a router remembers: those that were used last."""


def most_tokens(prompt: Sequence[int], params: SamplingParams) -> int:
    """Return the tokens of a request: its prompt's, and the most that its answers may have.

    Raises:
        ValueError: The prompt is no sequence.
    """
    if not isinstance(prompt, Sized):
        raise not_token_ids("the prompt")
    return len(prompt) + max(params.n, params.beam_width) * params.max_tokens


class Router:
    """Sends each request to the replica with the fewest unfinished tokens, the first of several.

    Requests with the same key go where the first of them went, which has the keys and values of
    what they share. Any thread may call it.
    """

    def __init__(self) -> None:
        self._tokens: Counter[Hashable] = Counter()
        self._replica_of: dict[Hashable, Hashable] = {}
        self._lock = threading.Lock()

    def pick(
        self, replicas: Sequence[_Replica], tokens: int, key: Hashable | None = None
    ) -> _Replica:
        """Choose the replica of a request, whose tokens count there until `done`.

        Args:
            replicas: The choice; a key of which no replica is among them chooses anew.
            tokens: Tokens of the request.
            key: What the request has in common with others, such as its conversation.
        """
        with self._lock:
            known = self._replica_of.pop(key, None)
            usual = [replica for replica in replicas if replica == known]
            replica = min(usual or replicas, key=self._tokens.__getitem__)
            if key is not None:
                self._replica_of[key] = replica
            if len(self._replica_of) > KEYS:
                del self._replica_of[next(iter(self._replica_of))]
            self._tokens[replica] += tokens
            return replica

    def done(self, replica: Hashable, tokens: int) -> None:
        """Take the tokens of a request that has ended off its replica."""
        with self._lock:
            self._tokens[replica] -= tokens
