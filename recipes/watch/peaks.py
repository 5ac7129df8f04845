"""The most memory of every process and device in each stage of a step.

In a stage each side's tags only come or only go. So a process's most is what its tags held before
or after, and torch's own peak; what is on the device besides (contexts, libraries) stays as it is.
Where one side's tags come while the other's go, they come into what has gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memsaver import Usage

TakeUsage = Callable[[], "Usage | None"]


class Peaks:
    """Collects, by stage: bytes of each process and of torch in it, by owner; of the fullest
    device; of the tags.

    Processes are counted without contexts and libraries; "device_bytes" is None on the CPU.
    """

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, Any]] = {}
        self._sources: dict[str, TakeUsage] = {}
        self._before: dict[str, dict[str, int]] = {}

    def watch(self, owner: str, take_usage: TakeUsage) -> None:
        """owner: a side, "trainer" or "rollout", with the number of its device in brackets where
        there are several.
        """
        self._sources[owner] = take_usage

    def passed(self, stage: str) -> None:
        """The stage has just ended. One that comes again in a step keeps the larger figures."""
        found: dict[str, Usage] = {}
        for owner, take in self._sources.items():
            if (usage := take()) is not None:
                found[owner] = usage
        tags: dict[str, int] = {}
        processes, torch = {}, {}
        gone, waits = Counter[str](), Counter[str]()
        for owner, usage in found.items():
            before = self._before.get(owner, usage.tags)
            most = _larger(before, usage.tags)
            self._before[owner] = usage.tags
            gone[_place(owner)] += sum(before.values()) - sum(usage.tags.values())
            waits[_place(owner)] += usage.torch_peak_bytes - usage.torch_bytes
            tags |= {f"{tag}{_place(owner)}": nbytes for tag, nbytes in most.items()}
            torch[owner] = usage.torch_peak_bytes
            # pages that only change their tag, out of the page pool, count once
            held = max(sum(before.values()), sum(usage.tags.values()))
            processes[owner] = held + usage.torch_peak_bytes
        entry = {
            "processes": processes,
            "torch": torch,
            "device_bytes": _device(found, +gone + waits),
            "tags": tags,
        }
        self.stages[stage] = _merged(self.stages[stage], entry) if stage in self.stages else entry

    def take(self) -> dict[str, dict[str, Any]]:
        """The stages since the last call."""
        stages, self.stages = self.stages, {}
        return stages


def _place(owner: str) -> str:
    return owner[owner.index("[") :] if "[" in owner else ""


def _device(found: Mapping[str, Usage], more: Mapping[str, int]) -> int | None:
    """Returns the fullest device's bytes: used now, plus what there was more of in the stage."""
    places: dict[str, int] = {}
    for owner, usage in found.items():
        if usage.device_used_bytes is not None:
            places[_place(owner)] = max(places.get(_place(owner), 0), usage.device_used_bytes)
    return max((used + more.get(place, 0) for place, used in places.items()), default=None)


def _larger(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {key: max(one.get(key, 0), other.get(key, 0)) for key in {**one, **other}}


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    devices = [entry["device_bytes"] for entry in (one, other) if entry["device_bytes"] is not None]
    larger = {name: _larger(one[name], other[name]) for name in ("processes", "torch", "tags")}
    return {**larger, "device_bytes": max(devices, default=None)}
