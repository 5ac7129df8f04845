"""The cost model: rates as they are measured, and which way they make the cheaper one."""

import pytest

from rollout.serving.tiers import (
    LEAST_BYTES,
    LEAST_TOKENS,
    START,
    WINDOW,
    PreemptionCost,
    Rate,
    Victim,
)

MIB = 1 << 20


def measured(prefill: float, to_host: float, to_device: float) -> PreemptionCost:
    cost = PreemptionCost()
    cost.ran(1000, 1000, 1000 / prefill, waited=True)
    cost.copied(True, 8 * MIB, 8 * MIB / to_host)
    cost.copied(False, 8 * MIB, 8 * MIB / to_device)
    return cost


def test_a_rate_is_its_start_value_until_it_is_measured() -> None:
    rate = Rate(10.0, least=4)
    rate.observe(3, 1.0)  # too little to tell
    rate.observe(100, 0.0)
    assert rate.value == 10.0
    rate.observe(100, 1.0)
    assert rate.value == 100.0


def test_a_rate_is_deaf_to_single_observations_and_follows_lasting_ones() -> None:
    rate = Rate(10.0, least=1)
    for _ in range(WINDOW):
        rate.observe(100, 1.0)
    for _ in range(WINDOW // 2):
        rate.observe(1, 1.0)
        assert rate.value == 100.0
    rate.observe(1, 1.0)
    assert rate.value == 1.0


def test_seconds_are_bytes_and_tokens_over_rates() -> None:
    cost = measured(prefill=500, to_host=4 * MIB, to_device=2 * MIB)
    victim = Victim(tokens=100, bytes_out=MIB, bytes_in=3 * MIB)
    assert cost.recompute_seconds(victim) == pytest.approx(0.2)
    assert cost.swap_seconds(victim) == pytest.approx(0.25 + 1.5)
    assert not cost.swaps(victim)
    assert cost.swaps(Victim(tokens=1000, bytes_out=0, bytes_in=3 * MIB))


@pytest.mark.parametrize(("factor", "swaps"), [(0.99, True), (1.0, False), (1.01, False)])
def test_the_cheaper_one_is_chosen_and_a_tie_computes(factor: float, swaps: bool) -> None:
    cost = PreemptionCost()
    cost.ran(1024, 1024, 1.0, waited=True)
    cost.copied(True, MIB, 1.0)
    cost.copied(False, MIB, 1.0)
    nbytes = int(factor * MIB / 2)
    assert cost.swaps(Victim(tokens=1024, bytes_out=nbytes, bytes_in=nbytes)) == swaps


def test_a_fixed_choice_asks_nobody() -> None:
    free = Victim(tokens=10**9, bytes_out=0, bytes_in=0)
    dear = Victim(tokens=0, bytes_out=1 << 40, bytes_in=1 << 40)
    assert not PreemptionCost("recompute").swaps(free) and PreemptionCost("swap").swaps(dear)
    with pytest.raises(
        ValueError, match="preemption='never' must be one of cheapest, recompute, swap"
    ):
        PreemptionCost("never")  # type: ignore[arg-type]


def test_steps_count_together_until_one_is_waited_for() -> None:
    cost = PreemptionCost()
    cost.ran(512, 512, 0.001, waited=False)  # only queued
    assert cost.rates["prefill"].value == START["prefill"]
    cost.ran(88, 80, 0.599, waited=True)
    assert cost.rates["prefill"].value == pytest.approx(1000)
    cost.ran(200, 0, 1.0, waited=True)  # decoding alone tells nothing
    cost.ran(LEAST_TOKENS, LEAST_TOKENS - 1, 1.0, waited=True)
    assert cost.rates["prefill"].value == pytest.approx(1000)


def test_both_directions_are_measured_apart_and_small_copies_are_not() -> None:
    cost = PreemptionCost()
    cost.copied(True, LEAST_BYTES, 0.5)
    cost.copied(False, LEAST_BYTES - 1, 0.5)
    assert cost.rates["to_host"].value == 2 * LEAST_BYTES
    assert cost.rates["to_device"].value == START["to_device"]
