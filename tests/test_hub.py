"""Recipes, engines and trainers fetch models of the Hugging Face Hub by name."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from rollout.model import resolve_model
from tests.helpers.trainer_bridge.models import write_model

COMMIT = "5" * 40
GATED, LAST = "org/gated", "/last"
BOTH_SIDES = """
import torch.distributed
from rollout import Engine, SamplingParams
from trainer_bridge import SequenceBatch, Trainer, TrainerConfig

engine = Engine.from_pretrained("org/tiny", kv_tokens=64)
(answer,), = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0))
batch = SequenceBatch(prompt_ids=[[1, 2, 3]], response_ids=[list(answer.token_ids)])
(scores,) = Trainer(TrainerConfig(model_path="org/tiny")).compute_log_prob(batch)
assert all(abs(a - b) < 1e-4 for a, b in zip(scores, answer.logprobs, strict=True))
torch.distributed.destroy_process_group()
"""
RECIPE = f"""
import urllib.request
import huggingface_hub.constants
from recipes.cli import main
from recipes.setup.model_files import find_model

def find(weights, absent):
    folder = find_model("org/tiny", weights=weights)
    assert (folder / "config.json").is_file()
    assert bool(list(folder.glob("*.safetensors"))) == weights
    assert list(find_model("org/tiny").glob("*.safetensors"))
    for name in absent:
        assert main(["run", "tiny", f"model.path={{name}}"]) == 2

find(False, ["org/absent", "{GATED}"])
urllib.request.urlopen(huggingface_hub.constants.ENDPOINT + "{LAST}")
huggingface_hub.constants.HF_HUB_OFFLINE = True
find(True, ["org/absent"])
"""


class Hub:
    """A server of one folder as a model, which refuses `GATED` and logs all paths in `asked`."""

    def __init__(self, model: str, folder: Path) -> None:
        self.model, self.folder, self.asked, self._address = model, folder, list[str](), ""

    @contextlib.contextmanager
    def served(self) -> Iterator[None]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def run(self, code: str, cache: Path) -> list[str]:
        """Run Python with this Hub instead of the real one; return memsaver's error lines.

        The constants are those that `HF_ENDPOINT` and `HF_HOME` set when huggingface_hub is
        imported.
        """
        template = f"{self._address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        changed = {"ENDPOINT": self._address, "HUGGINGFACE_CO_URL_TEMPLATE": template}
        changed |= {"HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": False}
        errors = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(errors):
            for name, value in changed.items():
                patch.setattr(huggingface_hub.constants, name, value)
            patch.delenv("HF_TOKEN", raising=False)
            patch.chdir(cache)
            exec(code, {})
        return [line for line in errors.getvalue().splitlines() if line.startswith("memsaver: ")]

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                hub.asked.append(self.path)
                self._answer(*hub.answer(self.path.partition("?")[0]))

            do_GET = do_HEAD

            def _answer(self, status: int, code: str, content: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
                if code:
                    self.send_header("X-Error-Code", code)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Suppress the log."""

        return Handler

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status, error code and content."""
        files = {file.name: file.read_bytes() for file in self.folder.iterdir()}
        if path == f"/api/models/{self.model}/revision/main":
            siblings = [{"rfilename": name} for name in files]
            described = {"id": self.model, "sha": COMMIT, "siblings": siblings}
            return 200, "", json.dumps(described).encode()
        if path == f"/api/models/{self.model}/tree/{COMMIT}":
            listed = [
                {"type": "file", "oid": COMMIT, "size": len(content), "path": name}
                for name, content in files.items()
            ]
            return 200, "", json.dumps(listed).encode()
        name = path.removeprefix(f"/{self.model}/resolve/{COMMIT}/")
        if name in files:
            return 200, "", files[name]
        if path == LAST:
            return 200, "", b""
        if path.startswith(f"/api/models/{GATED}/"):
            return 403, "GatedRepo", b""
        return 404, "RepoNotFound", b""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    model = Path(write_model(tmp_path_factory.mktemp("hub") / "model"))
    (model / "consolidated.safetensors").write_bytes(b"the weights again")
    (model / "training.log").write_text("no part of a model")
    server = Hub("org/tiny", model)
    with server.served():
        yield server


def test_engine_and_trainer_accept_the_name_of_a_hub_model(hub: Hub, tmp_path: Path) -> None:
    hub.run(BOTH_SIDES, tmp_path)
    fetched = {path.rpartition("/")[2] for path in hub.asked if "/resolve/" in path}
    assert {"config.json", "model.safetensors"} <= fetched
    assert not {"consolidated.safetensors", "training.log"} & fetched


def test_recipe_fetches_weights_where_needed_and_reports_missing_models(
    hub: Hub, tmp_path: Path
) -> None:
    """Report each missing model in one line, and use the cache if the Hub is offline."""
    absent, gated, line = hub.run(RECIPE, tmp_path)
    assert "nor a public model of the Hub; correct it, or set HF_TOKEN" in absent
    assert f"accept its terms at https://huggingface.co/{GATED}, and set HF_TOKEN" in gated
    assert "model.path=org/absent: " in absent and f"model.path={GATED}: " in gated
    assert "model.path=org/absent: " in line and hub.asked[-1] == LAST
    assert "the Hub cannot be reached (HF_HUB_OFFLINE" in line


def test_folder_takes_precedence_over_a_hub_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/tiny").mkdir(parents=True)
    assert resolve_model("org/tiny") == Path("org/tiny")
    assert resolve_model("no/such/folder") == Path("no/such/folder")
