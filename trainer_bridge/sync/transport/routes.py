"""Decides, alike on all ranks, how each rank's bytes reach each target, and what that costs."""

import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["pages", "relay", "handle"]
Mode = Literal["auto", "pages", "relay", "handle"]
Pair = tuple[int, int]
"""A rank, and a target that it has bytes for."""


@dataclass(frozen=True, kw_only=True)
class Routes:
    """speakers: the rank that speaks for each target. indirect: pairs whose bytes go to that rank,
    which is perhaps itself the sender; all others write into the pages. handled: targets whose
    speaker passes bytes on by the handle, not into the pages.
    """

    speakers: tuple[int, ...]
    indirect: frozenset[Pair] = frozenset()
    handled: frozenset[int] = frozenset()

    @property
    def relayed(self) -> set[Pair]:
        """Returns the pairs whose bytes go from one rank to another."""
        return {(rank, target) for rank, target in self.indirect if rank != self.speakers[target]}

    def direct(self, rank: int) -> set[int]:
        """Returns the targets into whose pages the rank writes what it has for them."""
        return {
            target for target in range(len(self.speakers)) if (rank, target) not in self.indirect
        }

    def kind(self, pair: Pair) -> Kind:
        if pair not in self.indirect:
            return "pages"
        return "handle" if pair[1] in self.handled else "relay"


def choose(
    mode: str,
    pairs: Collection[Pair],
    speakers: Sequence[int],
    obstacles: Sequence[Mapping[int, str]],
) -> Routes:
    """obstacles: by rank, the targets whose pages it cannot map, and why. mode "auto": pages
    wherever they can be mapped. A ValueError says why what is asked for cannot be had.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"transport={mode!r} must be one of {', '.join(get_args(Mode))}")
    blocked = frozenset((rank, target) for rank, target in pairs if target in obstacles[rank])
    deaf = frozenset(target for target, rank in enumerate(speakers) if target in obstacles[rank])
    routes = functools.partial(Routes, speakers=tuple(speakers))
    if mode == "auto":
        return routes(indirect=blocked, handled=deaf)
    if mode == "handle":
        return routes(indirect=frozenset(pairs), handled=frozenset(range(len(speakers))))
    if mode == "pages":
        if blocked:
            rank, target = min(blocked)
            why = f"{obstacles[rank][target]} ({len(blocked)} such pairs)"
            text = f"transport='pages': rank {rank} cannot map target {target}: {why}"
            raise ValueError(f"{text}; use transport='auto'")
        return routes()
    if deaf:
        target = min(deaf)
        raise ValueError(
            f"transport='relay': rank {speakers[target]}, which speaks for target {target}, cannot "
            f"map it: {obstacles[speakers[target]][target]}; use transport='handle'"
        )
    sent = frozenset((rank, target) for rank, target in pairs if rank != speakers[target])
    if not sent:
        rule = "each rank speaks for all targets that it writes"
        raise ValueError(f"transport='relay': {rule}; use transport='pages'")
    return routes(indirect=sent)


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A way that bytes of a sync take, for a table. The same on every rank.

    pairs: (rank, target) whose bytes they are; of pages only those of different devices. nbytes: of
    a whole sync. staging_bytes: at most, of each rank that takes part, on its device and in host
    memory together. cost: against mapped pages. reason: why not pages.
    """

    kind: Kind
    through: str
    pairs: tuple[Pair, ...]
    nbytes: int
    staging_bytes: int
    cost: str
    reason: str

    def __str__(self) -> str:
        shown = ", ".join(f"{rank}->{target}" for rank, target in self.pairs[:8])
        more = f" and {len(self.pairs) - 8} more" if len(self.pairs) > 8 else ""
        return (
            f"weight sync by {self.kind} over {self.through} instead of mapped pages for "
            f"rank->target {shown}{more}: {self.nbytes / 2**20:.1f} MiB a sync, staging "
            f"{self.staging_bytes / 2**20:.0f} MiB a rank; {self.cost}. Why: {self.reason}"
        )


def transports(
    routes: Routes,
    sizes: Mapping[Pair, int],
    total: int,
    reasons: Mapping[Pair, str],
    *,
    wire: str,
    on_gpu: bool,
    buffers: Mapping[Kind, int],
) -> tuple[Transport, ...]:
    """Returns one for each kind that carries bytes. sizes: of the pairs known; total: of all pairs,
    known or not. wire: "gloo", "nccl". on_gpu: the shards are. buffers: bytes of staging, by kind.
    """
    nbytes: Counter[Kind] = Counter()
    pairs: dict[Kind, list[Pair]] = {kind: [] for kind in get_args(Kind)}
    for pair, size in sorted(sizes.items()):
        nbytes[routes.kind(pair)] += size
        pairs[routes.kind(pair)].append(pair)
    nbytes["pages"] = total - nbytes["relay"] - nbytes["handle"]
    relayed = any(pair in routes.relayed for pair in pairs["handle"])
    through = {
        "pages": "mapped memory",
        "relay": wire,
        "handle": f"{wire} and the handle" if relayed else "the handle",
    }
    return tuple(
        Transport(
            kind=kind,
            through=through[kind],
            pairs=tuple(pairs[kind]),
            nbytes=nbytes[kind],
            staging_bytes=buffers.get(kind, 0),
            cost=_cost(kind, wire, on_gpu),
            reason=_reason(pairs[kind], reasons) if kind != "pages" else "",
        )
        for kind in get_args(Kind)
        if nbytes[kind]
    )


def _cost(kind: Kind, wire: str, on_gpu: bool) -> str:
    if kind == "pages":
        return "one pass: cast, copy and digest"
    if kind == "relay" and wire == "nccl":
        return "packed, sent, unpacked: 2 more passes over device memory"
    passes = ", 2 passes over PCIe" if on_gpu else ""
    if kind == "relay":
        return f"packed, sent, unpacked: 2 more passes over memory{passes}"
    text = "packed, sent as messages, unpacked: 2 more passes over memory"
    return f"{text} and the messages' own copies{passes}"


def _reason(pairs: Sequence[Pair], reasons: Mapping[Pair, str]) -> str:
    found = [reasons[pair] for pair in pairs if pair in reasons]
    return found[0] if found else "asked for"
