"""Bytes from rank to rank over the trainers' process group."""

from collections.abc import Collection, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from trainer_bridge.errors import SyncError


class Posted:
    """An exchange under way."""

    def __init__(self, works: Sequence[dist.Work], peers: Sequence[int]) -> None:
        self._works = works
        self._peers = peers

    def wait(self) -> None:
        """Waits until both are through: the host on gloo, the current stream on NCCL."""
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            raise _lost(self._peers, error) from error


class Wire:
    """A message each way at a time. Ranks that exchange make the same exchanges in the same order.

    A rank that is gone: on gloo the others' `wait` raises a `SyncError`, at once or after the
    group's time-out. On NCCL nothing is raised here: the others wait on the device, and NCCL's
    watchdog ends their processes after the group's time-out (unless TORCH_NCCL_ASYNC_ERROR_HANDLING
    says otherwise), as with any collective of the training itself. After an exchange that broke off
    the ranks may be out of step: start them anew.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, device: torch.device) -> None:
        """device: where messages lie. All ranks of the group make it together: NCCL's communicator
        is made here, because a first exchange among some of the ranks would hang.
        """
        self.name, self.device = name, device
        self.group = group
        if name == "nccl":
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def post(self, sent: tuple[Tensor, int] | None, taken: tuple[Tensor, int] | None) -> Posted:
        """Begin to send a tensor to a rank, and to fill one from another (uint8, contiguous, on the
        wire's device).
        """
        operations = []
        if sent is not None:
            operations.append(dist.P2POp(dist.isend, sent[0], group=self.group, group_peer=sent[1]))
        if taken is not None:
            operations.append(
                dist.P2POp(dist.irecv, taken[0], group=self.group, group_peer=taken[1])
            )
        peers = sorted({each[1] for each in (sent, taken) if each is not None})
        try:
            return Posted(dist.batch_isend_irecv(operations), peers)
        except RuntimeError as error:
            raise _lost(peers, error) from error


def _lost(peers: Sequence[int], error: RuntimeError) -> SyncError:
    return SyncError(
        "write", f"the exchange with ranks {', '.join(map(str, peers))} broke off ({error})"
    )


def make_wire(
    group: dist.ProcessGroup,
    ranks: Collection[int],
    places: Sequence[str],
    device: torch.device,
    *,
    host: bool,
) -> Wire:
    """Makes a wire of NCCL if all `ranks`, which take part, have GPUs of their own and the group
    has it; otherwise of gloo.

    host: the bytes are wanted in host memory. A group without gloo gets one beside it, so all ranks
    call this.
    """
    backends = dict(part.split(":", 1) for part in str(dist.get_backend_config(group)).split(","))
    theirs = {places[rank] for rank in ranks}
    apart = len(theirs) == len(ranks) and all("/GPU-" in place for place in theirs)
    if apart and not host and backends.get("cuda") == "nccl":
        return Wire(group, "nccl", device)
    if backends.get("cpu") != "gloo":
        members = dist.get_process_group_ranks(group)
        made = dist.new_group(members, backend="gloo", timeout=_SECONDS)
        assert isinstance(made, dist.ProcessGroup)
        group = made
    return Wire(group, "gloo", torch.device("cpu"))


_SECONDS = timedelta(seconds=60)  # for one message, where the group has no gloo of its own
