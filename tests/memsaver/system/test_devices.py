"""Names of machines and places, which say whether pages can be mapped between processes."""

from __future__ import annotations

import ctypes
import os
import socket
from multiprocessing.connection import Connection

import torch

from memsaver.system.devices import machine, machine_of, place_of
from tests.helpers.peers import Peer

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000  # flags of unshare


def _in_another_network(pipe: Connection) -> None:
    before = machine()
    libc = ctypes.CDLL(None, use_errno=True)
    refused = libc.unshare(NEW_NETWORK) and libc.unshare(NEW_USER | NEW_NETWORK)
    pipe.send((before, machine(), os.strerror(ctypes.get_errno()) if refused else ""))
    pipe.poll(60)


def test_processes_of_one_network_are_on_one_machine_and_others_are_not() -> None:
    peer = Peer(_in_another_network)
    before, after, refused = peer.hear(30.0)
    peer.kill()
    assert not refused, (
        f"network namespaces are refused here ({refused}); see tests/helpers/two_nodes"
    )
    assert before == machine() != after
    assert machine().startswith(f"{socket.gethostname()}-")


def test_place_has_machine_and_device() -> None:
    place = place_of(torch.device("cpu"))
    assert place == f"{machine()}/cpu" and machine_of(place) == machine()
    assert machine_of("cpu") == ""
