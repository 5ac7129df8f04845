"""Decision of `trainer.micro_batch_size`: the largest micro batch that saves time and fits."""

import math
from collections.abc import Callable, Sequence
from functools import cache

from recipes.planner.memory_plan import MemoryPlan

ENOUGH = 1 << 26
"""Elements of hidden states (tokens times width) of a pass above which kernels get no faster.

They then take longer than their launches. On an H100, sequences of 512 tokens gained up to micro
batches of 64 at width 896, 32 at 1536 and 16 at 3584, the largest that were measured: half of it.
"""


def sizes_to_try(answers: int, elements: int = 0) -> list[int]:
    """Return the micro batches that auto may choose, in ascending order.

    They are powers of two and all answers of an update, as far as `ENOUGH` allows. Each stands for
    all sizes that need as many micro batches, and is the smallest of them.

    Args:
        answers: Answers of an update on a rank.
        elements: Elements of the longest sequence's hidden states; 0: any size is allowed.
    """
    most = min(answers, max(1, ENOUGH // elements)) if elements else answers
    sizes = {1 << exponent for exponent in range(most.bit_length())} | ({most} & {answers})
    return sorted({math.ceil(answers / math.ceil(answers / size)) for size in sizes})


def choose_size(sizes: Sequence[int], make_plan: Callable[[int], MemoryPlan]) -> int:
    """Return the largest size whose plan fits with room to spare; the smallest if none does.

    A stage that is too full with the smallest size, too, such as one with the KV pool, only must
    not grow. Memory grows about linearly with the size, so a line through the plans of the smallest
    and the largest size says which one to plan next.

    Args:
        sizes: Sizes to choose from, in ascending order.
        make_plan: Returns the plan of a size.
    """
    planned = cache(make_plan)
    smallest, largest = sizes[0], sizes[-1]
    top = planned(largest)
    if all(stage.device_bytes <= top.sure_room for stage in top.stages):
        return largest
    least = [stage.device_bytes for stage in planned(smallest).stages]
    room = [max(nbytes, top.sure_room) for nbytes in least]
    # The share of the way from the smallest to the largest size up to which every stage fits.
    share = 1.0
    for stage, low, most in zip(top.stages, least, room, strict=True):
        if stage.device_bytes > most:
            share = min(share, (most - low) / (stage.device_bytes - low))
    expected = smallest + share * (largest - smallest)
    for size in [size for size in reversed(sizes) if smallest < size <= expected]:
        stages = planned(size).stages
        if all(s.device_bytes <= most for s, most in zip(stages, room, strict=True)):
            return size
    return smallest


def reason(size: int, sizes: Sequence[int], answers: int) -> str:
    """Return a line about the chosen size, and why it is no larger one.

    Args:
        size: The chosen size.
        sizes: Sizes it was chosen from, in ascending order.
        answers: Answers of an update on a rank.
    """
    line = f"micro batch: {size} {'sequence' if size == 1 else 'sequences'}"
    if size == answers:
        return f"{line}, all of an update on a rank"
    if size == sizes[-1]:
        return f"{line}; larger ones save no time"
    return f"{line}; {sizes[sizes.index(size) + 1]} do not fit"
