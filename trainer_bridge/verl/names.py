"""Names by which the processes of verl find each other's parts of a sync."""

from __future__ import annotations

ROLLOUT = "memsaver_vllm"
UPDATE = "memsaver_update"  # method of vLLM's workers


def socket_name(zmq_handle: str) -> str:
    """Return the name of the socket of a trainer rank and the worker on its GPU.

    `zmq_handle` is verl's name of this pair, unique among jobs, replicas and ranks of a machine.
    """
    return f"verl-{zmq_handle}"
