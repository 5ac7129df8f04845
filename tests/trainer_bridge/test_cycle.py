"""The cycle with two fake sides, which refuse the calls that real sides would refuse."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from memsaver import StateError
from tests.helpers.case_selection import rounds
from trainer_bridge import ActorDied, Cycle, CycleError
from trainer_bridge.cycle import POISONING, TRANSITIONS
from trainer_bridge.offload import Wait
from trainer_bridge.sync.weight_sync import SyncReceipt

TO_ROLLOUT = ["offload_optim", "wake_weights", "sync_weights", "offload_params", "wake_kv_cache"]
TO_TRAIN = ["sleep", "reload_params", "reload_optim"]
ALIAS = ["offload_optim", "sync_weights", "wake_kv_cache", "sleep", "reload_optim"]
TRAINED = ("params", "optim", "critic", "critic_optim")
THEIRS = {"weights", "kv_cache", "cuda_graph"}


class World:
    """The tags that both sides hold, in a memory that is too small for all of them together."""

    def __init__(self, critic: bool = False, roomy: bool = False) -> None:
        self.held = set(TRAINED if critic else TRAINED[:2])
        self.version: int | None = None
        self.reason: str | None = "asleep"
        self.fail_at: set[str] = set()
        self.error: BaseException = ActorDied("trainer", "sync_weights", "died")
        self.roomy = roomy
        self.overlapped = set[str]()  # tags reloaded with wait=False
        self.ahead = set[str]()  # tags reloaded with wait="memory"
        self.partly = False
        self.prepared = 0  # calls of the rollout's prepare_sleep
        self.into: list[str] = []  # "giver: receiving tag" of each handover

    def at(self, call: str) -> None:
        if call in self.fail_at:
            raise self.error

    def note(self, giver: str, into: str) -> None:
        if into:
            self.into.append(f"{giver}: {into}")

    def take(self, tag: str) -> None:
        self.held.add(tag)
        if self.roomy:
            return
        assert not {"optim", "weights"} <= self.held, (
            "optimizer and rollout weights do not fit together"
        )
        assert not {"params", "kv_cache"} <= self.held, (
            "parameters and KV cache do not fit together"
        )
        scoring = not {"params", "optim"} <= self.held
        assert (
            not scoring or "reference" not in self.held or not self.held & {"params", "critic"}
        ), "only training has room for two models"


class FakeTrainer:
    def __init__(self, world: World) -> None:
        self.world = world

    def empty_cache(self) -> None:
        self.world.at("empty_cache")

    def offload(self, *tags: str, wait: bool = True, into: str = "") -> None:
        assert len(tags) == 1 or not wait
        self.world.note(tags[0], into)
        for tag in tags:
            self.world.at(f"offload_{tag}")
            if tag == "params" and "weights" in self.world.held:
                assert self.world.version is not None, (
                    "parameters offloaded before the rollout committed"
                )
            self.world.held.remove(tag)

    def reload(self, *tags: str, wait: Wait = True) -> None:
        self.world.overlapped |= set() if wait else set(tags)
        self.world.ahead |= set(tags) if wait == "memory" else set()
        for tag in tags if wait else ():
            self.world.at(f"reload_{tag}")
            self.world.take(tag)

    def sync_weights(self, version: int) -> SyncReceipt:
        assert {"params", "weights"} <= self.world.held
        self.world.version, self.world.reason = None, "update not committed"
        return self._served(version)

    def alias_weights(self, version: int) -> SyncReceipt:
        assert "params" in self.world.held and "weights" not in self.world.held
        self.world.version, self.world.reason = None, "pages not aliased"
        return self._served(version)

    def _served(self, version: int) -> SyncReceipt:
        self.world.at("sync_weights")
        self.world.version, self.world.reason = version, None
        zero = dict.fromkeys(
            ("nbytes", "link_bytes", "node_bytes", "seconds", "copy_seconds", "verify_seconds"), 0
        )
        return SyncReceipt(version=version, digests=(1,), stages={}, **zero)


class FakeRollout:
    def __init__(self, world: World) -> None:
        self.world = world

    def sleep(self, level: int, tags: Any, into: str = "") -> None:
        self.world.at("sleep")
        self.world.note("rollout", into)
        self.world.held -= set(tags)
        if "weights" in tags:
            self.world.version, self.world.reason = None, f"asleep at level {level}"

    def wake_up(self, tags: Any, partly: bool = False) -> None:
        self.world.partly = partly
        self.world.at(f"wake_{tags[0]}")
        for tag in tags:
            self.world.take(tag)

    def shrink(self) -> None:
        self.world.at("shrink")

    def prepare_sleep(self) -> None:
        self.world.prepared += 1

    def abort_update(self, reason: str) -> None:
        self.world.at("abort_update")
        self.world.version, self.world.reason = None, reason


def pair(world: World, stages: list[str] | None = None, **options: Any) -> Cycle:
    """Build a cycle of fake sides; the names of its stages are appended to `stages`."""
    if stages is not None:
        options["on_stage"] = lambda name, start, end: stages.append(name)
    return Cycle(FakeTrainer(world), FakeRollout(world), **options)


def test_stages_are_timed_and_sleep_level_reaches_the_rollout() -> None:
    world, timed = World(), list[tuple[str, float, float]]()
    cycle = pair(world, on_stage=lambda *stage: timed.append(stage), sleep_level=1)
    assert cycle.to_rollout(7).version == world.version == 7
    cycle.to_train()
    assert world.reason == "asleep at level 1"
    assert [name for name, _, _ in timed] == TO_ROLLOUT + TO_TRAIN
    assert world.prepared == 1
    for options in ({"resident": ["weights"]}, {"alias": True}, {"sleep_level": 2}):
        pair(world, **{"sleep_level": 1, **options})
    assert world.prepared == 1, "prepared for weights that are not kept in host memory"
    times = [time for _, start, end in timed for time in (start, end)]
    assert times == sorted(times)


MODELS, ALIASED = {"critic": True, "reference": True}, {"alias": True}
# Stages from the sync to the sleep: by copies, aliased, and with resident params.
COPIED_STAGES = "wake_weights sync_weights offload_params wake_kv_cache sleep"
ALIASED_STAGES = "sync_weights wake_kv_cache sleep"
RESIDENT_STAGES = "wake_weights sync_weights wake_kv_cache sleep"
ROUNDS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "params", f"offload_optim {COPIED_STAGES} reload_params reload_optim"),
    (
        MODELS,
        "reference critic params params",
        f"offload_optim offload_critic offload_critic_optim {COPIED_STAGES} reload_reference "
        "offload_reference "
        "reload_critic offload_critic reload_params reload_optim reload_critic "
        "reload_critic_optim",
    ),
    (
        {"reference": True},
        "params reference",
        f"offload_optim {COPIED_STAGES} reload_params offload_params reload_reference "
        "offload_reference reload_params reload_optim",
    ),
    (
        {**MODELS, "resident": ("reference", "critic", "params")},
        "reference critic params",
        f"offload_optim offload_critic_optim {RESIDENT_STAGES} reload_reference reload_optim "
        "reload_critic_optim",
    ),
    ({"resident": ("params", "optim")}, "", f"empty_cache {RESIDENT_STAGES}"),
    ({"resident": ("params",)}, "", f"offload_optim {RESIDENT_STAGES} reload_optim"),
    (
        {"resident": ("kv_cache", "cuda_graph")},
        "params",
        f"offload_optim {COPIED_STAGES} reload_params reload_optim",
    ),
    ({"resident": ("params", "optim", *THEIRS)}, "", RESIDENT_STAGES),
    (ALIASED, "params", f"offload_optim {ALIASED_STAGES} reload_optim"),
    ({**ALIASED, "resident": ("optim",)}, "params", f"empty_cache {ALIASED_STAGES}"),
    (
        {**ALIASED, "resident": ("params", "kv_cache")},
        "params",
        f"offload_optim {ALIASED_STAGES} reload_optim",
    ),
]


@pytest.mark.parametrize(("options", "models", "stages"), ROUNDS)
def test_round_runs_expected_stages_and_each_state_holds_its_tags(
    options: dict[str, Any], models: str, stages: str
) -> None:
    """Expect that resident tags never leave, and that models score one at a time."""
    alias, resident = options.get("alias", False), set(options.get("resident", ()))
    world, names = World(options.get("critic", False), roomy=alias or bool(resident)), list[str]()
    trained, served = frozenset(world.held), THEIRS - ({"weights"} if alias else set())
    cycle = pair(world, names, **options)
    kept = resident | ({"params"} if alias else set())
    for version in (1, 2):
        begun = len(names)
        assert cycle.to_rollout(version).version == version == world.version
        assert world.held | kept == served | kept and world.held >= kept & trained
        for model in models.split():
            cycle.to_score(model)
            assert world.held | kept == {model} | kept
            assert world.held >= kept & trained and cycle.state == "score"
        cycle.to_train()
        assert world.held == trained | kept
        assert names[begun:] == [
            s for s in stages.split() if version == 1 or s.removeprefix("reload_") not in kept
        ]


@pytest.mark.parametrize(
    ("options", "into"),
    [
        ({}, "optim: weights, params: kv_cache, rollout: params"),
        (MODELS, "critic_optim: weights, params: kv_cache, rollout: params"),
        (ALIASED, "optim: kv_cache"),
        ({"resident": ("params", "optim")}, ""),
        ({"resident": ("kv_cache", "cuda_graph")}, "optim: weights, rollout: params"),
        ({"overlap": ("optim",)}, ""),
        ({"hand_over": False}, ""),
    ],
)
def test_hand_over_sends_leaving_tag_to_the_next_tag_of_the_other_side(
    options: dict[str, Any], into: str
) -> None:
    """Expect a single receiver for each tag, and none if no tag waits for memory."""
    world = World(options.get("critic", False), roomy=True)
    cycle = pair(world, **{"hand_over": True, **options})
    for version in (1, 2):
        world.into = []
        cycle.to_rollout(version)
        cycle.to_score()
        cycle.to_train()
        assert ", ".join(world.into) == into


@pytest.mark.parametrize(
    ("options", "stages"),
    [
        ({"reference": True}, ["empty_cache", "reload_reference", "block", "offload_reference"]),
        (
            {"reference": True, "resident": ["reference"]},
            ["empty_cache", "reload_reference", "block", "block"],
        ),
    ],
)
def test_reference_is_held_for_a_block_and_a_resident_one_stays(
    options: dict[str, Any], stages: list[str]
) -> None:
    world, names = World(), list[str]()
    cycle = pair(world, names, **options)
    for _ in range(stages.count("block")):
        with cycle.with_reference():
            names.append("block")
            assert world.held == {"params", "optim", "reference"}
    assert names == stages
    with (
        pytest.raises(ValueError, match="no reference here; build the cycle with one"),
        pair(World()).with_reference(),
    ):
        pass


@pytest.mark.parametrize(
    ("has", "model"), [({}, "critic"), ({"critic": True}, "reference"), ({}, "optim")]
)
def test_to_score_refuses_a_model_the_cycle_does_not_have(has: dict[str, bool], model: str) -> None:
    cycle = pair(World(critic=True), **has)
    cycle.to_rollout(1)
    with pytest.raises(
        ValueError, match=rf"to_score\('{model}'\): no such model here; known: params"
    ):
        cycle.to_score(model)
    cycle.to_score()


@pytest.mark.parametrize(
    ("options", "leave", "comes"),
    [
        ({"overlap": ("params", "optim")}, "wake_kv_cache begin_offload", {"optim"}),
        ({"overlap": ("optim",)}, "offload_params wake_kv_cache begin_offload", {"optim"}),
        ({"overlap": ("params",), "resident": ("optim",)}, "wake_kv_cache begin_offload", set()),
        ({"overlap": ("params", "optim"), "resident": ("params", "optim")}, "wake_kv_cache", set()),
        (
            {"overlap": ("optim", "critic_optim"), "critic": True},
            "offload_params wake_kv_cache begin_offload",
            set(),
        ),
    ],
)
def test_overlapped_tags_leave_after_kv_cache_wakes_and_return_while_scoring(
    options: dict[str, Any], leave: str, comes: set[str]
) -> None:
    """Expect no stage that copies between the sync and the first answers."""
    world, names = World(options.get("critic", False), roomy=True), list[str]()
    trained = frozenset(world.held)
    cycle = pair(world, names, **options)
    cycle.to_rollout(1)
    stages = [s for s in names if "critic" not in s and s != "empty_cache"]
    assert stages == f"wake_weights sync_weights {leave}".split()
    assert world.held == THEIRS | set(options.get("resident", ()))
    assert world.partly == ("begin_offload" in leave)
    cycle.to_score()
    assert world.overlapped == comes
    cycle.to_train()
    assert world.held >= trained
    assert world.ahead == {*options["overlap"]}.difference(options.get("resident", ()))


def test_prefetch_reloads_params_only_if_they_overlap() -> None:
    world, stages = World(roomy=True), list[str]()
    cycle = pair(world, stages, overlap=("params", "optim"))
    with pytest.raises(StateError, match=r"prefetch\(\) in state 'train'"):
        cycle.prefetch()
    cycle.to_rollout(1)
    cycle.prefetch()
    assert world.overlapped == {"params"} and stages[-1] == "prefetch"
    cycle.to_score()
    assert "params" in world.held  # even if the prefetch brought nothing
    cycle = pair(world := World(roomy=True), stages, overlap=("optim",))
    cycle.to_rollout(1)
    cycle.prefetch()
    assert world.overlapped == set()


def test_overlap_refuses_tags_that_are_not_trained() -> None:
    with pytest.raises(ValueError, match=r"overlap names \['reference'\], but only params, optim"):
        pair(World(), overlap=["reference", "optim"], reference=True)


def test_resident_refuses_unknown_tags() -> None:
    known = "params, optim, critic, critic_optim, reference, weights"
    with pytest.raises(ValueError, match=rf"resident names unknown tags \['kv'\]; known: {known}"):
        pair(World(), resident=["kv", "params"])
    with pytest.raises(ValueError, match="in_flight='keep' needs a rollout that never sleeps"):
        pair(World(), in_flight="keep", resident=["weights"])


VERBS = ("to_rollout", "to_score", "to_train")


@pytest.mark.parametrize(
    ("alias", "stage"),
    [*((False, stage) for stage in TO_ROLLOUT + TO_TRAIN), *((True, stage) for stage in ALIAS)],
)
def test_failed_stage_ends_cycle_and_never_serves_undefined_weights(
    alias: bool, stage: str
) -> None:
    world, stages = World(roomy=alias), list[str]()
    cycle = pair(world, stages, alias=alias)
    world.fail_at = {stage}
    with pytest.raises(CycleError) as caught:
        cycle.to_rollout(1)
        cycle.to_train()
    assert caught.value.stage == stage
    assert caught.value.cause is world.error
    assert repr(stage) in str(caught.value) and "trainer actor died" in str(caught.value)
    assert stage not in stages
    awake = "kv_cache" in world.held and (alias or "weights" in world.held)
    serving = awake and world.version is not None
    assert not serving or stage == "sleep", (
        "only a rollout that could not be put to sleep still serves"
    )
    if stage in POISONING:
        assert world.reason == str(caught.value)
    with pytest.raises(StateError, match=rf"legal now: nothing \(stage '{stage}' failed"):
        cycle.to_rollout(2)


def test_failed_poisoning_does_not_hide_the_first_failure() -> None:
    world = World()
    world.fail_at, world.error = {"sync_weights", "abort_update"}, ValueError("digests differ")
    with pytest.raises(CycleError, match="sync_weights.*digests differ") as caught:
        pair(world).to_rollout(1)
    assert "could not poison the rollout" in caught.value.__notes__[0]


def test_interrupt_poisons_rollout_and_is_raised_unwrapped() -> None:
    world = World()
    world.fail_at, world.error = {"sync_weights"}, KeyboardInterrupt()
    cycle = pair(world)
    with pytest.raises(KeyboardInterrupt):
        cycle.to_rollout(1)
    assert cycle.state == "failed"
    assert world.reason is not None and "sync_weights" in world.reason


class Walk(RuleBasedStateMachine):
    """Calls in any order: held tags must match the state, and versions the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 0
        self.start()

    def start(self) -> None:
        self.world = World(critic=True)
        self.cycle = pair(self.world, critic=True, reference=True)
        self.model = ""

    @rule(verb=st.sampled_from(VERBS), model=st.sampled_from(["params", "reference", "critic"]))
    def move(self, verb: str, model: str) -> None:
        legal = TRANSITIONS[self.cycle.state]
        arguments: tuple[Any, ...] = {"to_rollout": (self.version + 1,), "to_score": (model,)}.get(
            verb, ()
        )
        if verb not in legal:
            text = rf"{verb}\(\) in state '{self.cycle.state}': legal now: {', '.join(legal)}$"
            with pytest.raises(StateError, match=text):
                getattr(self.cycle, verb)(*arguments)
            return
        self.version += verb == "to_rollout"
        self.model = model
        getattr(self.cycle, verb)(*arguments)
        assert self.cycle.state == legal[verb]

    @rule(fails=st.booleans())
    def hold_reference(self, fails: bool) -> None:
        """Let the block fail: the next move offloads the reference."""
        if self.cycle.state != "train":
            text = f"in state '{self.cycle.state}': it is for state \"train\""
            with pytest.raises(StateError, match=text), self.cycle.with_reference():
                pass
            return
        with contextlib.suppress(OSError), self.cycle.with_reference():
            assert self.world.held == {*TRAINED, "reference"}
            if fails:
                raise OSError("no space left on device")
        if fails:
            assert self.world.held == {*TRAINED, "reference"}
            self.move("to_rollout", "")

    @rule(
        stage=st.sampled_from(
            [*TO_ROLLOUT, *TO_TRAIN, "reload_critic", "offload_critic_optim", "offload_reference"]
        )
    )
    def break_next(self, stage: str) -> None:
        """Repeat the cycle until an injected failure occurs, and start over like a new run."""
        self.world.fail_at = {stage}
        with pytest.raises(CycleError, match=stage):
            for _ in range(2):
                if self.cycle.state == "train":
                    self.cycle.to_rollout(self.version + 1)
                self.cycle.to_score("reference")
                self.cycle.to_train()
        assert self.cycle.state == "failed"
        self.start()

    @invariant()
    def held_tags_match_the_state(self) -> None:
        held = {"train": set(TRAINED), "rollout": THEIRS, "score": {self.model}}
        assert self.world.held == held[self.cycle.state]
        assert (self.world.version == self.version) == (self.cycle.state == "rollout")


Walk.TestCase.settings = settings(max_examples=rounds(40, 3000), stateful_step_count=20)
TestWalk = pytest.mark.soak(Walk.TestCase)
