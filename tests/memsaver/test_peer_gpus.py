"""Pages of another GPU, visible or hidden, mapped for the current GPU without a context there."""

from __future__ import annotations

import contextlib
import os
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import memsaver
from memsaver import LeaseCache, LeaseError, Ticket
from memsaver.memory.backend import Backend
from memsaver.memory.memfd import HostBackend
from memsaver.ops.rows import digest
from memsaver.sharing import client as peer
from memsaver.system.devices import device_key
from tests.helpers.memory import process_bytes
from tests.helpers.memsaver.savers import MIB, inject_fault, shared
from tests.helpers.peers import Peer

SIZE = 8 * MIB
# Less than a context (596 MiB on an H200), more than the driver's tables for a mapping.
CONTEXT = 64 * MIB


def _work(pipe: Connection, ticket: Ticket, visible: str | None) -> None:
    """Hash, copy and write the pages from the other GPU."""
    if visible is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible  # CUDA has not started in this process
        assert torch.cuda.device_count() == 1
    here = torch.device("cuda", 0 if visible else 1)
    torch.cuda.set_device(here)
    digest(torch.zeros(10, dtype=torch.uint8, device=here), 0)  # creates this GPU's context
    pipe.send(device_key(here))
    pipe.recv()
    kept = LeaseCache()
    while True:
        with kept.use(ticket) as lease:
            pages = lease.tensor((SIZE,), torch.uint8)
            assert pages.device == here
            local = pages.clone()
            digests = digest(pages, 0), digest(local, 0)
            pages[: SIZE // 2].copy_(local[SIZE // 2 :])
            pages.view(torch.int64)[-1:].fill_(-7)
        pipe.send(digests)
        pipe.recv()


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.alone
@pytest.mark.parametrize("hidden", [False, True])
def test_peer_on_another_gpu_uses_pages_without_context_there(hidden: bool) -> None:
    saver, tensor, ticket = shared("cuda:0")
    other = Peer(_work, ticket, device_key(torch.device("cuda", 1)) if hidden else None)
    try:
        assert other.hear() == device_key(torch.device("cuda", 1))
        digest(tensor, 0)
        torch.cuda.synchronize()
        before = process_bytes("cuda:0")
        for _ in range(3):
            expected, last = digest(tensor, 0), tensor[SIZE // 2 :].clone()
            assert other.ask("work") == (expected, expected)
            assert (
                torch.equal(tensor[: SIZE // 2], last) and int(tensor.view(torch.int64)[-1]) == -7
            )
            assert saver.report().tags["t"].leases == 1
            saver.pause(content="host")  # recalls the cached lease
            saver.resume()
        del last
        torch.cuda.empty_cache()
        assert process_bytes("cuda:0") - before < CONTEXT
    finally:
        other.bury()
    saver.close()


@pytest.mark.gpu
@pytest.mark.gpus(2)
@pytest.mark.alone
def test_lease_cache_has_one_lease_per_current_gpu() -> None:
    saver, tensor, ticket = shared("cuda:0")
    leases = set()
    with LeaseCache() as kept:
        for index in (0, 1, 0, 1):
            with torch.cuda.device(index), kept.use(ticket) as lease:
                pages = lease.tensor((SIZE,), torch.uint8)
                assert pages.device == torch.device("cuda", index)
                pages.fill_(index + 5)
                leases.add(lease)
            assert bool((tensor == index + 5).all())
        assert len(leases) == saver.report().tags["t"].leases == 2
        saver.pause()
        assert all(lease.closed for lease in leases)
    saver.close()


def _gpus(monkeypatch: pytest.MonkeyPatch, reach: bool) -> list[torch.device]:
    """Replace torch's GPUs by two fakes, and return the devices whose backends are requested."""
    backend_devices: list[torch.device] = []
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 2,
        "can_device_access_peer": lambda here, there: reach,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"uuid{device.index}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(peer, "backend_of", backend_devices.append)
    peer.check_reach.cache_clear()
    return backend_devices


@pytest.mark.parametrize("key", ["GPU-uuid0", "GPU-uuid1", "GPU-hidden"])
def test_pages_are_mapped_by_backend_of_current_gpu(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_devices = _gpus(monkeypatch, reach=True)
    peer.peer_backend(key)
    peer.peer_backend(key, torch.device("cuda", 1))
    peer.peer_backend("cpu")
    assert backend_devices == [
        torch.device("cuda", 0),
        torch.device("cuda", 1),
        torch.device("cpu"),
    ]


def test_gpus_out_of_reach_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backend_devices = _gpus(monkeypatch, reach=False)
    peer.peer_backend("GPU-uuid0")
    with pytest.raises(
        LeaseError, match=r"cuda:0 does not reach the memory of cuda:1 \(GPU-uuid1\); use GPUs"
    ):
        peer.peer_backend("GPU-uuid1")
    assert len(backend_devices) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        LeaseError, match="GPU-uuid1 is a GPU, and this process sees none; set CUDA_VISIBLE_DEVICES"
    ):
        peer.peer_backend("GPU-uuid1")


def test_lease_is_refused_when_driver_denies_access_to_hidden_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A CPU backend with another device key stands for the GPU; its calls fail one by one.
    saver, tensor, ticket = shared("cpu")
    backend: Any = HostBackend()
    backend.device_key = "GPU-here"

    def peer_backend(key: str) -> Backend:
        return backend  # type: ignore[no-any-return]

    monkeypatch.setattr(memsaver.sharing.lease, "peer_backend", peer_backend)
    messages = []
    for call in range(1, 10):
        inject_fault(backend, call, 2)
        with contextlib.ExitStack() as lease:
            try:
                lease.enter_context(memsaver.attach(ticket))
            except LeaseError as error:
                messages.append(str(error))
            except memsaver.BackendError:
                pass
            inject_fault(backend, 0, 0)
        assert saver.report().tags["t"].leases == 0
    (message,) = messages
    assert (
        "no lease of tag 't': cpu does not reach the memory of cpu (set access on cpu failed"
        in message
    )
    saver.close()
    tensor.numel()
