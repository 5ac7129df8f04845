"""The wake-up cycle, in which trainer and rollout take turns with the memory of one device.

    train  --to_rollout(version)-->  rollout  --to_score(model)-->  score  --to_train()-->  train
                                        |                           |   ^                     ^
                                        |                           '---' to_score(model)     |
                                        '------------------- to_train() ----------------------'

    state    the trainer holds      the rollout holds              allowed calls
    train    params, optim,         nothing                        update_actor, update_critic,
             critic, critic_optim                                  compute_log_prob, checkpoints
    rollout  nothing                weights, kv_cache, cuda_graph  generate
    score    one model at a time    nothing                        with params: compute_log_prob,
                                                                   reference: compute_ref_log_prob,
                                                                   critic: compute_values

Critic and reference take part only if the cycle is built with them. In state "train", the reference
comes back for `with_reference`, to be refreshed or saved. Tags in `resident` stay on the device in
every state. Tags in `overlap` leave while the rollout generates and return while the policy scores,
so their copies overlap with computation. With `alias` the rollout serves the trainer's own pages:
`params` stays on the device, aliased in state "rollout", and tag `weights` never has memory. Both
sides are protocols: the same code drives objects of this process and handles on Ray actors. A stage
that fails ends the cycle. If it was replacing weights, the rollout is also poisoned with the reason
and refuses to serve.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from memsaver.errors import StateError
from memsaver.system.clock import steady_time
from rollout.engine import InFlight
from rollout.protocols import Rollout
from rollout.tag_names import CUDA_GRAPH, KV_CACHE, TAGS, WEIGHTS
from trainer_bridge.errors import CycleError
from trainer_bridge.learning.batch import SequenceBatch
from trainer_bridge.learning.tokens import Tokens
from trainer_bridge.offload import Wait
from trainer_bridge.sync.weight_sync import SyncReceipt
from trainer_bridge.tag_names import (
    CRITIC,
    CRITIC_OPTIM,
    MODELS,
    PARAMS,
    REFERENCE,
    TRAINED,
    TRAINER_TAGS,
)


class TrainerProtocol(Protocol):
    """A trainer that the cycle can drive, with the contracts of `Trainer`.

    `Cycle` itself calls only the first five methods. Recipes call the remaining ones; the last
    four are only needed with a reference or a critic.
    """

    def empty_cache(self) -> None: ...

    def offload(self, *tags: str, wait: bool = True, into: str | None = None) -> None: ...

    def reload(self, *tags: str, wait: Wait = True) -> None: ...

    def sync_weights(self, version: int) -> SyncReceipt: ...

    def alias_weights(self, version: int) -> SyncReceipt: ...

    def compute_log_prob(self, batch: SequenceBatch) -> Tokens: ...

    def update_actor(self, batch: SequenceBatch) -> dict[str, float]: ...

    def compute_ref_log_prob(self, batch: SequenceBatch) -> Tokens: ...

    def refresh_reference(self) -> None: ...

    def compute_values(self, batch: SequenceBatch) -> Tokens: ...

    def update_critic(self, batch: SequenceBatch) -> dict[str, float]: ...


OnStage = Callable[[str, float, float], None]
"""Called with (name, start, end) after each stage that succeeded; times are `steady_time()`."""

TRANSITIONS = {
    "train": {"to_rollout": "rollout"},
    "rollout": {"to_score": "score", "to_train": "train"},
    "score": {"to_score": "score", "to_train": "train"},
    "failed": {},
}
RESIDENT_TAGS = (*TRAINER_TAGS, *TAGS)
POISONING = ("sync_weights",)  # stages whose failure may leave the weights undefined


class Cycle:
    """Driver of one trainer and one rollout through the states `train`, `rollout` and `score`.

    The caller owns both sides. A new cycle is in state "train": the trainer holds the memory, and
    the rollout sleeps.

    Args:
        trainer: The training side, connected to the rollout (`Trainer.connect`).
        rollout: The generating side.
        on_stage: Called after each stage that succeeded.
        sleep_level: 2 discards the rollout's weights while it sleeps. 1 keeps them in host memory,
            which the constructor begins to obtain (`Rollout.prepare_sleep`).
        resident: Tags of either side that stay on the device in every state. The device must have
            room for them.
        overlap: Trained tags that leave while the rollout generates. The device must have room for
            them next to the rollout's weights, and the engine must be `elastic`: its KV cache grows
            into their memory as they leave. They are reloaded with wait="memory", so computation
            waits only for the tensors that it reads. Without a critic, optimizer tags return from
            `to_score()` on; with a critic, which scores too, from `to_train()` on.
        alias: The rollout serves the trainer's pages, and returns them when it sleeps, at any
            level. Where adapters alone are trained, and `resident` names the weights, it serves
            them for good. Open the pair with the same value.
        hand_over: Memory that leaves goes to the tag that the other side of the device maps next,
            not to the driver; without effect if tags overlap. Both sides must be registered with
            each other (`hand_over_to`), as `open_inprocess` and `open_ray` do.
        critic: Whether the trainer has a critic.
        reference: Whether the trainer has a reference.
        in_flight: What new weights mean for running requests, see `Trainer.sync_weights`. Other
            than with "refuse", requests may outlast the state "rollout", and all tags of the
            rollout must be resident.

    Raises:
        ValueError: `resident` or `overlap` names an unknown tag, or `resident` names `weights`
            together with `alias`, or not all tags of the rollout where requests go on.

    Attributes:
        state: "train", "rollout", "score" or "failed".
    """

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
        in_flight: InFlight = "refuse",
    ) -> None:
        stays = set(resident)
        if unknown := sorted(stays.difference(RESIDENT_TAGS)):
            raise ValueError(
                f"resident names unknown tags {unknown}; known: {', '.join(RESIDENT_TAGS)}"
            )
        if unknown := sorted({*overlap}.difference(TRAINED)):
            raise ValueError(f"overlap names {unknown}, but only {', '.join(TRAINED)} can overlap")
        absent = {*(() if critic else (CRITIC, CRITIC_OPTIM)), *(() if reference else (REFERENCE,))}
        if in_flight != "refuse" and not stays.issuperset(TAGS):
            raise ValueError(f"in_flight={in_flight!r} needs a rollout that never sleeps: {TAGS}")
        self.state = "train"
        self._alias = alias
        self._tags = [tag for tag in TRAINER_TAGS if tag not in absent]
        self._resident = stays | ({PARAMS} if alias else set())
        self._behind = [tag for tag in self._tags if tag in {*overlap} - self._resident]
        self._ahead = [] if critic else [tag for tag in self._behind if tag not in MODELS]
        self._held = set(self._tags) - {REFERENCE}  # a new trainer has offloaded its reference
        self._sleeping = [tag for tag in TAGS if tag not in stays]
        self._waking = [tag for tag in self._sleeping if not (alias and tag == WEIGHTS)]
        # Overlapped tags leave while the rollout already generates: too late to hand over.
        self._hand_over = hand_over and not self._behind
        self._trainer = trainer
        self._rollout = rollout
        self._on_stage = on_stage
        self._sleep_level = sleep_level
        # Passed only if it is needed, so that custom trainers need not accept it.
        self._how: dict[str, Any] = {} if in_flight == "refuse" else {"in_flight": in_flight}
        self._failure: CycleError | None = None
        if sleep_level == 1 and WEIGHTS in self._waking:
            rollout.prepare_sleep()

    def to_rollout(self, version: int) -> SyncReceipt:
        """Hand the memory to the rollout, which then serves the trainer's weights.

        Args:
            version: Number of these weights, attached to every token generated with them.

        Returns:
            The receipt of the weight sync.

        Raises:
            StateError: The cycle is not in state "train".
            CycleError: A stage failed. The cycle is over.
        """
        after = self._enter("to_rollout")
        left = self._offload_all_but([PARAMS, *self._behind], into=next(iter(self._waking), None))
        # `offload` empties torch's cache; without it the cache still holds memory of training.
        if self._waking and not left:
            with self._stage("empty_cache"):
                self._trainer.empty_cache()
        if not self._alias:
            with self._stage("wake_weights"):
                self._rollout.wake_up([WEIGHTS])
        with self._stage("sync_weights"):
            write: Callable[..., SyncReceipt] = self._trainer.sync_weights
            if self._alias:
                write = self._trainer.alias_weights
            committed = write(version, **self._how)
        # The parameters had to stay until all engines committed them.
        rest = [tag for tag in self._waking if tag != WEIGHTS]
        self._offload_all_but(self._behind, into=next(iter(rest), None))
        leaving = [tag for tag in self._behind if tag in self._held]
        with self._stage("wake_kv_cache"):
            # Pass `partly` only when it is needed, so that custom rollouts need not accept it.
            partly = {"partly": True} if leaving else {}
            self._rollout.wake_up([KV_CACHE, CUDA_GRAPH], **partly)
        if leaving:
            with self._stage("begin_offload"):
                self._trainer.offload(*leaving, wait=False)
            self._held.difference_update(leaving)
        self.state = after
        return committed

    def prefetch(self) -> None:
        """Begin to reload overlapped parameters while the rollout finishes its last requests.

        Call it in state "rollout", before the last answers of the round are requested. From then on
        the rollout shrinks its KV pool as requests end. The parameters return behind tags that are
        still leaving, as soon as the device has room, and in `to_score` at the latest. Without
        overlapped parameters the call does nothing.

        Raises:
            StateError: The cycle is not in state "rollout".
            CycleError: The stage failed. The cycle is over.
        """
        if self.state != "rollout":
            raise StateError(f'prefetch() in state {self.state!r}: it is for state "rollout"')
        if PARAMS in self._behind and PARAMS not in self._held:
            with self._stage("prefetch"):
                self._rollout.shrink()
                self._trainer.reload(PARAMS, wait=False)

    def to_score(self, model: str = PARAMS) -> None:
        """Return to the trainer the memory that one model needs to score.

        A second call in state "score" exchanges the model for another one.

        Args:
            model: "params" (the policy), "reference" or "critic".

        Raises:
            ValueError: The cycle has no such model. Nothing has changed.
            StateError: The cycle is in state "train" or "failed".
            CycleError: A stage failed. The cycle is over.
        """
        if model not in (models := [tag for tag in MODELS if tag in self._tags]):
            raise ValueError(f"to_score({model!r}): no such model here; known: {', '.join(models)}")
        self._take("to_score", [model])
        if model == PARAMS and (returning := [tag for tag in self._ahead if tag not in self._held]):
            with self._stage("prefetch"):
                self._trainer.reload(*returning, wait=False)

    def to_train(self) -> None:
        """Return to the trainer all memory that it trains with.

        Raises:
            StateError: The cycle is in state "train" or "failed".
            CycleError: A stage failed. The cycle is over.
        """
        self._take("to_train", [tag for tag in self._tags if tag in TRAINED])

    @contextlib.contextmanager
    def with_reference(self) -> Iterator[None]:
        """Hold the reference next to the trained tags for a block, in state "train".

        The block refreshes the reference (`Trainer.refresh_reference`), or saves a checkpoint that
        holds it. If the block fails, the cycle's next call offloads the reference.

        Returns:
            A context manager.

        Raises:
            ValueError: The cycle has no reference. Nothing has changed.
            StateError: The cycle is not in state "train".
            CycleError: A stage failed. The cycle is over.
        """
        if REFERENCE not in self._tags:
            raise ValueError("with_reference(): no reference here; build the cycle with one")
        if self.state != "train":
            raise StateError(f'with_reference() in state {self.state!r}: it is for state "train"')
        if REFERENCE not in self._held:
            # After an update, torch's cache holds the memory of gradients and activations.
            with self._stage("empty_cache"):
                self._trainer.empty_cache()
            with self._stage(f"reload_{REFERENCE}"):
                self._trainer.reload(REFERENCE)
            self._held.add(REFERENCE)
        yield
        self._offload_all_but(TRAINED)

    def _take(self, verb: str, tags: Sequence[str]) -> None:
        """Move memory until the trainer has exactly `tags` and its resident tags."""
        before, after = self.state, self._enter(verb)
        if before == "rollout" and not self._how:
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
        """Offload the tags that are neither resident nor in `tags`, and return them.

        The rollout's tag `into`, which wakes up next, receives the memory of the last one.
        """
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
        """Return the state after `verb`, or raise a StateError if `verb` is not legal now."""
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
        start = steady_time()
        try:
            yield
        except BaseException as cause:
            self.state, self._failure = "failed", CycleError(name, cause)
            if name in POISONING:
                self._poison(self._failure)
            if not isinstance(cause, Exception):
                raise  # let KeyboardInterrupt and SystemExit pass unwrapped
            raise self._failure from cause
        if self._on_stage is not None:
            self._on_stage(name, start, steady_time())

    def _poison(self, failure: CycleError) -> None:
        try:
            self._rollout.abort_update(str(failure))
        # The rollout itself may have died; report the first failure.
        except Exception as error:
            failure.add_note(f"could not poison the rollout: {type(error).__name__}: {error}")
