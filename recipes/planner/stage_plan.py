"""Planned memory of one stage of a step."""

from dataclasses import dataclass
from typing import Any

from recipes.planner.planned_sides import EngineSizes


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """Peak bytes of one stage.

    Attributes:
        stage: Name of the stage.
        used: Bytes of the device without contexts.
        processes: Bytes of tags and torch by process, each at its peak.
        torch: The part of torch in `processes`.
        tags: Bytes by tag.
        contexts: Bytes of the contexts of both processes; on a CPU, of the processes themselves.
        host: Bytes on one machine of saved content and of an optimizer on the host; on a CPU they
            are part of `used`.
    """

    stage: str
    used: int
    processes: dict[str, int]
    torch: dict[str, int]
    tags: dict[str, int]
    contexts: int
    host: int

    @property
    def device_bytes(self) -> int:
        return self.used + self.contexts

    def as_json(self) -> dict[str, Any]:
        held = {"device_bytes": self.processes, "used_bytes": self.device_bytes, "tags": self.tags}
        return {"stage": self.stage, **held, "host_bytes": self.host}


def always_awake(engine: EngineSizes, contexts: int) -> tuple[StagePlan, ...]:
    """Return the stages of a GPU without a trainer, whose engine rank keeps all of its memory."""
    nbytes = sum(engine.tags.values()) + engine.generating
    return tuple(
        StagePlan(
            stage=stage,
            used=nbytes,
            processes={"rollout": nbytes},
            torch={"rollout": engine.generating},
            tags=engine.tags,
            contexts=contexts,
            host=0,
        )
        for stage in ("sync_weights", "generate_sequences")
    )
