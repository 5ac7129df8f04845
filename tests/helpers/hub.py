"""A stand-in for the Hugging Face Hub: what `huggingface_hub` asks for to bring a snapshot."""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMIT = "5" * 40
GATED = "org/gated"


class Hub:
    """Serves one folder as a model, and refuses `GATED`; `asked`: the paths of all requests."""

    def __init__(self, model: str, folder: Path, cache: Path) -> None:
        self.model, self.folder, self.asked = model, folder, list[str]()
        self._cache, self._address = cache, ""

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

    def run(self, *command: str, offline: bool = False) -> "subprocess.CompletedProcess[str]":
        """Run Python with this Hub in the place of the real one, and a cache of its own."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        kept |= {"PYTHONPATH": str(ROOT), "HF_ENDPOINT": self._address, "HF_HOME": str(self._cache)}
        kept["HF_HUB_OFFLINE"] = str(int(offline))
        return subprocess.run(
            [sys.executable, *command], capture_output=True, text=True, env=kept, cwd=self._cache
        )

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
                """Say nothing."""

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
        if path.startswith(f"/api/models/{GATED}/"):
            return 403, "GatedRepo", b""
        return 404, "RepoNotFound", b""
