"""The cycle over two fake sides that refuse whatever a real side would."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memsaver import StateError
from tests.helpers.effort import rounds
from trainer_bridge import ActorDied, Cycle, CycleError
from trainer_bridge.cycle import POISONING, TRANSITIONS
from trainer_bridge.session import SyncReceipt

TO_ROLLOUT = ["park_optim", "wake_weights", "sync_weights", "park_params", "wake_kv_cache"]
TO_TRAIN = ["sleep", "restore_params", "restore_optim"]


class World:
    """What both sides hold, and a memory that is too small for all of it at once."""

    def __init__(self, *more: str) -> None:
        self.held = {"params", "optim", *more}
        self.version: int | None = None
        self.reason: str | None = "asleep"
        self.fail_at: str | None = None
        self.error: BaseException = ActorDied("trainer", "sync_weights", "died")
        self.roomy = False

    def at(self, call: str) -> None:
        if call == self.fail_at:
            raise self.error

    def take(self, tag: str) -> None:
        self.held.add(tag)
        if self.roomy:
            return
        assert not {"optim", "weights"} <= self.held, "optimizer and rollout weights at once do not fit"
        assert not {"params", "kv_cache"} <= self.held, "parameters and KV cache at once do not fit"
        assert "reference" not in self.held or not self.held & {"params", "critic"}, "two models at once do not fit"


class FakeTrainer:
    def __init__(self, world: World) -> None:
        self.world = world

    def empty_cache(self) -> None:
        self.world.at("empty_cache")

    def park(self, *tags: str) -> None:
        (tag,) = tags
        self.world.at(f"park_{tag}")
        if tag == "params" and "weights" in self.world.held:
            assert self.world.version is not None, "parameters given up before the rollout confirmed"
        self.world.held.remove(tag)

    def restore(self, *tags: str) -> None:
        (tag,) = tags
        self.world.at(f"restore_{tag}")
        self.world.take(tag)

    def sync_weights(self, version: int) -> SyncReceipt:
        assert {"params", "weights"} <= self.world.held
        self.world.version, self.world.reason = None, "update not committed"
        return self._served(version)

    def share_weights(self, version: int) -> SyncReceipt:
        assert "params" in self.world.held and "weights" not in self.world.held
        self.world.version, self.world.reason = None, "pages not adopted"
        return self._served(version)

    def _served(self, version: int) -> SyncReceipt:
        self.world.at("sync_weights")
        self.world.version, self.world.reason = version, None
        zero = dict.fromkeys(("nbytes", "link_bytes", "seconds", "copy_seconds", "verify_seconds"), 0)
        return SyncReceipt(version=version, digests=(1,), stages={}, **zero)


class FakeRollout:
    def __init__(self, world: World) -> None:
        self.world = world

    def sleep(self, level: int, tags: Any) -> None:
        self.world.at("sleep")
        self.world.held -= set(tags)
        if "weights" in tags:
            self.world.version, self.world.reason = None, f"asleep at level {level}"

    def wake_up(self, tags: Any) -> None:
        self.world.at(f"wake_{tags[0]}")
        for tag in tags:
            self.world.take(tag)

    def abort_update(self, reason: str) -> None:
        self.world.at("abort_update")
        self.world.version, self.world.reason = None, reason


def pair(world: World, seen: list[str] | None = None, **options: Any) -> Cycle:
    """seen: gets the names of the stages."""
    if seen is not None:
        options["on_stage"] = lambda name, start, end: seen.append(name)
    return Cycle(FakeTrainer(world), FakeRollout(world), **options)


def test_one_round_in_stages() -> None:
    world, seen = World(), list[tuple[str, float, float]]()
    cycle = pair(world, on_stage=lambda *stage: seen.append(stage))
    receipt = cycle.to_rollout(7)
    assert (receipt.version, world.version, world.reason) == (7, 7, None)
    assert world.held == {"weights", "kv_cache", "cuda_graph"}
    cycle.to_train()
    assert world.held == {"params", "optim"}
    assert [name for name, _, _ in seen] == TO_ROLLOUT + TO_TRAIN
    times = [time for _, start, end in seen for time in (start, end)]
    assert times == sorted(times)


def test_scoring_needs_no_optimizer_and_the_sleep_level_is_passed_on() -> None:
    world = World()
    cycle = pair(world, sleep_level=1)
    cycle.to_rollout(1)
    cycle.to_score()
    assert world.held == {"params"} and world.reason == "asleep at level 1"
    cycle.to_train()
    assert world.held == {"params", "optim"}


TRAINED = ("params", "optim", "critic", "critic_optim")


def test_models_score_one_at_a_time() -> None:
    world, seen = World("critic", "critic_optim"), list[str]()
    cycle = pair(world, seen, critic=True, reference=True)
    for version in (1, 2):
        cycle.to_rollout(version)
        assert world.held == {"weights", "kv_cache", "cuda_graph"}
        for model in ("reference", "critic", "params", "params"):
            cycle.to_score(model)
            assert world.held == {model} and cycle.state == "score"
        cycle.to_train()
        assert world.held == set(TRAINED)
    room = ["park_optim", "park_critic", "park_critic_optim"]
    scored = ["sleep", "restore_reference", "park_reference", "restore_critic", "park_critic", "restore_params"]
    back = ["restore_optim", "restore_critic", "restore_critic_optim"]
    assert seen == [*room, *TO_ROLLOUT[1:], *scored, *back] * 2


def test_the_reference_alone_changes_places_with_the_policy() -> None:
    world, seen = World(), list[str]()
    cycle = pair(world, seen, reference=True)
    cycle.to_rollout(1)
    cycle.to_score()
    cycle.to_score("reference")
    assert world.held == {"reference"}
    cycle.to_train()
    assert world.held == {"params", "optim"}
    assert seen[5:] == [
        "sleep", "restore_params", "park_params", "restore_reference", "park_reference", "restore_params",
        "restore_optim",
    ]  # fmt: skip


def test_scoring_models_that_are_kept_come_once_and_stay() -> None:
    world, seen = World("critic", "critic_optim"), list[str]()
    world.roomy = True
    keep = ("reference", "critic", "params")
    cycle = pair(world, seen, critic=True, reference=True, keep=keep)
    for version in (1, 2):
        cycle.to_rollout(version)
        assert world.held - {"reference"} == {"weights", "kv_cache", "cuda_graph", "critic", "params"}
        for model in ("reference", "critic", "params"):
            cycle.to_score(model)
            assert world.held == {"reference", "critic", "params"}
        cycle.to_train()
        assert world.held == {"reference", *TRAINED}
    assert seen.count("restore_reference") == 1 and not {"park_critic", "park_params"} & set(seen)


@pytest.mark.parametrize(("has", "model"), [({}, "critic"), ({"critic": True}, "reference"), ({}, "optim")])
def test_a_model_that_is_not_there_cannot_score(has: dict[str, bool], model: str) -> None:
    cycle = pair(World("critic", "critic_optim"), **has)
    cycle.to_rollout(1)
    with pytest.raises(ValueError, match=rf"to_score\('{model}'\): no such model here; known: params"):
        cycle.to_score(model)
    cycle.to_score()


@pytest.mark.parametrize(
    ("keep", "stages"),
    [
        (("params", "optim"), ["empty_cache", *TO_ROLLOUT[1:3], TO_ROLLOUT[4], "sleep"]),
        (("params",), [*TO_ROLLOUT[:3], TO_ROLLOUT[4], "sleep", "restore_optim"]),
        (("kv_cache", "cuda_graph"), TO_ROLLOUT + TO_TRAIN),
        (("params", "optim", "weights", "kv_cache", "cuda_graph"), [*TO_ROLLOUT[1:3], TO_ROLLOUT[4], "sleep"]),
    ],
)
def test_what_is_kept_never_leaves_the_device(keep: tuple[str, ...], stages: list[str]) -> None:
    world, seen = World(), list[str]()
    world.roomy = True
    cycle = pair(world, seen, keep=keep)
    mine, theirs = {"params", "optim"}, {"weights", "kv_cache", "cuda_graph"}
    for version in (1, 2):
        cycle.to_rollout(version)
        assert world.held == theirs | (mine & set(keep)) and world.version == version
        cycle.to_train()
        assert world.held == mine | (theirs & set(keep))
    assert seen == stages * 2


def test_what_cannot_be_kept_is_refused() -> None:
    known = "params, optim, critic, critic_optim, reference, weights"
    with pytest.raises(ValueError, match=rf"keep names unknown tags \['kv'\]; known: {known}"):
        pair(World(), keep=["kv", "params"])
    with pytest.raises(ValueError, match="keep names 'weights', but with alias the trainer gets these pages back"):
        pair(World(), alias=True, keep=["weights"])


@pytest.mark.parametrize("kept", [(), ("optim",), ("params", "kv_cache")])
def test_with_alias_the_parameters_stay_and_the_rollout_has_no_weights_of_its_own(kept: tuple[str, ...]) -> None:
    world, seen = World(), list[str]()
    world.roomy = True
    cycle = pair(world, seen, alias=True, keep=kept)
    for version in (1, 2):
        assert cycle.to_rollout(version).version == version == world.version
        assert world.held == {"params", "kv_cache", "cuda_graph"} | (set(kept) & {"optim"})
        cycle.to_score()
        assert world.held == {"params"} | (set(kept) & {"optim", "kv_cache"}) and world.version is None
        cycle.to_train()
        assert world.held == {"params", "optim"} | (set(kept) & {"kv_cache"})
    stages = ["park_optim", "sync_weights", "wake_kv_cache", "sleep", "restore_optim"]
    assert seen == (["empty_cache", *stages[1:4]] if "optim" in kept else stages) * 2


@pytest.mark.parametrize("stage", ["park_optim", "sync_weights", "wake_kv_cache", "sleep", "restore_optim"])
def test_with_alias_a_failure_in_any_stage_ends_the_cycle(stage: str) -> None:
    world = World()
    world.roomy = True
    cycle = pair(world, alias=True)
    world.fail_at = stage
    with pytest.raises(CycleError, match=f"stage '{stage}' failed"):
        cycle.to_rollout(1)
        cycle.to_train()
    assert world.version is None or stage in ("wake_kv_cache", "sleep")
    assert stage != "sync_weights" or (world.reason is not None and "sync_weights" in world.reason)
    with pytest.raises(StateError, match="legal now: nothing"):
        cycle.to_rollout(2)


VERBS = ("to_rollout", "to_score", "to_train")
ILLEGAL = [(state, verb) for state, legal in TRANSITIONS.items() for verb in VERBS if verb not in legal]


def test_illegal_transitions_name_the_state_and_what_is_legal() -> None:
    for state, verb in ILLEGAL:
        cycle = pair(World())
        cycle.state = state
        arguments = (1,) if verb == "to_rollout" else ()
        legal = ", ".join(TRANSITIONS[state]) or "nothing"
        with pytest.raises(StateError, match=rf"{verb}\(\) in state '{state}': legal now: {legal}"):
            getattr(cycle, verb)(*arguments)
        assert cycle.state == state


@pytest.mark.parametrize("stage", TO_ROLLOUT + TO_TRAIN)
def test_a_failure_in_any_stage_ends_the_cycle_and_never_serves_undefined_weights(stage: str) -> None:
    world, seen = World(), list[str]()
    cycle = pair(world, seen)
    world.fail_at = stage
    with pytest.raises(CycleError) as caught:
        cycle.to_rollout(1)
        cycle.to_train()
    assert caught.value.stage == stage
    assert caught.value.cause is world.error
    assert repr(stage) in str(caught.value) and "trainer actor died" in str(caught.value)
    assert stage not in seen
    serving = {"weights", "kv_cache"} <= world.held and world.version is not None
    assert not serving or stage == "sleep", "only a rollout that could not be put to sleep still serves"
    if stage in POISONING:
        assert world.reason == str(caught.value)
    with pytest.raises(StateError, match=rf"legal now: nothing \(stage '{stage}' failed"):
        cycle.to_rollout(2)


def test_a_rollout_that_cannot_be_told_does_not_hide_the_first_failure() -> None:
    class Deaf(FakeRollout):
        def abort_update(self, reason: str) -> None:
            raise ActorDied("rollout", "abort_update", "died")

    world = World()
    world.fail_at = "sync_weights"
    world.error = ValueError("digests differ")
    cycle = Cycle(FakeTrainer(world), Deaf(world))
    with pytest.raises(CycleError, match="sync_weights.*digests differ") as caught:
        cycle.to_rollout(1)
    assert "the rollout could not be told" in caught.value.__notes__[0]


def test_an_interrupt_poisons_and_stays_an_interrupt() -> None:
    world = World()
    world.fail_at, world.error = "sync_weights", KeyboardInterrupt()
    cycle = pair(world)
    with pytest.raises(KeyboardInterrupt):
        cycle.to_rollout(1)
    assert cycle.state == "failed"
    assert world.reason is not None and "sync_weights" in world.reason


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(CycleError("sync_weights", ActorDied("trainer", "sync_weights", "died"))))
    assert str(error) == "stage 'sync_weights' failed: ActorDied: the trainer actor died in sync_weights()"
    assert error.cause.actor == "trainer"


class Walk(RuleBasedStateMachine):
    """Any order of calls: what is held agrees with the state, and the versions with what was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.start()

    def start(self) -> None:
        self.world = World("critic", "critic_optim")
        self.cycle = pair(self.world, critic=True, reference=True)
        self.model = ""

    @rule(verb=st.sampled_from(VERBS), model=st.sampled_from(["params", "reference", "critic"]))
    def move(self, verb: str, model: str) -> None:
        legal = TRANSITIONS[self.cycle.state]
        arguments: tuple[Any, ...] = {"to_rollout": (self.version + 1,), "to_score": (model,)}.get(verb, ())
        if verb not in legal:
            with pytest.raises(StateError):
                getattr(self.cycle, verb)(*arguments)
            return
        self.version += verb == "to_rollout"
        self.model = model
        getattr(self.cycle, verb)(*arguments)
        assert self.cycle.state == legal[verb]

    @rule(stage=st.sampled_from([*TO_ROLLOUT, *TO_TRAIN, "restore_critic", "park_critic_optim", "park_reference"]))
    def break_next(self, stage: str) -> None:
        """Arm a failure, go round until it strikes, and start over as a new run would."""
        self.world.fail_at = stage
        with pytest.raises(CycleError, match=stage):
            for _ in range(2):
                if self.cycle.state == "train":
                    self.cycle.to_rollout(self.version + 1)
                self.cycle.to_score("reference")
                self.cycle.to_train()
        assert self.cycle.state == "failed"
        self.start()

    @invariant()
    def holds_what_the_state_says(self) -> None:
        held = {"train": set(TRAINED), "rollout": {"weights", "kv_cache", "cuda_graph"}, "score": {self.model}}
        assert self.world.held == held[self.cycle.state]
        assert (self.world.version == self.version) == (self.cycle.state == "rollout")


Walk.TestCase.settings = settings(max_examples=rounds(40, 3000), stateful_step_count=20)
TestWalk = pytest.mark.soak(Walk.TestCase)
