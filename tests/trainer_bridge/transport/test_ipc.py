"""Pages of cudaMalloc, of an engine in another process that knows nothing of savers."""

from __future__ import annotations

import contextlib
from multiprocessing.connection import Connection
from unittest.mock import Mock, call

import pytest
import torch

import memsaver
from memsaver.system.machine import place_of
from rollout.types import VerifyReceipt, WeightLayout, WeightOffer
from tests.helpers.peers import Peer
from tests.helpers.trainer_bridge.small import full, shards, whole
from trainer_bridge.sync import connection
from trainer_bridge.sync.weight_sync import WeightSync, mapped

LAYOUT = whole("bfloat16")


def foreign(pipe: Connection) -> None:
    """An engine: 20 MiB, so that its pages begin inside of a segment, too."""
    torch.cuda.set_device(0)
    before = torch.zeros(512, dtype=torch.uint8, device="cuda")
    pages = torch.full((LAYOUT.nbytes,), 0xA5, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    while (asked := pipe.recv()) != "end":
        pipe.send(connection.ipc_ticket(pages) if asked == "ticket" else pages.tolist())
    assert not before.any()
    pipe.send("ended")


def handle(ticket: connection.IpcTicket) -> Mock:
    """On such an engine. It has no digest of its own: it believes what it is told."""
    engine = Mock()
    engine.weight_layout.return_value = WeightLayout(
        manifest=LAYOUT, place=place_of(torch.device("cuda:0"))
    )
    engine.begin_update.side_effect = lambda version, **_: WeightOffer(
        version=version, manifest=LAYOUT, ticket=ticket
    )
    engine.verify_update.side_effect = lambda receipt: VerifyReceipt(
        version=receipt.version, digest=receipt.digest, seconds=0.0
    )
    return engine


@pytest.mark.gpu
def test_a_foreign_engine_gets_its_weights() -> None:
    device = torch.device("cuda:0")
    peer, tensors = Peer(foreign), full("cuda:0")
    engine = handle(peer.ask("ticket"))
    sync = WeightSync(shards(1), lambda: tensors, [engine], place=place_of(device))
    for version in (1, 2):  # mapped once
        sync.sync(version)
        pages = torch.tensor(peer.ask("read"), dtype=torch.uint8)
        for piece in LAYOUT.slices:
            nbytes = 2 * tensors[piece.name].numel()
            stored = pages[piece.offset :][:nbytes].view(torch.bfloat16).view(piece.shape)
            assert torch.equal(stored, tensors[piece.name].bfloat16().cpu()), piece.name
        for tensor in tensors.values():
            tensor.mul_(-2)
    assert engine.commit_update.call_args == call(2) and [
        each.kind for each in sync.transports
    ] == ["pages"]
    assert not engine.write_update.called and not engine.abort_update.called, (
        "its pages can be mapped"
    )
    connection.map_once.cache_clear()
    assert peer.ask("end") == "ended"
    peer.kill()


def test_what_is_mapped_is_the_tickets_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = connection.IpcTicket(arguments=(1,), device_key="GPU-0")
    pages = torch.zeros(LAYOUT.nbytes, dtype=torch.uint8)
    offer = WeightOffer(version=1, manifest=LAYOUT, ticket=ticket)
    with pytest.raises(ValueError, match="GPU-0 is not visible in this process"):
        mapped(offer, memsaver.LeaseCache(), contextlib.ExitStack())
    monkeypatch.setattr(
        connection, "map_once", lambda given: pages[1:] if given is not ticket else pages
    )
    assert mapped(offer, memsaver.LeaseCache(), contextlib.ExitStack()) is pages
    other = WeightOffer(
        version=1, manifest=LAYOUT, ticket=connection.IpcTicket(arguments=(2,), device_key="GPU-0")
    )
    with pytest.raises(ValueError, match=f"the rollout shares {LAYOUT.nbytes - 1} bytes"):
        mapped(other, memsaver.LeaseCache(), contextlib.ExitStack())


def test_only_cuda_tensors_are_shared() -> None:
    with pytest.raises(ValueError, match="cudaIpc shares contiguous CUDA tensors"):
        connection.ipc_ticket(torch.zeros(4))
