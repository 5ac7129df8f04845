"""Any order of operations: content, addresses, bytes and states agree with a plain model after
every step.
"""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)

import memsaver
from memsaver.tag import transaction as switch
from tests.helpers.effort import rounds
from tests.helpers.memory import process_bytes
from tests.helpers.memsaver.savers import until

TAGS = {"weights": "host", "kv_cache": "discard", "optim": "host"}
tags = st.sampled_from(sorted(TAGS))
sizes = st.integers(1, 90_000)


class SaverMachine(RuleBasedStateMachine):
    """The model: per tag whether it is paused or aliases its pages, and per tensor its value (None:
    undefined).
    """

    tensors = Bundle("tensors")
    device, page, scale, regions = "cpu", 4096, 1, True

    @initialize(begun=st.booleans())
    def start(self, begun: bool) -> None:
        """begun: all tags are there, with a tensor that stays."""
        self.limit = self.scale << 20
        # loads the kernels
        assert bool((torch.empty(4, dtype=torch.uint8, device=self.device).fill_(77) == 77).all())
        self.floor = self._used()
        self.saver = memsaver.MemorySaver(self.device, limit_bytes=self.limit)
        self.peer = memsaver.MemorySaver(self.device, limit_bytes=self.limit // 2)
        self.theirs = self.peer.empty(
            100_000 * self.scale, torch.uint8, tag="theirs", content="host"
        ).fill_(77)
        self.paused: dict[str, bool] = {}
        self.aliased: set[str] = set()
        self.asleep: dict[str, int] = {}  # bytes that a resume of the tag brings back
        self.grace, switch.LEASE_GRACE_SECONDS = switch.LEASE_GRACE_SECONDS, 60.0  # never needed
        self.kept = memsaver.LeaseCache()
        self.alive: dict[int, dict] = {}
        self.counter = 0
        for tag in sorted(TAGS) if begun else ():
            self.allocate(tag, 5000, False)

    def teardown(self) -> None:
        if hasattr(self, "saver"):
            self.alive.clear()
            self.kept.close()
            self.saver.close()
            del self.theirs
            self.peer.close()
            switch.LEASE_GRACE_SECONDS = self.grace
            # imports of a closed saver are let go of by a thread
            until(lambda: self._used() == self.floor)

    def _used(self) -> int:
        gc.collect()
        if self.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return process_bytes(self.device)

    def _held(self, tag: str) -> int:
        return sum(item["tensor"].nbytes for item in self.alive.values() if item["tag"] == tag)

    @rule(target=tensors, tag=tags, size=sizes, region=st.booleans())
    def allocate(self, tag: str, size: int, region: bool) -> int:
        self.counter += 1
        nbytes = size * self.scale
        committed = self.saver.report().committed_bytes
        try:
            if region and self.regions:
                with self.saver.region(tag, content=TAGS[tag]):
                    tensor = torch.empty(nbytes, dtype=torch.uint8)
            else:
                tensor = self.saver.empty(nbytes, torch.uint8, tag=tag, content=TAGS[tag])
        except memsaver.StateError:
            assert self.paused[tag]
            return -1
        except memsaver.LeaseError:
            assert tag in self.aliased
            return -1
        except memsaver.OutOfMemory as error:
            report, most = self.saver.report(), self.limit - nbytes - self.page
            assert committed - report.pool_bytes > most or report.committed_bytes > most
            assert error.missing_bytes > 0 and report.committed_bytes <= committed
            self.paused.setdefault(tag, False)
            return -1
        assert not self.paused.setdefault(tag, False)
        value = self.counter % 251
        tensor.fill_(value)
        self.alive[self.counter] = {
            "tag": tag,
            "tensor": tensor,
            "address": tensor.data_ptr(),
            "value": value,
        }
        return self.counter

    @rule(key=consumes(tensors))
    def free(self, key: int) -> None:
        self.alive.pop(key, None)

    @rule(
        tag=tags,
        content=st.sampled_from([None, "host", "discard"]),
        release=st.sampled_from(["driver", "retain", "hand_over"]),
    )
    def pause(self, tag: str, content: str | None, release: str) -> None:
        if tag not in self.paused:
            return
        to = self.peer.pool_ticket() if release == "hand_over" else None
        committed = self.saver.report().tags[tag].committed_bytes
        total = self.saver.report().committed_bytes + self.peer.report().committed_bytes
        try:
            self.saver.pause(tag, content=content, release=release, to=to)
        except memsaver.LeaseError as error:
            assert "would pass the limit" in str(error)
            return
        except ValueError:
            assert tag in self.aliased and (content or TAGS[tag]) == "host"
            return
        if tag in self.aliased:
            self.aliased.remove(tag)
        elif not self.paused[tag] and (content or TAGS[tag]) == "discard":
            for item in self.alive.values():
                if item["tag"] == tag:
                    item["value"] = None
        if not self.paused[tag] and committed:
            self.asleep[tag] = committed
        self.paused[tag] = True
        after = self.saver.report().committed_bytes + self.peer.report().committed_bytes
        assert after == total or (release == "driver" and after < total)

    @precondition(lambda self: getattr(self, "paused", None))
    @rule(number=st.integers(0, 2), ready=st.booleans(), back=st.booleans())
    def alias(self, number: int, ready: bool, back: bool) -> None:
        """number: of the tag. ready: it is paused first, and the peer awake. back: at once."""
        tag = sorted(self.paused)[number % len(self.paused)]
        if ready and tag not in self.aliased:
            self.pause(tag, None, "driver")
            self.peer_wakes()
        most = self.peer.report().tags["theirs"].committed_bytes
        try:
            self.saver.alias(tag, self.peer.share("theirs"))
        except memsaver.StateError:
            assert not self.paused[tag]
        except memsaver.LeaseError:
            assert tag in self.aliased or not most
        except ValueError:
            assert self.asleep[tag] > most
        else:
            assert self.paused[tag]
            self.paused[tag] = False
            self.aliased.add(tag)
        if back and tag in self.aliased:
            self.agrees()
            self.pause(tag, "discard", "driver")

    @precondition(lambda self: list(getattr(self, "paused", {}).values()).count(False) >= 2)
    @rule(left=st.integers(0, 2))
    def exchange(self, left: int) -> None:
        """left: the number of the tag that is not taken, where three are active."""
        active = [tag for tag in sorted(self.paused) if not self.paused[tag]]
        one, other = active[:left] + active[left + 1 :] if len(active) == 3 else active
        try:
            size = max(self.saver.report().tags[tag].committed_bytes for tag in (one, other))
            for tag in (one, other):
                self.saver.resize(tag, size)
            before = [self._bytes(tag, size) for tag in (one, other)]
            self.saver.exchange(one, other)
        except memsaver.OutOfMemory:
            return
        except memsaver.LeaseError:
            assert {one, other} & self.aliased
            return
        assert all(map(torch.equal, before, [self._bytes(tag, size) for tag in (other, one)]))
        for item in self.alive.values():
            if item["tag"] in (one, other) and item["value"] is not None:
                item["tensor"].fill_(item["value"])

    def _bytes(self, tag: str, size: int) -> torch.Tensor:
        with memsaver.attach(self.saver.share(tag)) as lease:
            return lease.tensor((size,), torch.uint8).clone()

    @rule(release=st.sampled_from(["driver", "retain", "hand_over"]))
    def peer_sleeps(self, release: str) -> None:
        to = self.saver.pool_ticket() if release == "hand_over" else None
        with pytest.MonkeyPatch.context() as patch:
            if self.aliased:
                patch.setattr(switch, "LEASE_GRACE_SECONDS", 0.01)
            try:
                self.peer.pause(release=release, to=to)
            except memsaver.LeaseError as error:
                assert "would pass the limit" in str(error) or (
                    self.aliased and "'theirs' by process" in str(error)
                )

    @rule()
    def peer_wakes(self) -> None:
        self.peer.resume()  # what it keeps must not be in its own way
        assert bool((self.theirs == 77).all())

    @rule(peer=st.booleans())
    def trim(self, peer: bool) -> None:
        saver = self.peer if peer else self.saver
        before = saver.report()
        freed = saver.trim()
        after = saver.report()
        assert (
            before.committed_bytes - after.committed_bytes == freed >= before.pool_bytes
            and not after.pool_bytes
        )

    @rule()
    def resume_all(self) -> None:
        try:
            self.saver.resume()
            self.paused = dict.fromkeys(self.paused, False)
        except memsaver.OutOfMemory as error:
            assert (
                error.requested_bytes + self.saver.report().committed_bytes - self.limit
                == error.missing_bytes
                > 0
            )

    @rule(tag=tags)
    def resume(self, tag: str) -> None:
        if tag not in self.paused:
            return
        try:
            self.saver.resume(tag)
            self.paused[tag] = False
        except memsaver.OutOfMemory:
            assert self.paused[tag]

    @rule(tag=tags, value=st.integers(0, 250), anew=st.booleans())
    def use(self, tag: str, value: int, anew: bool) -> None:
        """Through a lease that stays mapped (anew: until now): it shows the tag's pages, whichever
        they are by now.
        """
        if anew:
            self.kept.close()
            self.kept = memsaver.LeaseCache()
        if tag not in self.paused:
            return
        committed = self.saver.report().tags[tag].committed_bytes
        try:
            with self.kept.use(self.saver.share(tag, writable=True), at_least=committed) as lease:
                for item in (item for item in self.alive.values() if item["tag"] == tag):
                    offset = self.saver.offset_of(item["tensor"])
                    seen = lease.tensor((len(item["tensor"]),), torch.uint8, offset)
                    assert item["value"] is None or bool((seen == item["value"]).all())
                    item["value"] = value
                    seen.fill_(value)
        except memsaver.LeaseError:
            assert self.paused[tag] or tag in self.aliased

    @rule(key=tensors)
    def rewrite(self, key: int) -> None:
        item = self.alive.get(key)
        if item and not self.paused[item["tag"]] and item["tag"] not in self.aliased:
            item["value"] = (item["value"] or 0) * 7 % 251
            item["tensor"].fill_(item["value"])

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "saver"):
            return
        self.saver.check_integrity()
        report = self.saver.report()
        self.peer.check_integrity()
        held = sum(tag.committed_bytes for tag in report.tags.values()) + report.pool_bytes
        assert report.committed_bytes == held <= self.limit
        for tag, paused in self.paused.items():
            assert (report.tags[tag].state == "paused") == paused == (self.saver.is_paused(tag))
            assert report.tags[tag].live_bytes == self._held(tag)
            assert bool(report.tags[tag].aliased_bytes) == (tag in self.aliased)
            assert report.tags[tag].leases <= (not paused and tag not in self.aliased), (
                "at most the one that is kept"
            )
        for item in self.alive.values():
            discards = self.saver.discards(item["tag"])
            if item["value"] is None or item["tag"] in self.aliased:
                assert discards > item["discards"]
            else:
                item["discards"] = discards
            assert item["tensor"].data_ptr() == item["address"]
            if item["tag"] in self.aliased:
                assert bool((item["tensor"] == 77).all())
            elif not self.paused[item["tag"]] and item["value"] is not None:
                assert bool((item["tensor"] == item["value"]).all())


class CudaMachine(SaverMachine):
    """Without regions: torch makes segments of 2 and 20 MiB there, unknown to the model."""

    device, page, scale, regions = "cuda:0", 2 << 20, 128, False


TestSaver = pytest.mark.soak(SaverMachine.TestCase)
TestSaverOnGpu = pytest.mark.gpu(pytest.mark.alone(pytest.mark.soak(CudaMachine.TestCase)))
TestSaver.settings = TestSaverOnGpu.settings = settings(
    max_examples=rounds(15, 400), stateful_step_count=25
)
