"""Random walks over updates, sleeps and loads, compared with a model of the engine's states.

The engine answers as the model predicts, or refuses with a reason.
"""

import copy
from dataclasses import dataclass, replace
from functools import lru_cache

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memsaver import StateError
from rollout import Engine, SamplingParams, WeightUpdateError
from rollout.tag_names import WEIGHTS
from rollout.weights import WeightOffer, WriteReceipt
from tests.helpers.case_selection import rounds
from tests.helpers.models import greedy
from tests.helpers.rollout.updates import Owner, addresses, checkpoint, shadow_bytes, tiny, write

PROMPT = [5, 3, 8, 1] * 5  # longer than a page, so that the prefix cache is used
NAMES = ("model.norm.weight", "model.layers.0.mlp.up_proj.weight")
FIELDS = {"digest": 1, "version": 10**6, "layout_hash": "other", "nbytes": 5}
SEEDS = st.integers(1, 3)


@dataclass(frozen=True)
class Content:
    """Seeds of the random models that provide NAMES and the rest; seed 0 is the checkpoint."""

    named: int
    rest: int


@lru_cache
def expected(content: Content) -> list[int]:
    model = copy.deepcopy(tiny(content.rest))
    for name in NAMES:
        model.get_parameter(name).data.copy_(tiny(content.named).get_parameter(name))
    return greedy(model, PROMPT, 3)


@dataclass(frozen=True)
class OpenUpdate:
    """The model of an open update.

    Attributes:
        offer: The engine's offer.
        base: Content of the weights when the update began.
        written: Content of the offered pages; None before the verification.
        receipt: The verified receipt; None before the verification.
    """

    offer: WeightOffer
    base: Content | None
    written: Content | None = None
    receipt: WriteReceipt | None = None


class UpdateMachine(RuleBasedStateMachine):
    """An engine, and a model of its states that predicts its answers.

    Attributes:
        content: Content that is served; None while it is undefined.
        update: The open update; None if there is none.
        spared: Whether an abort without an open update does not poison the engine.
        aliased: Whether the weights lie in the owner's pages.
    """

    @initialize()
    def build(self) -> None:
        self.engine = Engine.from_pretrained(checkpoint(), kv_tokens=64)
        self.pointers = addresses(self.engine)
        self.size = self.engine.report().tags[WEIGHTS].committed_bytes
        self.content: Content | None = Content(0, 0)
        self.version = 0
        self.asleep = self.spared = self.aliased = False
        self.owner = Owner(self.engine)
        self.update: OpenUpdate | None = None

    def active(self) -> bool:
        return not self.asleep

    @rule(
        older=st.sampled_from([0, 0, 0, 0, 1]),
        more=st.integers(0, 2),
        shadow=st.booleans(),
        some=st.booleans(),
    )
    def begin(self, older: int, more: int, shadow: bool, some: bool) -> None:
        version = self.version - 1 if older else self.version + more
        names = NAMES if some else None
        refused = self.asleep or self.aliased or older or (some and self.content is None)
        if self.update is None:
            self.spared = shadow
        if refused:
            with pytest.raises(
                StateError if self.asleep or self.aliased or not older else ValueError
            ):
                self.engine.begin_update(version, shadow=shadow, names=names)
            return
        offer = self.engine.begin_update(version, shadow=shadow, names=names)
        assert (offer.version, offer.shadow, offer.names) == (version, shadow, names)
        self.update = OpenUpdate(offer, self.content)
        if not shadow:
            self.content = None

    @precondition(active)
    @rule(seed=SEEDS, shadow=st.booleans(), some=st.booleans(), commit=st.booleans())
    def begin_and_write(self, seed: int, shadow: bool, some: bool, commit: bool) -> None:
        """Combine the steps of an update, so that walks reach more states."""
        self.begin(0, 1, shadow, some)
        if self.update is not None:
            self.write_and_verify(seed, None)
            if commit:
                self.commit(False)

    @precondition(lambda self: self.update is not None and self.active())
    @rule(seed=SEEDS, wrong=st.sampled_from([None, None, None, *FIELDS]))
    def write_and_verify(self, seed: int, wrong: str | None) -> None:
        assert self.update is not None
        if self.update.receipt is not None:
            with pytest.raises(WeightUpdateError, match="verified already"):
                self.engine.verify_update(self.update.receipt)
            return
        receipt = write(self.update.offer, seed, **({wrong: FIELDS[wrong]} if wrong else {}))
        if wrong:
            with pytest.raises(WeightUpdateError, match=wrong):
                self.engine.verify_update(receipt)
            self.close()
            return
        assert self.engine.verify_update(receipt).digest == receipt.digest
        base = self.update.base
        new = Content(seed, seed) if self.update.offer.names is None else Content(seed, base.rest)  # type: ignore[union-attr]
        self.update = replace(self.update, written=new, receipt=receipt)

    @precondition(active)
    @rule(other=st.booleans())
    def commit(self, other: bool) -> None:
        version = self.update.offer.version + other if self.update is not None else 0
        if self.update is None or self.update.receipt is None or other:
            with pytest.raises(WeightUpdateError):
                self.engine.commit_update(version)
            return
        assert self.engine.commit_update(version).version == version
        self.content, self.version = self.update.written, version
        self.update, self.spared = None, False

    @rule(
        older=st.sampled_from([0, 0, 0, 1]),
        seed=SEEDS,
        claim=st.sampled_from([None, "right", "wrong"]),
    )
    def alias(self, older: int, seed: int, claim: str | None) -> None:
        layout = self.engine.manifest.layout_hash
        if older:
            with pytest.raises(ValueError, match="older"):
                self.engine.alias_update(self.version - 1, self.owner.ticket(), layout)
            return
        digest = self.owner.fill(seed)
        self.update, self.spared, self.aliased = None, False, claim != "wrong"
        if claim == "wrong":
            with pytest.raises(WeightUpdateError, match="digest"):
                self.engine.alias_update(self.version + 1, self.owner.ticket(), layout, digest ^ 1)
            self.content = None
        else:
            self.version += 1
            self.engine.alias_update(
                self.version, self.owner.ticket(), layout, digest if claim else None
            )
            self.content = Content(seed, seed)
        self.engine.wake_up()
        self.asleep = False

    @rule()
    def abort(self) -> None:
        self.engine.abort_update("aborted")
        if self.update is not None or not self.spared:
            self.close()
        if not self.asleep:
            self.engine.wake_up()  # maps its own memory after aliased pages went back

    @precondition(active)
    @rule(level=st.sampled_from([1, 1, 2]))
    def sleep(self, level: int) -> None:
        self.engine.sleep(level)
        self.asleep = True
        if self.update is not None:
            self.close()
        if level == 2 or self.aliased:
            self.content, self.spared, self.aliased = None, False, False

    @rule()
    def wake_up(self) -> None:
        self.engine.wake_up()
        self.asleep = False

    @precondition(active)
    @rule()
    def load(self) -> None:
        if self.aliased:
            with pytest.raises(StateError, match="the weights lie in the trainer's pages"):
                self.engine.load(checkpoint())
            return
        self.engine.load(checkpoint())
        if self.update is not None or not self.spared:
            self.close()
        self.content, self.version = Content(0, 0), 0

    def close(self) -> None:
        """End an update without a commit, or poison the engine."""
        self.spared = self.update is not None and self.update.offer.shadow
        if not self.spared:
            self.content, self.aliased = None, False
        self.update = None

    @invariant()
    def engine_answers_or_names_the_reason(self) -> None:
        reason = self.engine.unavailable_reason()
        assert (reason is None) == (self.active() and self.content is not None)
        params = SamplingParams(max_tokens=3, temperature=0)
        if reason is not None:
            with pytest.raises(StateError):
                self.engine.generate([PROMPT], params)
            return
        assert self.content is not None
        [[out]] = self.engine.generate([PROMPT], params)
        assert out.token_ids == expected(self.content)
        assert set(out.weight_versions) == {self.version}

    @invariant()
    def owner_has_a_lease_while_its_pages_are_served(self) -> None:
        assert self.owner.saver.leases("params") == self.aliased
        assert (self.engine.report().tags[WEIGHTS].aliased_bytes > 0) == self.aliased

    @invariant()
    def shadow_pages_have_memory_only_while_needed(self) -> None:
        needed = self.update is not None and self.update.offer.shadow
        assert shadow_bytes(self.engine) == (self.size if needed else 0)
        assert self.engine.weights_version == self.version
        assert addresses(self.engine) == self.pointers
        self.engine.saver.check_integrity()


UpdateMachine.TestCase.settings = settings(max_examples=rounds(10, 300), stateful_step_count=25)


class TestUpdates(UpdateMachine.TestCase):  # type: ignore[misc, name-defined]
    pass
