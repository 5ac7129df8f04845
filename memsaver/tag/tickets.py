"""Permissions that one saver gives to others: plain data, good as long as the saver lives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """Permission to map one tag; plain data for the peer. Good as long as the saver lives."""

    socket_name: str
    token: str
    tag: str
    device_key: str
    writable: bool


@dataclass(frozen=True, kw_only=True)
class PoolTicket:
    """Permission to hand extents over to a saver; plain data, good as long as the saver lives."""

    socket_name: str
    token: str
    device_key: str
    pid: int
