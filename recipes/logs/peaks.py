"""Peak bytes of each stage of a step.

Within a stage, the tags of a side either only come or only go. So the peak of a process is the
larger of its tags' bytes before and after the stage, plus torch's own peak. The rest of the
device's memory (contexts, libraries) does not change. If the tags of one side come while those of
the other go, they take the pages that become free.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from memsaver import Usage

ROLLOUT_GPU = " (engine's GPU)"  # ends the name of a stage on a GPU without a trainer rank
TakeUsage = Callable[[], Usage | None]


class Peaks:
    """Peak bytes of each stage: of processes, of torch in them, of tags, and of the fullest device.

    Processes are counted without contexts and libraries. On a CPU, "device_bytes" is None. Devices
    without a trainer count as "rollout_device_bytes", which is absent without such devices.
    """

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, Any]] = {}
        self._sources: dict[str, TakeUsage] = {}
        self._before: dict[str, dict[str, int]] = {}

    def watch(self, owner: str, take_usage: TakeUsage) -> None:
        """Register a process.

        `owner` is "trainer" or "rollout", followed by "[rank]" if there are several.
        """
        self._sources[owner] = take_usage

    def passed(self, stage: str) -> None:
        """Read all processes at the end of a stage; repeated stages keep the larger figures."""
        readings = {owner: take() for owner, take in self._sources.items()}
        usages = {owner: usage for owner, usage in readings.items() if usage is not None}
        tags: dict[str, int] = {}
        processes, torch = {}, {}
        freed, torch_extra = Counter[str](), Counter[str]()
        for owner, usage in usages.items():
            before, place = self._before.get(owner, usage.tags), _place(owner)
            self._before[owner] = usage.tags
            freed[place] += sum(before.values()) - sum(usage.tags.values())
            torch_extra[place] += usage.torch_peak_bytes - usage.torch_bytes
            larger = _larger(before, usage.tags)
            tags |= {f"{tag}{place}": nbytes for tag, nbytes in larger.items()}
            torch[owner] = usage.torch_peak_bytes
            # A page that moves from the page pool to a tag counts once.
            held = max(sum(before.values()), sum(usage.tags.values()))
            processes[owner] = held + usage.torch_peak_bytes
        more = +freed + torch_extra
        trained = {_place(owner) for owner in usages if owner.startswith("trainer")}
        apart = {owner: usage for owner, usage in usages.items() if _place(owner) not in trained}
        beside = {owner: usage for owner, usage in usages.items() if owner not in apart}
        entry: dict[str, Any] = {"processes": processes, "torch": torch, "tags": tags}
        entry["device_bytes"] = _device(beside or apart, more)
        if beside and apart:
            entry["rollout_device_bytes"] = _device(apart, more)
        self.stages[stage] = _merged(self.stages[stage], entry) if stage in self.stages else entry

    def take(self) -> dict[str, dict[str, Any]]:
        """Return and forget the stages since the last call."""
        stages, self.stages = self.stages, {}
        return stages


def _place(owner: str) -> str:
    return owner[owner.index("[") :] if "[" in owner else ""


def _device(usages: Mapping[str, Usage], more: Mapping[str, int]) -> int | None:
    """Return the fullest device's bytes: those used now plus those held earlier in the stage."""
    places: dict[str, int] = {}
    for owner, usage in usages.items():
        if usage.device_used_bytes is not None:
            places[_place(owner)] = max(places.get(_place(owner), 0), usage.device_used_bytes)
    return max((used + more.get(place, 0) for place, used in places.items()), default=None)


def _larger(first: Mapping[str, int], second: Mapping[str, int]) -> dict[str, int]:
    return {key: max(first.get(key, 0), second.get(key, 0)) for key in {**first, **second}}


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    larger: dict[str, Any] = {
        name: _larger(first[name], second[name]) for name in ("processes", "torch", "tags")
    }
    for name in first.keys() - larger:
        sizes = [entry[name] for entry in (first, second) if entry[name] is not None]
        larger[name] = max(sizes, default=None)
    return larger
