"""`memsaver serve`: the engine in a process of its own, settings that are refused, and ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from recipes.cli import SERVICE, main, parse
from recipes.errors import RunError
from recipes.serve_model import Service, serve_model
from rollout.loop import RankProcesses
from tests.helpers.memsaver.savers import until
from tests.helpers.peers import server
from tests.helpers.recipes.models import save_byte_model
from tests.helpers.rollout.adapters import SHAPES, save_adapter


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"))


def test_engine_serves_from_its_own_process_until_that_ends(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A base and an adapter; a stream that is open when the engine dies tells so."""
    context = "rollout.loop.rank_processes.multiprocessing.get_context"
    monkeypatch.setattr(context, lambda _: server)  # starts a process without its imports
    pids: list[int] = []
    begin = RankProcesses.__init__

    def begun(self: RankProcesses, *args: Any) -> None:
        begin(self, *args)
        pids.extend(self.call("pid"))

    monkeypatch.setattr(RankProcesses, "__init__", begun)
    adapter = tmp_path / "adapter"
    save_adapter(adapter, AutoModelForCausalLM.from_pretrained(path), 3, **SHAPES[0])
    (tmp_path / "keys").write_text("first\n\nsecond\n")
    words = ["serve", str(path), "--port", "0", "--name", "base", "--adapter", f"one={adapter}"]
    words += ["--device", "cpu", "--api-key-file", f"{tmp_path}/keys", "kv_tokens=4096"]
    given = vars(parse(words))
    service = Service(
        model=given["words"][0],
        overrides=given["words"][1:],
        **{name: given[name] for name in SERVICE},
    )
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            serve_model(service)
        except BaseException as error:
            failures.append(error)

    serving = threading.Thread(target=serve)
    serving.start()
    printed = ""

    def ready() -> bool:
        nonlocal printed
        printed += capfd.readouterr().out
        return failures != [] or " at http" in printed

    until(ready, 60)
    assert not failures, failures
    url = printed.partition(" at ")[2].partition("/v1")[0]
    headers = {"authorization": "Bearer second"}
    ask: dict[str, Any] = {"prompt": "hello", "temperature": 0, "return_token_ids": True}
    answers = []
    for name in ("base", "one"):
        sent = {"json": {**ask, "model": name}, "headers": headers}
        (choice,) = httpx.post(f"{url}/v1/completions", **sent).json()["choices"]  # type: ignore[arg-type]
        answers.append(choice["token_ids"])
    assert len(answers[0]) == len(answers[1]) == 16 and answers[0] != answers[1]
    sent = {"json": {**ask, "stream": True, "max_tokens": 2000}, "headers": headers}
    with httpx.stream("POST", f"{url}/v1/completions", timeout=60, **sent) as stream:  # type: ignore[arg-type]
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
        assert json.loads(next(lines))["choices"]
        os.kill(pids[0], signal.SIGKILL)
        *_, last = lines
    assert "a process of the engine has ended" in json.loads(last)["error"]["message"]
    serving.join(60)
    assert [str(error) for error in failures] == [
        "serve failed: the engine has ended; what it printed says why"
    ]
    assert isinstance(failures[0], RunError)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (
            ["kv_token=4096"],
            "kv_token=4096: the engine has no such setting; did you mean kv_tokens?",
        ),
        (["kv_tokens=4097"], "kv_tokens=4097 is not a multiple of page_size=16"),
        (["max_running=many"], "max_running: Input should be a valid integer"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0: is not this machine alone"),
        (["--api-key-file", "none"], "--api-key-file none: cannot be read"),
        (["--api-key-file", "/dev/null"], "--api-key-file /dev/null: has no key"),
        (["--adapter", "a=none"], "--adapter: none/adapter_config.json"),
        (["--tool-format", "mine"], "Unknown tool_parser 'mine'"),
        (["--port", "PORT"], "cannot listen at 127.0.0.1:PORT: Address already in use"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    words: list[str], why: str, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = [word.replace("PORT", port) for word in words]
        assert main(["serve", str(path), "--device", "cpu", *words]) == 2
    assert why.replace("PORT", port) in capfd.readouterr().err
