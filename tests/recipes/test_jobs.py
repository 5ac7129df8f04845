"""Runs as Ray jobs, on a cluster of this module's own: stopped, after the loss of a worker, followed to the end."""

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from recipes.run import start_run
from tests.helpers.faults import wait_gone
from tests.recipes.test_run import PNG, SMALL, rows, without_clock

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]  # the cluster is started in the first test's time
ROOT = Path(__file__).parents[2]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
PORTS = ["port", "dashboard-port", "dashboard-agent-listen-port", "min-worker-port", "max-worker-port"]
PYTHON = shlex.quote(sys.executable)
MEMSAVER = f"{PYTHON} -m recipes.cli"
DYING = f"{PYTHON} -m tests.helpers.dying_job"
RECIPE = shlex.join(["tiny", *SMALL, "driver=ray"])
FOUR = "steps=4 checkpoint.every=2"
LOSS = "generate_sequences failed: ActorDied: the rollout actor died in generate()"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "RAY_JOB_STOP_WAIT_TIME_S": "60"}


class Cluster:
    """A cluster below one process, and its job server."""

    def __init__(self, process, url, variables):
        from ray.job_submission import JobSubmissionClient

        self.process, self.url, self.variables = psutil.Process(process.pid), url, variables
        headers = {"Authorization": f"Bearer {variables['RAY_AUTH_TOKEN']}"}
        self.client = JobSubmissionClient(url, headers=headers)

    def submit(self, entrypoint):
        return self.client.submit_job(entrypoint=entrypoint, runtime_env={"env_vars": ENVIRONMENT})

    def finish(self, job):
        """(status, log) once the job has ended."""
        until(lambda: self.client.get_job_status(job).is_terminal())
        return str(self.client.get_job_status(job)), self.client.get_job_logs(job)

    def run(self, entrypoint):
        return self.finish(self.submit(entrypoint))

    def follow(self, entrypoint):
        """(exit status, lines) of `ray job submit`."""
        words = [
            *RAY,
            "job",
            "submit",
            "--address",
            self.url,
            "--runtime-env-json",
            json.dumps({"env_vars": ENVIRONMENT}),
        ]
        words += ["--", *shlex.split(entrypoint)]
        done = subprocess.run(words, cwd=ROOT, env=self.variables, stdout=subprocess.PIPE, text=True)
        return done.returncode, done.stdout.splitlines()

    def actors(self):
        below = [(child.pid, (child.cmdline() or [""])[0]) for child in self.process.children(recursive=True)]
        return [pid for pid, name in below if name.startswith(("ray::RolloutActor", "ray::TrainerActor"))]

    def takes_jobs(self):
        try:
            self.submit("true")
        except RuntimeError as error:
            if "No available agent" not in str(error):
                raise
            return False
        return True


def until(ready):
    deadline = time.monotonic() + 300
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster():
    """On ports and with files of its own: other clusters of this machine are in nobody's way."""
    pytest.importorskip("ray")
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    variables = {**os.environ, **own, "PYTHONUNBUFFERED": "1"}
    variables.pop("RAY_ADDRESS", None)
    files = tempfile.mkdtemp(prefix="jobs", dir="/tmp")  # short: sockets lie below
    words = ["start", "--head", "--block", f"--temp-dir={files}", "--num-cpus=2", f"--object-store-memory={128 << 20}"]
    words += [f"--{name}=0" for name in PORTS]
    started = subprocess.Popen(
        [*RAY, *words], env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        found = ""
        while not (url := re.search(r"RAY_API_SERVER_ADDRESS='(http://[^']+)'", found)):
            line = started.stdout.readline()
            assert line, found
            found += line
        made = Cluster(started, url[1], variables)
        until(made.takes_jobs)
        yield made
    finally:
        process = psutil.Process(started.pid)
        below = process.children(recursive=True)
        process.terminate()
        psutil.wait_procs([process], 30)
        for left in (process, *below):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()
        shutil.rmtree(files, ignore_errors=True)
    wait_gone([child.pid for child in below])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Rows of four steps in one process that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    start_run("tiny", [*SMALL, *FOUR.split()], folder)
    return without_clock(rows(folder))


def test_a_stopped_job_ends_cleanly(cluster, tmp_path):
    """Exit status 143, trace and pictures written, actors gone."""
    folder = tmp_path / "run"
    run = f"{MEMSAVER} run {RECIPE} steps=100000 --run-dir {folder}"
    job = cluster.submit(f"trap : TERM; {run}; echo exit status $?")
    until(lambda: (folder / "metrics.jsonl").exists() and len(rows(folder, "train")) >= 2)
    pids = cluster.actors()
    assert len(pids) == 2
    cluster.client.stop_job(job)
    status, log = cluster.finish(job)
    assert status == "STOPPED"
    assert log.splitlines()[-2:] == ["memsaver: interrupted", "exit status 143"]
    assert {entry["ph"] for entry in json.loads((folder / "trace.json").read_text())["traceEvents"]} >= {"X", "C"}
    assert all((folder / name).read_bytes().startswith(PNG) for name in ("reward.png", "memory.png"))
    wait_gone(pids)


def test_a_run_that_lost_its_rollout_goes_on_as_another_job(cluster, undisturbed, tmp_path):
    """The second one by `ray job submit`, followed to its end: a line a step, with the time left."""
    folder = tmp_path / "run"
    status, log = cluster.run(f"{DYING} run {RECIPE} {FOUR} --run-dir {folder}")
    assert status == "FAILED"
    assert log.splitlines()[-1] == f"memsaver: {LOSS}; go on with: memsaver run --resume {folder}"
    assert [row["step"] for row in rows(folder, "train")] == [1, 2]
    status, lines = cluster.follow(f"{MEMSAVER} run --resume {folder}")
    assert status == 0, lines
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(":")[0] for line in steps] == ["step 3/4", "step 4/4"]
    assert all("tok/s" in line and "ETA 0:" in line for line in steps)
    assert f"done: {folder}" in lines
    assert without_clock(rows(folder)) == undisturbed


def test_a_run_goes_on_by_itself_as_often_as_it_may(cluster, undisturbed, tmp_path):
    """With the numbers of a run that nothing happened to; what was lost is written down."""
    folder = tmp_path / "run"
    status, log = cluster.run(f"{DYING} run {RECIPE} {FOUR} checkpoint.max_restarts=1 --run-dir {folder}")
    assert status == "SUCCEEDED", log
    assert f"restart 1 of 1 from step 2: {LOSS}" in log.splitlines()
    assert without_clock(rows(folder)) == undisturbed
    (restart,) = map(json.loads, (folder / "restarts.jsonl").read_text().splitlines())
    assert (restart["restart"], restart["after_step"], restart["cause"]) == (1, 2, LOSS)
    lost = json.loads((folder / "trace-until-step-2-1.json").read_text())["traceEvents"]
    assert "step 2" in {entry["name"] for entry in lost}
