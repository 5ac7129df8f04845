"""Replacement of engines whose actors have died, while other engines keep and finish their answers.

A new engine starts at the place of the lost one. On a device of the trainer, the trainer's tags
leave while the engine starts, because a new engine first holds all of its memory. Afterwards its
tags are awake or asleep like those of the other engines.

Between a sync and the next sleep, the new engine gets the weights of that sync from the trainer's
pages. For that, the trainer's parameters must be on the device, or there must be room for them: no
other engine serves, or all engines are on devices of their own. Otherwise the new engine gets its
weights in the next sync.

ray is imported on first use.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout.tag_names import WEIGHTS
from trainer_bridge.errors import ActorDied
from trainer_bridge.remote.actor import RemoteRollout, RemoteTrainer, introduce
from trainer_bridge.remote.placement import Placement
from trainer_bridge.tag_names import PARAMS, TRAINER_TAGS

OnReplaced = Callable[[int, ActorDied], None]
"""Called with the number of the replacement and its cause before the new engine starts."""


@dataclass(kw_only=True)
class Replacer:
    """Starts lost engines again; see the module.

    Attributes:
        trainer: The trainer, connected to the rollout.
        rollout: The engines.
        placement: The places of both.
        start: Starts the actor of an engine rank, and returns its handle.
        left: Number of replacements that are still allowed.
        alias: Whether the engine serves the trainer's pages.
        on_replaced: See `OnReplaced`.
    """

    trainer: RemoteTrainer
    rollout: RemoteRollout
    placement: Placement
    start: Callable[[int], Any]
    left: int
    alias: bool
    on_replaced: OnReplaced
    _done = 0

    def replace(self, error: ActorDied) -> bool:
        """Replace the engine whose actor died, and return whether the new one has weights.

        Raises:
            ActorDied: `error`, if it is of no engine, if no replacement is left, or if the engine's
                node is lost; or the new engine died while it started.
        """
        engine = self.rollout.engine_of(error.actor)
        if engine is None or not self.left or self.rollout.ranks[engine.start].lost():
            raise error
        self._done, self.left = self._done + 1, self.left - 1
        self.on_replaced(self._done, error)
        self.trainer.connect_to(range(0))  # unmaps pages of the lost engine
        self._restart(engine)
        held, served = self._held(), self.rollout.version is not None
        others = len(self.rollout.serving(but=engine))
        served = served and (PARAMS in held or not self.placement.colocate or not others)
        brief = [PARAMS] if served and PARAMS not in held else []
        if engine.start in self.placement.shared:
            self._build_beside_trainer(engine, held, brief)
        else:
            self.rollout.build([engine])
            self._reload(brief)
        fresh = self.rollout.of(engine)
        awake = self.rollout.awake if engine.start in self.placement.shared else set()
        fresh.wake_up(sorted(awake & {WEIGHTS}))
        if served:
            self.trainer.connect_to(engine)
            sync = "alias_weights" if self.alias else "sync_weights"
            assert self.rollout.version is not None
            self.trainer.sync_connected(sync, self.rollout.version)
        else:
            self.rollout.without_weights.add(engine)
        if brief:
            self.trainer.offload(*brief)
        fresh.wake_up(sorted(awake - {WEIGHTS}))
        return served

    def _restart(self, engine: range) -> None:
        """Kill what is left of an engine, and start its actors again."""
        import ray

        for rank in engine:
            actor = self.rollout.ranks[rank]
            ray.kill(actor.handle)
            actor.handle = self.start(rank)

    def _build_beside_trainer(self, engine: range, held: list[str], brief: list[str]) -> None:
        leaving = [tag for tag in held if not (self.alias and tag == PARAMS)]
        if leaving:
            self.trainer.offload(*leaving)
        self.rollout.build([engine])
        self.rollout.of(engine).sleep(level=2)
        self._reload([*leaving, *brief])
        sides = self.trainer.each(), self.rollout.each()
        for rank in engine:
            introduce(*(side[rank] for side in sides))

    def _reload(self, tags: list[str]) -> None:
        if tags:
            self.trainer.reload(*tags)

    def _held(self) -> list[str]:
        """Return the trainer's tags that have memory on the device."""
        tags = self.trainer.each()[0].report(others=False).tags
        return [tag for tag in TRAINER_TAGS if tag in tags and tags[tag].committed_bytes]
