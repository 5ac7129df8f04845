"""The wake-up cycle: trainer and rollout hand the memory of one device back and forth, stage by
stage.

    train  --to_rollout(version)-->  rollout  --to_score(model)-->  score  --to_train()-->  train
                                        |                           |   ^                     ^
                                        |                           '---' to_score(model)     |
                                        '------------------- to_train() ----------------------'

    state    the trainer holds      the rollout holds              who may work
    train    params, optim,         nothing                        update_actor, update_critic,
             critic, critic_optim                                  compute_log_prob, checkpoints
    rollout  nothing                weights, kv_cache, cuda_graph  generate
    score    one model at a time    nothing                        with params: compute_log_prob,
                                                                   reference: compute_ref_log_prob,
                                                                   critic: compute_values

A trainer has critic and reference only where the cycle is told so. Tags that the caller names in
`resident` stay on the device in every state. Those in `overlap` leave while the rollout generates,
and come back while the policy scores: their copies run beside work. With `alias` the rollout serves
the trainer's own pages: `params` stays, aliased in state "rollout", and tag `weights` never has
memory of its own. Both sides are protocols: the same code drives objects of this process and
handles on Ray actors. A stage that fails ends the cycle; where weights were being replaced, the
rollout is poisoned with the reason and serves nothing.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from memsaver.errors import StateError
from rollout.protocols import Rollout
from rollout.tag_names import CUDA_GRAPH, KV_CACHE, TAGS, WEIGHTS
from trainer_bridge.errors import CycleError
from trainer_bridge.offload import Wait
from trainer_bridge.sync.weight_sync import SyncReceipt
from trainer_bridge.tags import (
    CRITIC,
    CRITIC_OPTIM,
    MODELS,
    PARAMS,
    REFERENCE,
    TRAINED,
    TRAINER_TAGS,
)
from trainer_bridge.training.batch import SequenceBatch


class TrainerProtocol(Protocol):
    """Learns, scores, and gives its memory and its weights away. The contracts are `Trainer`'s.

    `Cycle` asks for the first five methods alone. Of the others, the last three are for recipes
    with a reference or a critic.
    """

    def empty_cache(self) -> None: ...

    def offload(self, *tags: str, wait: bool = True, into: str | None = None) -> None: ...

    def reload(self, *tags: str, wait: Wait = True) -> None: ...

    def sync_weights(self, version: int) -> SyncReceipt: ...

    def alias_weights(self, version: int) -> SyncReceipt: ...

    def compute_log_prob(self, batch: SequenceBatch) -> list[list[float]]: ...

    def update_actor(self, batch: SequenceBatch) -> dict[str, float]: ...

    def compute_ref_log_prob(self, batch: SequenceBatch) -> list[list[float]]: ...

    def compute_values(self, batch: SequenceBatch) -> list[list[float]]: ...

    def update_critic(self, batch: SequenceBatch) -> dict[str, float]: ...


OnStage = Callable[[str, float, float], None]
"""Called after each stage that succeeded with (name, start, end); times as of `time.time()`."""

TRANSITIONS = {
    "train": {"to_rollout": "rollout"},
    "rollout": {"to_score": "score", "to_train": "train"},
    "score": {"to_score": "score", "to_train": "train"},
    "failed": {},
}
RESIDENT_TAGS = (*TRAINER_TAGS, *TAGS)
POISONING = ("sync_weights",)  # the weights may be undefined when it fails


class Cycle:
    """Starts in state "train". `state`: see the table above."""

    def __init__(
        self,
        trainer: TrainerProtocol,
        rollout: Rollout,
        *,
        on_stage: OnStage | None = None,
        sleep_level: int = 2,
        resident: Iterable[str] = (),
        overlap: Iterable[str] = (),
        alias: bool = False,
        hand_over: bool = False,
        critic: bool = False,
        reference: bool = False,
    ) -> None:
        """sleep_level: 2 discards the rollout's weights while it sleeps, 1 keeps them on the host,
        whose memory is obtained from here on (`Rollout.prepare_sleep`).

        resident: tags of either side that stay on the device, where there is room for them; a
        ValueError names an unknown one. overlap: tags that the trainer trains; for a device with
        room for them beside the rollout's weights, and an engine that is `elastic`, whose KV cache
        takes their memory as they leave. They are reloaded with wait="memory": work on them waits
        for what it touches. The optimizer's come back beside `compute_log_prob`, but not with a
        critic, which scores after it. alias: the rollout serves the trainer's pages,
        which it gives back when it sleeps, at any level; the pair is opened with the same.
        hand_over: what leaves goes to what the other side of the device takes next, not to the
        driver, but with `overlap`; for sides that know each other (`hand_over_to`), as those of
        `open_inprocess` and `open_ray` do. critic, reference: what the trainer has beside the
        policy.
        """
        stays = set(resident)
        if unknown := sorted(stays.difference(RESIDENT_TAGS)):
            raise ValueError(
                f"resident names unknown tags {unknown}; known: {', '.join(RESIDENT_TAGS)}"
            )
        if unknown := sorted({*overlap}.difference(TRAINED)):
            raise ValueError(f"overlap names {unknown}; it is for {', '.join(TRAINED)}")
        if alias and WEIGHTS in stays:
            text = f"resident names {WEIGHTS!r}, but with alias the trainer gets these pages back"
            raise ValueError(f"{text}; leave it out")
        absent = {*(() if critic else (CRITIC, CRITIC_OPTIM)), *(() if reference else (REFERENCE,))}
        self.state = "train"
        self._alias = alias
        self._tags = [tag for tag in TRAINER_TAGS if tag not in absent]
        self._resident = stays | ({PARAMS} if alias else set())
        self._behind = [tag for tag in self._tags if tag in {*overlap} - self._resident]
        self._ahead = [] if critic else [tag for tag in self._behind if tag not in MODELS]
        self._held = set(self._tags) - {REFERENCE}  # which its trainer offloads when it is made
        self._sleeping = [tag for tag in TAGS if tag not in stays]
        self._waking = [tag for tag in self._sleeping if not (alias and tag == WEIGHTS)]
        # what leaves beside work would be taken before it is needed
        self._hand_over = hand_over and not self._behind
        self._trainer = trainer
        self._rollout = rollout
        self._on_stage = on_stage
        self._sleep_level = sleep_level
        self._failure: CycleError | None = None
        if sleep_level == 1 and WEIGHTS in self._waking:
            rollout.prepare_sleep()

    def to_rollout(self, version: int) -> SyncReceipt:
        """Hand the memory to the rollout, which then serves the trainer's weights as `version`.

        The trainer is connected to the rollout (`Trainer.connect`): it speaks with the engines
        itself.
        """
        after = self._enter("to_rollout")
        left = self._offload_all_but([PARAMS, *self._behind], into=next(iter(self._waking), None))
        # nothing of the trainer's, but what training left in torch's cache
        if self._waking and not left:
            with self._stage("empty_cache"):
                self._trainer.empty_cache()
        if not self._alias:
            with self._stage("wake_weights"):
                self._rollout.wake_up([WEIGHTS])
        with self._stage("sync_weights"):
            write = self._trainer.alias_weights if self._alias else self._trainer.sync_weights
            committed = write(version)
        # Params, which must stay until all engines have committed what they hold.
        rest = [tag for tag in self._waking if tag != WEIGHTS]
        self._offload_all_but(self._behind, into=next(iter(rest), None))
        leaving = [tag for tag in self._behind if tag in self._held]
        with self._stage("wake_kv_cache"):
            # a rollout of the caller's own need not know of parts
            partly = {"partly": True} if leaving else {}
            self._rollout.wake_up([KV_CACHE, CUDA_GRAPH], **partly)
        if leaving:
            with self._stage("begin_offload"):
                self._trainer.offload(*leaving, wait=False)
            self._held.difference_update(leaving)
        self.state = after
        return committed

    def prefetch(self) -> None:
        """Begin to bring back what the policy scores with, if it leaves beside work: behind what
        leaves, as soon as the device has room for it beside the answers, else in `to_score`. The
        rollout gives memory back as its last requests end.

        For state "rollout", when the last answers before the scores are asked for.
        """
        if self.state != "rollout":
            raise StateError(f'prefetch() in state {self.state!r}: it is for state "rollout"')
        if PARAMS in self._behind and PARAMS not in self._held:
            with self._stage("prefetch"):
                self._rollout.shrink()
                self._trainer.reload(PARAMS, wait=False)

    def to_score(self, model: str = PARAMS) -> None:
        """Take the memory back, as far as one model needs it to score: `params` (the policy),
        `reference`, `critic`.

        Called again it exchanges the model for the next one. A ValueError names one that there is
        not.
        """
        if model not in (known := [tag for tag in MODELS if tag in self._tags]):
            raise ValueError(f"to_score({model!r}): no such model here; known: {', '.join(known)}")
        self._take("to_score", [model])
        if model == PARAMS and (back := [tag for tag in self._ahead if tag not in self._held]):
            with self._stage("prefetch"):
                self._trainer.reload(*back, wait=False)

    def to_train(self) -> None:
        """Take all the memory back."""
        self._take("to_train", [tag for tag in self._tags if tag in TRAINED])

    def _take(self, verb: str, tags: Sequence[str]) -> None:
        """Have the trainer hold these tags, and what is kept."""
        before, after = self.state, self._enter(verb)
        if before == "rollout":
            with self._stage("sleep"):
                into = self._into(next((tag for tag in tags if tag not in self._held), None))
                self._rollout.sleep(self._sleep_level, tags=self._sleeping, **into)
        self._offload_all_but(tags)
        for tag in tags:
            if tag not in self._held:
                wait: dict[str, Any] = {"wait": "memory"} if tag in self._behind else {}
                with self._stage(f"reload_{tag}"):
                    self._trainer.reload(tag, **wait)
                self._held.add(tag)
        self.state = after

    def _offload_all_but(self, tags: Sequence[str], into: str | None = None) -> list[str]:
        """Return the tags that left. into: the rollout's tag that wakes up next."""
        leaving = [tag for tag in self._tags if tag in self._held - self._resident.union(tags)]
        for tag in leaving:
            with self._stage(f"offload_{tag}"):
                self._trainer.offload(tag, **self._into(into if tag == leaving[-1] else None))
            self._held.remove(tag)
        return leaving

    def _into(self, tag: str | None) -> dict[str, Any]:
        """Return `into=` only under hand-over, so that custom sides need not accept it."""
        return {"into": tag} if self._hand_over and tag else {}

    def _enter(self, verb: str) -> str:
        """Return the state after `verb`; StateError if it is not legal now."""
        legal = TRANSITIONS[self.state]
        if verb not in legal:
            why = ""
            if self._failure:
                why = f" ({self._failure}); start a new run from the last checkpoint"
            raise StateError(
                f"{verb}() in state {self.state!r}: legal now: {', '.join(legal) or 'nothing'}{why}"
            )
        return legal[verb]

    @contextlib.contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = time.time()
        try:
            yield
        except BaseException as cause:
            self.state, self._failure = "failed", CycleError(name, cause)
            if name in POISONING:
                self._poison(self._failure)
            if not isinstance(cause, Exception):
                raise  # an interrupt stays what it is
            raise self._failure from cause
        if self._on_stage is not None:
            self._on_stage(name, start, time.time())

    def _poison(self, failure: CycleError) -> None:
        try:
            self._rollout.abort_update(str(failure))
        # the rollout may be what died; the first failure is the one to report
        except Exception as error:
            failure.add_note(f"the rollout could not be told: {type(error).__name__}: {error}")
