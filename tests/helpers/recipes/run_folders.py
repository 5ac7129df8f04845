"""Run folders as `memsaver run` writes them, with simple figures and without a run."""

import json

import recipes
from memsaver import Event
from recipes.logs.pictures import write_pictures
from recipes.logs.run_folder import RunFolder
from recipes.logs.stage_trace import Span, StageTrace

MIB = 2**20
SESSION = 1000.0  # steady_time() at the start of the session
STAGES = {  # seconds of each stage of every step
    "offload_optim": 0.01, "wake_weights": 0.01, "sync_weights": 0.04, "offload_params": 0.02,
    "wake_kv_cache": 0.02, "generate_sequences": 0.5, "sleep": 0.01, "restore_params": 0.01,
    "compute_reward": 0.01, "compute_log_prob": 0.1, "restore_optim": 0.02,
    "compute_advantages": 0.01, "update_actor": 0.24,
}  # fmt: skip
HELD = {  # after a stage: owner, tag, MiB on the device, MiB on the host
    "offload_optim": ("trainer", "optim", 0, 8),
    "wake_weights": ("rollout", "weights", 4, 0),
    "offload_params": ("trainer", "params", 0, 4),
    "wake_kv_cache": ("rollout", "kv_cache", 32, 0),
    "sleep": ("rollout", "kv_cache", 0, 0),
    "restore_params": ("trainer", "params", 4, 0),
    "compute_reward": ("rollout", "weights", 0, 0),
    "restore_optim": ("trainer", "optim", 8, 0),
}


def train_row(step, **more):
    return {
        "kind": "train",
        "step": step,
        "reward": 0.1 * step,
        "correct": 0.05 * step,
        "mismatch_mean": 1e-6,
        "mismatch_max": 1e-5,
        "loss": 0.25,
        "response_length": 2.5,
        "tokens": 200,
        "tokens_per_second": 400.0,
        "step_seconds": 1.0,
        "stages": STAGES,
        **more,
    }


def eval_row(step, correct, **more):
    return {"kind": "eval", "step": step, "correct": correct, "problems": 16, **more}


def traced(spans, events=None):
    """Return a trace of spans, and of events by owner."""
    trace = StageTrace()
    trace.spans.extend(spans)
    for owner, own in (events or {}).items():
        trace.events[owner].extend(own)
    return trace


def add_step(folder, trace, step, **more):
    """Add the spans, events and row of a step that takes exactly one second."""
    start = time = SESSION + step
    for name, seconds in STAGES.items():
        trace.spans.append(Span(name, time, time + seconds))
        time += seconds
        if name in HELD:
            owner, tag, device, host = HELD[name]
            event = Event(
                time=time,
                seconds=0.001,
                op="resume" if device else "pause",
                tag=tag,
                committed_bytes=device * MIB,
                backup_bytes=host * MIB,
            )
            trace.events[owner].append(event)
    trace.spans.append(Span(f"step {step}", start, start + 1.0))
    folder.add_row(train_row(step, **more))


def make_run(path, steps=6, done=None, plan=None, **more):
    """Build the folder of a run of `steps` steps, or of one that was killed after `done` steps.

    It has an evaluation before the first step and, if the run finished, one after the last. `plan`
    is the content of plan.json, and `more` are further figures of every step.
    """
    folder = RunFolder.create(path, recipes.load("tiny", [f"steps={steps}"]))
    trace = traced([Span("build", SESSION, SESSION + 1)])
    folder.add_row(eval_row(0, 0.125))
    for step in range(1, (steps if done is None else done) + 1):
        add_step(folder, trace, step, **more)
    if done is None:
        folder.add_row(eval_row(steps, 0.75))
        trace.write(path / "trace.json")
        write_pictures(folder.rows(), trace, path)
    if plan:
        (path / "plan.json").write_text(json.dumps(plan))
    return path
