"""What stands on the page, in which order, and what is said where a figure cannot be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipes.watch.report import learning, memory, tables, timing
from recipes.watch.report.chart import Chart
from recipes.watch.report.reading import RunRecord
from recipes.watch.report.tables import Table

NO_TRACE = "needs stages over time, and no trace.json could be read (a run that was killed or still goes has none)."
NO_ROWS = "needs a finished step, and metrics.jsonl has none."
NO_PLAN = "needs plan.json of the planner and measured peaks in the rows; this run has not both."


@dataclass(frozen=True, kw_only=True)
class Missing:
    """A figure that is not there, and why."""

    title: str
    reason: str


Block = Chart | Table | Missing


@dataclass(frozen=True, kw_only=True)
class Section:
    name: str
    title: str
    blocks: Sequence[Block]


def make_sections(run: RunRecord) -> list[Section]:
    return [
        Section(name="learning", title="What it learnt", blocks=_learning(run)),
        Section(name="time", title="Where the time went", blocks=_time(run)),
        Section(name="memory", title="Who held the memory", blocks=_memory(run)),
        Section(name="speed", title="Generation and weight sync", blocks=_speed(run)),
        Section(name="run", title="The run itself", blocks=_run(run)),
    ]


def _learning(run: RunRecord) -> list[Block]:
    return _present(
        learning.reward_chart(run) or Missing(title="Reward and evaluations", reason=NO_ROWS),
        tables.evaluations(run),
        learning.gap_chart(run) or Missing(title="Log-probability gap", reason=NO_ROWS),
        learning.critic_chart(run),
    )


def _time(run: RunRecord) -> list[Block]:
    return _present(
        timing.run_chart(run) or Missing(title="Stages of the whole run", reason=NO_TRACE),
        memory.step_chart(run) or Missing(title="One step", reason=NO_TRACE),
        memory.wake_up_chart(run) or Missing(title="The wake-up", reason=NO_TRACE),
        tables.slowest_stages(run) or Missing(title="Slowest stages", reason=NO_ROWS),
        timing.seconds_chart(run),
    )


def _memory(run: RunRecord) -> list[Block]:
    return _present(
        memory.tags_chart(run) or memory.phases_chart(run) or Missing(title="Memory by tag", reason=NO_TRACE),
        memory.processes_chart(run) or Missing(title="Memory by process", reason=NO_TRACE),
        memory.devices_chart(run),
        tables.planned_and_measured(run) or Missing(title="Planned and measured", reason=NO_PLAN),
    )


def _speed(run: RunRecord) -> list[Block]:
    return _present(
        timing.speed_chart(run) or Missing(title="Generation", reason=NO_ROWS),
        timing.sync_chart(run) or Missing(title="Weight sync", reason=NO_ROWS),
    )


def _run(run: RunRecord) -> list[Block]:
    missing = Missing(title="Where it ran", reason="needs environment.json, which this run did not write.")
    return _present(tables.environment(run) or missing, tables.every_step(run))


def _present(*blocks: Block | None) -> list[Block]:
    return [block for block in blocks if block is not None]
