"""What a worker process does, which imports the reward functions once and calls them.

The process imports neither torch nor the rest of a run, unless a reward function does.
"""

import contextlib
import pickle
import resource
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection

import psutil

from recipes.errors import RecipeError, typed
from recipes.rewards.function import RewardFunction


def serve(connection: Connection) -> None:
    """Load the functions and call them.

    The first message has, for each function's number, its setting in the recipe and the pickled
    arguments of `RewardFunction`. The reply is why a function cannot be loaded, or kind and seconds
    of each function. A call is (number, answers, seconds); the replies are the scores, one after
    the other, and then None.
    """
    sources: Mapping[int, tuple[str, bytes]] = connection.recv()
    functions, memory = {}, {}
    for number, (setting, packed) in sources.items():
        try:
            source, *arguments = pickle.loads(packed)
            functions[number] = RewardFunction(source, *arguments)
            memory[number] = getattr(source, "memory", None)
        except (Exception, SystemExit) as error:
            connection.send(f"{setting}: {_rule(error)}")
            return
    connection.send({number: (item.kind, item.seconds) for number, item in functions.items()})
    with contextlib.suppress(EOFError):
        while True:
            number, answers, seconds = connection.recv()
            with _limited(memory[number]):
                for score in functions[number].scores(answers, seconds):
                    connection.send(score)
            connection.send(None)


@contextlib.contextmanager
def _limited(memory: int | None) -> Iterator[None]:
    """Limit the address space inside the block to its present size and `memory` bytes."""
    if memory is None:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _rule(error: BaseException) -> str:
    if isinstance(error, RecipeError):
        return str(error)
    return f"cannot be loaded: {typed(error)}; correct it"
