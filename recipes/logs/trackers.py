"""Trackers, which receive figures and samples of a run.

Each tracker uses its own library, which is imported on use. Projects, experiments, servers and keys
come from the library's own settings, such as WANDB_PROJECT and MLFLOW_TRACKING_URI.
"""

import importlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from recipes.errors import RecipeError, one_line
from recipes.importing import calling, import_function
from recipes.logs.metric_rows import flat, json_lines, numbers_of
from recipes.logs.recorded_samples import COLUMNS, cells, shortened

Sample = Mapping[str, Any]
"""A record of samples.jsonl."""
Config = Mapping[str, Any]
"""Settings of a run; values are plain data."""
RunId = str | None
"""Text that identifies a run in a tracker."""

PORT = 9464
"""Default port of the tracker prometheus."""
GAUGES = {  # name, text and labels of the gauge, by the first part of a figure's name
    "stages": ("memsaver_run_stage_seconds", "Seconds of a stage", ["stage"]),
    "memory": ("memsaver_run_tag_bytes", "Bytes of a tag by phase", ["phase", "tag"]),
    "": ("memsaver_run_figure", "Figure of the newest step or evaluation", ["name"]),
}


class Tracker:
    """Receiver of a run's figures and samples; base class, whose methods do nothing.

    The methods may raise any exception: a run then tells its user, and continues without the row.
    A run calls `log` and `table` in a thread, one at a time.

    Attributes:
        keeps: Whether logged figures outlive the process. If so, a resumed run does not log the
            steps again that it repeats.
    """

    keeps = True

    def start(self, name: str, folder: Path, config: Config, run_id: RunId = None) -> RunId:
        """Begin a run, or continue an earlier one.

        Args:
            name: Name of the run.
            folder: Folder of the run, for files of the tracker.
            config: Settings of the run; values are plain data.
            run_id: What `start` returned when the run began; None: the run is new.

        Returns:
            A text that identifies the run, with which another process can continue it.
        """
        return run_id

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Log figures.

        Args:
            figures: Numbers by name; parts of a name are separated by "/".
            step: Step of the run.
        """

    def table(self, samples: Sequence[Sample], step: int) -> None:
        """Log samples.

        Args:
            samples: Records as in samples.jsonl, all of one kind (train or eval).
            step: Step of the run.
        """

    def close(self) -> None:
        """Write all figures and end the run, which `start` has begun."""


def figures_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return all numbers of a row of metrics.jsonl by name, nested ones as `stages/update_actor`.

    Names of an evaluation begin with `eval/`.
    """
    prefix = "eval/" if row["kind"] == "eval" else ""
    return {prefix + name: value for name, value in numbers_of(row).items()}


def samples_table(samples: Sequence[Sample]) -> str:
    """Return samples as a Markdown table, with long texts cut; no text is markup or a link."""
    lines = [list(map(_in_cell, line)) for line in (COLUMNS, *map(cells, samples))]
    lines.insert(1, ["---"] * len(COLUMNS))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _in_cell(value: Any) -> str:
    text = "" if value is None else _unlinked(shortened(str(value)))
    # All punctuation: viewers differ in what they take as markup.
    text = re.sub(r"[!-/:-@\[-`{-~]", lambda mark: f"&#{ord(mark[0])};", text)
    return re.sub(r"\r\n|[\r\n]", "<br>", text)


def _unlinked(text: str) -> str:
    """Return a text with a zero-width space in each address, which viewers would make a link."""
    return re.sub(r"(?i)://|www\.|mailto:|@", lambda part: f"{part[0][0]}\u200b{part[0][1:]}", text)


def plain_text(value: Any) -> str:
    """Return a cell's text, which no viewer makes a link and no spreadsheet calculates."""
    text = _unlinked(str(value))
    number = re.fullmatch(r"\s*[+-]?[\d.,]+(e[+-]?\d+)?\s*", text, re.IGNORECASE)
    return f"'{text}" if text.lstrip()[:1] in tuple("=+-@＝＋－＠") and not number else text


class TensorBoardTracker(Tracker):
    """Event files in the folder `tensorboard` of the run."""

    def __init__(self) -> None:
        from torch.utils import tensorboard

        self._library = tensorboard
        self._writer: Any = None

    def start(self, name: str, folder: Path, config: Config, run_id: RunId = None) -> RunId:
        self._writer = self._library.SummaryWriter(str(folder / "tensorboard"))
        if run_id is None:
            lines = json.dumps(config, indent=2).splitlines()
            self._writer.add_text("recipe", "".join(f"    {line}\n" for line in lines))
        return "tensorboard"

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, samples: Sequence[Sample], step: int) -> None:
        self._writer.add_text(f"samples/{samples[0]['kind']}", samples_table(samples), step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker(Tracker):
    """Weights & Biases, or trackio or swanlab, which have its interface.

    Args:
        library: Name of the module.
    """

    def __init__(self, library: str) -> None:
        self._name = library
        self._library = importlib.import_module(library)
        self._run: Any = None

    def start(self, name: str, folder: Path, config: Config, run_id: RunId = None) -> RunId:
        own: dict[str, Any] = {}
        if self._name == "wandb":
            own["dir"] = os.environ.get("WANDB_DIR") or str(folder)
        if self._name == "trackio":  # identifies a run by its name
            own["project"] = os.environ.get("TRACKIO_PROJECT") or "memsaver"
            name = run_id or name
        elif run_id is not None:
            own["id"] = run_id
        resume = "never" if run_id is None else "allow"
        begin = partial(self._library.init, name=name, config=dict(config), resume=resume, **own)
        self._run = _off_main_thread(begin) if self._name == "swanlab" else begin()
        if self._name == "wandb":
            # An evaluation after a resume may belong to an earlier step, which wandb's own counter
            # of steps excludes.
            self._run.define_metric("*", step_metric="step")
        return str(self._run.name if self._name == "trackio" else self._run.id)

    def log(self, figures: Mapping[str, Any], step: int) -> None:
        if self._name == "wandb":
            self._run.log({**figures, "step": step})
        else:
            self._run.log(dict(figures), step=step)

    def table(self, samples: Sequence[Sample], step: int) -> None:
        if self._name == "swanlab":
            table = self._library.Text(samples_table(samples))
        else:
            data = [list(map(plain_text, cells(sample))) for sample in samples]
            table = self._library.Table(columns=list(COLUMNS), data=data)
        self.log({f"samples/{samples[0]['kind']}": table}, step)

    def close(self) -> None:
        self._run.finish()


def _off_main_thread(begin: Callable[[], Any]) -> Any:
    """Begin a run of swanlab, which in the main thread would replace the handler of SIGINT.

    Its `finish` then restores the handler, and so fails in the thread that closes a tracker.
    """
    pool = ThreadPoolExecutor(1, "tracker swanlab")
    try:
        return pool.submit(begin).result()
    finally:
        pool.shutdown(wait=False)  # An interrupt does not wait for a server or a login.


class MlflowTracker(Tracker):
    """MLflow; tables are artifacts `samples/KIND-STEP.jsonl`."""

    def __init__(self) -> None:
        import mlflow

        # By default, a call retries for 4 minutes before the run learns that the server is down.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")  # 12 seconds
        self._library = mlflow
        self._client: Any = None
        self._id = ""

    def start(self, name: str, folder: Path, config: Config, run_id: RunId = None) -> RunId:
        with self._library.start_run(run_id=run_id, run_name=name) as run:
            self._id = str(run.info.run_id)
            if run_id is None:  # A parameter of a run can be set once.
                settings = {key: str(value)[:500] for key, value in flat(config, ".")}
                self._library.log_params(settings)
        # The active run belongs to this thread, so the thread of `log` names the run by its id.
        self._client = self._library.MlflowClient()
        self._client.update_run(self._id, status="RUNNING")
        return self._id

    def log(self, figures: Mapping[str, float], step: int) -> None:
        named = {re.sub(r"[^\w\-./ ]", "_", name): value for name, value in figures.items()}
        self._library.log_metrics(named, step, run_id=self._id)

    def table(self, samples: Sequence[Sample], step: int) -> None:
        file = f"samples/{samples[0]['kind']}-{step}.jsonl"
        self._library.log_text(json_lines(samples), file, run_id=self._id)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class PrometheusTracker(Tracker):
    """Gauges of the newest figures, served on a port of all network interfaces.

    Args:
        port: Port of the HTTP server.
    """

    keeps = False

    def __init__(self, port: int = PORT) -> None:
        import prometheus_client

        self._library = prometheus_client
        self._port = port
        self._gauges: dict[str, Any] = {}
        self._server: Any = None

    def start(self, name: str, folder: Path, config: Config, run_id: RunId = None) -> RunId:
        registry = self._library.CollectorRegistry()
        for part, (gauge, text, labels) in GAUGES.items():
            self._gauges[part] = self._library.Gauge(gauge, text, labels, registry=registry)
        try:
            self._server, _ = self._library.start_http_server(self._port, registry=registry)
        except OSError as error:
            text = f"port {self._port} cannot be opened, and prometheus:PORT names another"
            raise OSError(f"{text}: {error.strerror}") from error
        return None

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in {**figures, "step": step}.items():
            part, _, rest = name.partition("/")
            labels = rest.split("/", len(GAUGES[part][2]) - 1) if part in GAUGES else [name]
            self._gauges.get(part, self._gauges[""]).labels(*labels).set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


PACKAGED: dict[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": partial(WandbTracker, "wandb"),
    "trackio": partial(WandbTracker, "trackio"),
    "swanlab": partial(WandbTracker, "swanlab"),
    "mlflow": MlflowTracker,
    "prometheus": PrometheusTracker,
}
INSTALL = {"prometheus": "prometheus-client"}


def make_tracker(name: str) -> Tracker:
    """Make a tracker, which has not been started.

    Args:
        name: As in the key `trackers`: tensorboard, wandb, trackio, swanlab, mlflow, prometheus,
            prometheus:PORT, or module:function, which returns a tracker.

    Returns:
        The tracker.

    Raises:
        RecipeError: The name is unknown, or the library is missing.
    """
    key, (kind, _, rest) = f"trackers={name}", name.partition(":")
    make = PACKAGED.get(name)
    if kind == "prometheus" and rest.isdecimal() and 0 < int(rest) < 2**16:
        make = partial(PrometheusTracker, int(rest))
    elif kind not in PACKAGED and rest.isidentifier():
        make = partial(_custom, key, name)
    if make is None:
        rule = f"must be one of {', '.join(PACKAGED)}, prometheus:PORT, or my_trackers.py:function"
        raise RecipeError(f"{key}: {rule}")
    try:
        return make()
    except ImportError as error:
        install = f"pip install {INSTALL.get(kind, kind)}"
        raise RecipeError(f"{key}: {one_line(error)}; run: {install}") from None


def _custom(key: str, name: str) -> Tracker:
    function = import_function(key, name)
    with calling(key):
        tracker = function()
    if not isinstance(tracker, Tracker):
        rule = f"returned a {type(tracker).__name__}; return a recipes.logs.trackers.Tracker"
        raise RecipeError(f"{key}: {rule}")
    return tracker
