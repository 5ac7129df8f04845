"""A trace of few layers, and the one of many that follows from it."""

from __future__ import annotations

import pytest

from recipes.planner.allocator import MIB
from recipes.planner.log import Key, Log, replay, with_layers


def model(layers: int) -> Log:
    """A forward that keeps 20 MiB a layer and prefetches 40 for the next, and a backward that frees both."""
    log = Log()
    kept: dict[int, Key] = {}
    ahead: dict[int, Key] = {}

    def take(nbytes: int) -> Key:
        key = log.new_key()
        log.add("allocate", key, nbytes)
        return key

    whole = take(30 * MIB)
    for layer in range(layers):
        log.enter("forward", layer)
        ahead[layer] = take(40 * MIB)
        if layer:
            log.add("free", ahead[layer - 1])
        kept[layer] = take(20 * MIB)
    log.leave()
    log.add("read")
    grads: dict[int, Key] = {}
    for layer in reversed(range(layers)):
        log.enter("backward", layer)
        grads[layer] = take(50 * MIB)
        log.add("free", kept[layer])
    log.leave()
    log.add("free", ahead[layers - 1])
    log.add("read")
    for layer in range(layers):  # outside of the layers, over all of them
        log.add("free", grads[layer])
    log.add("free", whole)
    log.add("empty_cache")
    log.add("read")
    return log


@pytest.mark.parametrize("more", [0, 1, 7])
def test_a_pattern_repeated_is_the_model_with_more_layers_and_takes_more(more: int) -> None:
    few = replay(with_layers(model(6).entries, 2, more))
    assert few == replay(iter(model(6 + more).entries))
    assert few[-1][0] == 0 and (few[0] > replay(iter(model(6).entries))[0]) == (more > 0)


def test_layers_that_are_not_alike_are_an_error_not_a_wrong_figure() -> None:
    log = Log()
    for layer in range(6):
        log.enter("forward", layer)
        if layer != 2:
            key = log.new_key()
            log.add("allocate", key, MIB)
            log.leave()
            log.enter("backward", layer)
            log.add("free", (((1, "forward", layer - 1), 0) if layer == 3 else key))
    with pytest.raises(ValueError, match="not alike"):
        replay(with_layers(log.entries, 2, 3))
