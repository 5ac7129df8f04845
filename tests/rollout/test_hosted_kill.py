"""The trainer or the process of a hosted engine is killed at every moment of a cycle.

The survivor refuses and names the reason, and no memory of the dead process stays.
"""

from __future__ import annotations

import gc
import os
import time

import pytest

from memsaver import StateError
from rollout import SamplingParams
from tests.helpers.case_selection import some
from tests.helpers.memory import memfd_bytes
from tests.helpers.memsaver.savers import until
from tests.helpers.models import save_tiny
from tests.helpers.peers import Gone
from tests.helpers.rollout.killed_in_cycle import (
    STAGES,
    CyclingTrainer,
    HostedWorker,
    Remote,
    make_rollout,
    make_trainer,
    run_cycle,
)
from trainer_bridge import Cycle
from trainer_bridge.errors import ActorDied, CycleError

SYNC = ("begin_update", "write", "verify_update")
REASONS = dict.fromkeys(SYNC, "the update to version 2 has not been committed")
REASONS |= {"wake_weights": "sleep(level=2)", "sleep": "paused: weights, kv_cache"}
# The trainer is killed at every second moment, and the engine at the others.
HALF = ("wake_weights", "write", "commit_update", "sleep")
OTHERS = [moment for moment in STAGES if moment not in HALF]


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Exclude the objects of earlier tests from the collections of `memfd_bytes`, for good."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_tiny(folder, "qwen3")
    return str(folder)


@pytest.mark.parametrize("moment", some(*HALF, whole=OTHERS))
def test_engine_does_not_serve_uncommitted_weights_when_the_trainer_is_killed(
    moment: str, path: str
) -> None:
    """Check also that the dead trainer's calls are executed and that the next sync is served."""
    rollout = make_rollout(path)
    floor = memfd_bytes([os.getpid()])
    trainer = CyclingTrainer(path, rollout)
    trainer.ask((1, None))
    trainer.tell((2, moment))
    with pytest.raises(Gone):
        trainer.hear()
    trainer.gone()
    reason = rollout.unavailable_reason() or ""
    assert REASONS.get(moment, "") in reason and "\n" not in reason
    assert rollout.served_version() == (None if moment in REASONS else 2)
    if moment in SYNC:
        rollout.abort_update("its trainer has died")
        assert rollout.served_version() is None
        assert "its trainer has died" in str(rollout.unavailable_reason())
    if reason:
        with pytest.raises(StateError, match="cannot generate: "):
            rollout.generate([[1]], SamplingParams(max_tokens=1))
    wait_for_leases_to_end(rollout)
    rollout.sleep(2)
    assert rollout.report().committed_bytes == 0 and memfd_bytes([os.getpid()]) == floor
    following = CyclingTrainer(path, rollout)
    digests = following.ask((3, None))
    rollout.wake_up()
    assert rollout.weights_version == 3 and "sleep(level=2)" in str(rollout.unavailable_reason())
    following.tell((4, "generate"))
    following.gone()
    assert rollout.unavailable_reason() is None and digests == (rollout.digest(),)
    rollout.saver.close()


def wait_for_leases_to_end(rollout: object) -> None:
    """Wait until the kernel has unmapped the dead process's leases."""
    deadline = time.monotonic() + 5
    while any(entry.leases for entry in rollout.report().tags.values()):  # type: ignore[attr-defined]
        assert time.monotonic() < deadline, rollout.report()  # type: ignore[attr-defined]
        time.sleep(0.005)


@pytest.mark.parametrize("moment", some(*OTHERS, whole=HALF))
def test_cycle_names_stage_and_actor_when_the_engine_is_killed(moment: str, path: str) -> None:
    """Check also that the message is one line and that the trainer can release all memory."""
    floor = memfd_bytes([os.getpid()])
    trainer = make_trainer(path)
    worker = HostedWorker(path, moment)
    remote = Remote(worker.calls, lambda _: None)
    trainer.connect([remote])  # type: ignore[list-item]
    cycle = Cycle(trainer, remote)  # type: ignore[arg-type]
    run_cycle(cycle, remote, 1)
    if moment == "write":
        trainer.on_write = worker.kill  # type: ignore[method-assign]
    with pytest.raises(ActorDied if moment == "generate" else CycleError) as caught:
        run_cycle(cycle, remote, 2)
    assert "the rollout actor died in" in str(caught.value) and "\n" not in str(caught.value)
    if isinstance(caught.value, CycleError):
        assert caught.value.stage == STAGES[moment]
        with pytest.raises(StateError, match="legal now: nothing .* died in .* last checkpoint"):
            cycle.to_train()
    assert worker.dies_within(30)
    trainer.close()
    assert trainer.saver is not None
    trainer.saver.close()
    # A thread of the connection notices the death, and drops what the dead engine had shared.
    until(lambda: memfd_bytes([os.getpid()]) == floor)
