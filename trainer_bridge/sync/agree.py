"""Ranks agree before each step that cannot be undone: all of them go on, or none does.

A round: every rank says what came of its own step, waits for the others', and then the round is
decided once for all, in the store, by whoever is first: "go", or that a rank gave up waiting. So a
rank that comes late never goes on alone.
"""

import itertools
import secrets
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from memsaver import Ticket
from memsaver.system.sealed import Forged, Plain, seal, unseal
from rollout.types import (
    CommitReceipt,
    Manifest,
    ModuleTensor,
    ParamSlice,
    VerifyReceipt,
    WeightLayout,
    WeightOffer,
)
from trainer_bridge.errors import SyncError
from trainer_bridge.sync.connection import IpcTicket
from trainer_bridge.sync.shards import SourceShard
from trainer_bridge.sync.writer import Written

T = TypeVar("T")
_GO = "go"
_KEY_BYTES = 32
_PLAIN = Plain(  # what ranks of a sync say
    ParamSlice, ModuleTensor, WeightLayout, WeightOffer, VerifyReceipt, CommitReceipt,
    Ticket, IpcTicket, SourceShard, Written, whole=(Manifest,),
)  # fmt: skip


class Consensus(Protocol):
    """Lets the ranks of one sync agree. All ranks call the same stages in the same order."""

    rank: int
    size: int

    def agree(self, stage: str, step: Callable[[], T]) -> list[T]:
        """Runs `step` here; returns every rank's result, by rank, once it has succeeded on all.

        Where it failed, its own exception is raised here after the others were told; elsewhere a
        `SyncError` names the stage, the rank and the error, or the ranks that gave no answer in
        time.
        """
        ...


class Alone:
    """One rank agrees with itself."""

    rank, size = 0, 1

    def agree(self, stage: str, step: Callable[[], T]) -> list[T]:
        return [step()]


class StoreConsensus:
    """Agrees over a store that all ranks reach, and perhaps others: what does not carry the key's
    seal is no rank's word, nor what was sealed in an earlier session of the same key, and nothing
    is unpickled. After a time-out, or when the store is gone,
    it is of no more use: the ranks do not know any longer what the others do.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, *, key: bytes, timeout: float = 60.0
    ) -> None:
        """key: the ranks' secret. timeout: seconds a rank waits for the others in one stage. The
        store is this object's own (a PrefixStore).
        """
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} must be in [0, {size})")
        if timeout <= 0:
            raise ValueError(f"timeout={timeout} must be positive, in seconds")
        self.rank, self.size, self.timeout = rank, size, timeout
        self._store, self._key = store, key
        self._session: str | None = None
        self._round = 0
        self._broken: str | None = None

    def agree(self, stage: str, step: Callable[[], T]) -> list[T]:
        if self._broken is not None:
            raise SyncError(stage, f"{self._broken}; start all ranks anew")
        error: Exception | None = None
        said: tuple[bool, Any]
        try:
            said = True, step()
        except Exception as problem:  # the others are told, then it is raised
            error, said = problem, (False, f"{type(problem).__name__}: {problem}")
        try:
            answers = self._exchange(stage, _PLAIN.text((stage, *said)))
        except SyncError as problem:
            self._broken = str(problem)
            raise (problem if error is None else error) from problem
        if error is not None:
            raise error
        return _values(stage, answers)

    def _exchange(self, stage: str, mine: str) -> list[tuple[str, bool, Any]]:
        prefix, before = f"{self._round}/", self._round - 2
        keys = [f"{prefix}{rank}" for rank in range(self.size)]
        try:
            if self._session is None:
                self._session = self._joined(stage)
            self._store.set(keys[self.rank], self._sealed(keys[self.rank], mine))
            decision = self._decide(prefix, keys)
            if decision != _GO:
                raise SyncError(stage, decision)
            answers = [
                _PLAIN.value(self._unsealed(*said))
                for said in zip(keys, self._all(keys), strict=True)
            ]
            # all ranks have passed the round in between, so nobody reads these any more
            if self._round == 1:
                self._store.delete_key(f"session/{self.rank}")
            if before >= 0:
                self._store.delete_key(f"{before}/{self.rank}")
                if self.rank == 0:
                    self._store.delete_key(f"{before}/decision")
        except Forged as error:
            raise SyncError(
                stage, f"somebody else writes to the ranks' store: {error}; keep strangers off it"
            ) from error
        except RuntimeError as error:
            if isinstance(error, SyncError):
                raise
            raise SyncError(
                stage, f"the ranks' store does not answer ({error}); its process may have ended"
            ) from error
        self._round += 1
        if strays := sorted({said[0] for said in answers} - {stage}):
            raise SyncError(
                stage, f"other ranks are in stage {strays[0]!r}: all ranks must make the same calls"
            )
        return answers

    def _joined(self, stage: str) -> str:
        """Return what tells this session from every other: a random number of each rank. One that
        a stranger repeats for another rank makes a new session, too, where no old seal counts.
        """
        keys = [f"session/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], secrets.token_hex(_KEY_BYTES))
        if silent := self._awaited(keys):
            raise SyncError(stage, silent)
        return b" ".join(self._all(keys)).hex()

    def _all(self, keys: list[str]) -> list[bytes]:
        if self._store.has_extended_api():  # type: ignore[attr-defined]  # missing in the stub
            return self._store.multi_get(keys)
        return [self._store.get(key) for key in keys]

    def _decide(self, prefix: str, keys: Sequence[str]) -> str:
        wanted = self._awaited(keys) or _GO
        place = f"{prefix}decision"
        return self._unsealed(
            place, self._store.compare_set(place, "", self._sealed(place, wanted))
        )

    def _awaited(self, keys: Sequence[str]) -> str | None:
        """Wait for every rank's key; return which ranks did not come in time."""
        try:
            self._store.wait(list(keys), timedelta(seconds=self.timeout))
        except dist.DistStoreError:
            silent = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if silent:
                return f"rank {self.rank} waited {self.timeout:g} s for {_ranks(silent)}, in vain"
        return None

    def _sealed(self, place: str, text: str) -> str:
        return seal(self._key, f"{self._session}/{place}", text).decode()

    def _unsealed(self, place: str, sealed: bytes) -> str:
        return unseal(self._key, f"{self._session}/{place}", sealed)


_made = itertools.count()


def group_consensus(
    group: dist.ProcessGroup, *, key: bytes | None = None, timeout: float = 60.0
) -> Consensus:
    """Makes a process group's consensus over its store. All ranks make as many, in the same order.

    key: the ranks' secret (`RankAddress.key`); None: rank 0 makes one and tells the others through
    the group.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return Alone()
    key = key or _told_key(group)
    store = dist.PrefixStore(f"memsaver/sync/{next(_made)}", group.get_group_store())
    return StoreConsensus(store, dist.get_rank(group), size, key=key, timeout=timeout)


def _told_key(group: dist.ProcessGroup) -> bytes:
    on_gpu = dist.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else "cpu"
    key = torch.frombuffer(bytearray(secrets.token_bytes(_KEY_BYTES)), dtype=torch.uint8).to(device)
    dist.broadcast(key, group_src=0, group=group)
    return bytes(key.tolist())


def _values(stage: str, answers: Sequence[tuple[str, bool, Any]]) -> list[Any]:
    failed = [f"rank {rank}: {value}" for rank, (_, ok, value) in enumerate(answers) if not ok]
    if failed:
        raise SyncError(stage, "; ".join(failed))
    return [value for _, _, value in answers]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
