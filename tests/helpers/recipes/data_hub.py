"""A stand-in for the Hub that serves data sets, read in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
COMMIT = "7" * 40
GATED = "org/gated"
READ = """
import json, sys
import datasets.config, huggingface_hub.constants
from recipes.config.sections import ProblemSection
from recipes.errors import RecipeError
from recipes.tasks import make_task

results = []
for keys in json.load(sys.stdin):
    for module in (datasets.config, huggingface_hub.constants):
        module.HF_HUB_OFFLINE = keys.pop("offline", False)
    try:
        task = make_task(ProblemSection(name="file", **keys))
        results.append({p.text: [p.answer, p.columns] for p in task.problems()})
    except RecipeError as error:
        results.append(str(error))
print(json.dumps(results))
"""

Splits = dict[str, list[dict[str, Any]]]


@dataclass
class DataHub:
    """A server of data sets.

    Attributes:
        files: Content by path of each data set.
        address: URL of the server.
        asked: Paths of all requests.
    """

    files: dict[str, dict[str, bytes]]
    address: str = ""
    asked: list[str] = field(default_factory=list)

    def read(self, home: Path, *sections: dict[str, Any]) -> list[Any]:
        """Make a task of each section, with this Hub; return its problems or its error."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        kept |= {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": self.address, "HF_HOME": str(home)}
        command = [sys.executable, "-c", READ]
        done = subprocess.run(
            command,
            input=json.dumps(sections),
            capture_output=True,
            text=True,
            env=kept | {"HF_HUB_DISABLE_XET": "1"},
            cwd=home,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        """Return status and content."""
        for name, files in self.files.items():
            api = f"/api/datasets/{name}"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                siblings = [{"rfilename": file} for file in files]
                info = {"id": name, "sha": COMMIT, "siblings": siblings, "private": False}
                return 200, json.dumps(info).encode()
            if path.startswith(f"{api}/tree/{COMMIT}"):
                folder = path.removeprefix(f"{api}/tree/{COMMIT}").strip("/")
                listed = [entry(file, files) for file in files if file.startswith(folder)]
                return 200, json.dumps(listed).encode()
            if path == f"{api}/paths-info/{COMMIT}":
                asked = (
                    urllib.parse.parse_qs(body.decode()).get("paths") or json.loads(body)["paths"]
                )
                return 200, json.dumps(
                    [entry(file, files) for file in asked if file in files]
                ).encode()
            resolved = f"/datasets/{name}/resolve/{COMMIT}/"
            if path.startswith(resolved) and (file := path.removeprefix(resolved)) in files:
                return 200, files[file]
        return 404, b""


def entry(file: str, files: dict[str, bytes]) -> dict[str, Any]:
    oid = hashlib.sha1(files[file]).hexdigest()
    return {"type": "file", "oid": oid, "size": len(files[file]), "path": file}


@contextlib.contextmanager
def serve_data_sets(tables: dict[str, dict[str, Splits]]) -> Iterator[DataHub]:
    """Serve data sets, given as rows by name, subset and split."""
    hub = DataHub(files={name: files_of(subsets) for name, subsets in tables.items()})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hub.asked.append(f"{self.command} {self.path}")
            path = urllib.parse.unquote(self.path.partition("?")[0])
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, content = hub.answer(self.command, path, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            if status == 404:
                missing = "EntryNotFound" if "/resolve/" in path else "RepoNotFound"
                self.send_header("X-Error-Code", "GatedRepo" if GATED in path else missing)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: object) -> None:
            """Suppress the log."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def files_of(subsets: dict[str, Splits]) -> dict[str, bytes]:
    """Return the files of a data set: JSONL, and a card that names subsets and splits."""
    files, configs = {}, ["---", "configs:"]
    for subset, splits in subsets.items():
        configs += [f"- config_name: {subset}", "  data_files:"]
        for split, table in splits.items():
            file = f"{subset}/{split}.jsonl"
            configs += [f"  - split: {split}", f"    path: {file}"]
            files[file] = "".join(f"{json.dumps(row)}\n" for row in table).encode()
    return files | {"README.md": "\n".join([*configs, "---", ""]).encode()}
