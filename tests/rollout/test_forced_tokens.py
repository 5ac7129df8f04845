"""Forced tokens have the log-probabilities of drawn ones, and a listener hears of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rollout import Engine, SamplingParams
from rollout.observed import Listener, observed
from rollout.split import MappedTransport, PromptServer, RemotePrompts
from tests.helpers.models import save_tiny
from tests.helpers.peers import Peer
from tests.helpers.rollout.split import Split, by_steps

PROMPT = [17, 3, 190, 44, 8]
HEAT = 0.7
KEY = b"a secret of this test"
Rows = dict[str, list[bytes]]


def score(engine: Engine, response: list[int], heat: float, listen: Listener) -> list[float]:
    """Return the log-probabilities of a response, and tell a listener of its computation."""
    options: dict[str, Any] = {"max_tokens": len(response), "ignore_eos": True}
    params = SamplingParams(temperature=heat, forced=tuple(response), **options)
    with observed(engine, listen):
        ((answer,),) = engine.generate([PROMPT], params)
    assert answer.token_ids == response
    return answer.logprobs


def test_forced_answer_gets_the_log_probabilities_of_a_drawn_one(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    engine = Engine.from_pretrained(tmp_path, dtype=torch.bfloat16, max_prefill_tokens=3)
    asked = SamplingParams(max_tokens=20, temperature=HEAT, n=4, seed=1)
    (answers,) = engine.generate([PROMPT], asked)
    for answer in answers:
        scores = score(engine, answer.token_ids, HEAT, lambda *_: None)
        assert scores == answer.logprobs
    started = replace(asked, forced=answers[2].token_ids[:7])
    for one, other in zip(engine.generate([PROMPT], started)[0], answers, strict=True):
        assert one.token_ids[:7] == answers[2].token_ids[:7]
        assert one.logprobs[:7] == answers[2].logprobs[:7]
        assert (one == other) == (other is answers[2]), "later tokens are drawn as before"


def test_unlikely_tokens_are_scored_and_listeners_get_their_logits(tmp_path: Path) -> None:
    save_tiny(tmp_path, "llama")
    engine = Engine.from_pretrained(tmp_path)
    response, logits, cold = list(range(199)), [], 0.3

    def listen(operation: str, result: torch.Tensor) -> None:
        if operation == "lm_head":
            logits.append(result)

    logprobs = score(engine, response, cold, listen)
    wanted = (torch.cat(logits).double() / cold).log_softmax(-1)
    wanted = wanted[range(199), response]
    assert wanted.min() < -20, "below 1e-7, the resolution of fp32 sums"
    torch.testing.assert_close(torch.tensor(logprobs).double(), wanted, rtol=1e-6, atol=1e-6)


def add(rows: Rows, operation: str, result: torch.Tensor) -> None:
    rows.setdefault(operation, []).extend(row.tobytes() for row in result.numpy())


def serve(pipe: Connection, path: Path, address: str) -> None:
    """Serve prompts until the decode engine closes, and send what a listener got."""
    engine, rows = Engine.from_pretrained(path), Rows()
    server = PromptServer(engine, [address], KEY, MappedTransport())
    with observed(engine, partial(add, rows)):
        server.serve()
    pipe.send(rows)


def test_split_engine_that_serves_is_traced_with_the_bits_of_one_engine(tmp_path: Path) -> None:
    path, address = tmp_path / "model", f"ipc://{tmp_path}/socket"
    save_tiny(path, "llama")
    engine, plain = (Engine.from_pretrained(path) for _ in range(2))
    (((answer,),), alone) = (plain.generate([PROMPT], SamplingParams(max_tokens=9)), Rows())
    scores = score(plain, answer.token_ids, 1.0, partial(add, alone))
    sender, rows = Peer(serve, path, address), Rows()
    ring: dict[str, Any] = {"prefill_ranks": 1, "ring_bytes": 1 << 16}
    remote = RemotePrompts(engine, address, KEY, MappedTransport(), **ring)
    assert score(engine, answer.token_ids, 1.0, partial(add, rows)) == scores
    assert remote.stats.arrived == 1
    known = SamplingParams(max_tokens=9, forced=answer.token_ids)
    stepped = Split(path=path, calls=[], stepped=True)
    for (again,) in by_steps(engine, [PROMPT, PROMPT[1:], PROMPT], known, stepped):
        assert again.token_ids == answer.token_ids
    remote.close()
    served = sender.hear()
    assert len(served["lm_head"]) == 4 and len(rows["lm_head"]) == 8
    for operation, expected in alone.items():
        prompts = served[operation][: len(expected) - len(rows[operation])]
        assert prompts + rows[operation] == expected
