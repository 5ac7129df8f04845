"""Random orders of operations, compared with a plain model after every step."""

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
from tests.helpers.case_selection import rounds
from tests.helpers.memory import process_bytes, settled
from tests.helpers.memsaver.savers import driver_calls, until

TAGS = {"weights": "host", "kv_cache": "discard", "optim": "disk"}
tags = st.sampled_from(sorted(TAGS))
sizes = st.integers(1, 90_000)


class SaverMachine(RuleBasedStateMachine):
    """State machine of a saver, with a model of its tags and tensors.

    The model knows for each tag whether it is paused or aliased, and for each tensor its value and
    how many leading bytes have the value; the other bytes are undefined.
    """

    tensors = Bundle("tensors")
    device, page, scale, regions = "cpu", 4096, 1, True
    counts = True  # whether an example must leave the bytes in use that it found

    @initialize(begun=st.booleans())
    def start(self, begun: bool) -> None:
        """Create the savers, and with `begun` a permanent tensor on every tag."""
        self.limit = self.scale << 20
        self.floor = self._used()
        self.saver = memsaver.MemorySaver(self.device, limit_bytes=self.limit)
        self.peer = memsaver.MemorySaver(self.device, limit_bytes=self.limit // 2)
        self.peer_tensor = self.peer.empty(
            100_000 * self.scale, torch.uint8, tag="theirs", content="host"
        ).fill_(77)
        self.paused: dict[str, bool] = {}
        self.aliased: set[str] = set()
        self.asleep: dict[str, int] = {}  # maximum bytes that a resume maps
        self.watch = memsaver.ContentWatch(self.saver)
        self.discarded: set[str] = set()  # tags whose content this step discards
        # No pause should have to wait for a lease; one that does now hangs noticeably.
        self.grace, switch.LEASE_GRACE_SECONDS = (
            switch.LEASE_GRACE_SECONDS,
            60.0,
        )
        self.kept = memsaver.LeaseCache()
        self.alive: dict[int, dict] = {}
        self.counter = 0
        for tag in sorted(TAGS) if begun else ():
            self.allocate(tag, 5000, "empty")

    def teardown(self) -> None:
        if hasattr(self, "saver"):
            self.alive.clear()
            self.kept.close()
            self.saver.close()
            del self.peer_tensor
            self.peer.close()
            switch.LEASE_GRACE_SECONDS = self.grace
            if self.counts:  # a thread releases the imports of a closed saver
                until(lambda: self._used() == self.floor)

    def _used(self) -> int:
        gc.collect()
        if self.device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return process_bytes(self.device)

    def _on(self, tag: str) -> list[dict]:
        return [item for item in self.alive.values() if item["tag"] == tag]

    def _write(self, item: dict, value: int) -> None:
        view = self.saver.backed_view(item["tensor"]).fill_(value)
        item |= {"value": value, "size": len(view)}

    def _shown(self, item: dict) -> bool:
        """Return whether an active tensor shows its value."""
        view = self.saver.backed_view(item["tensor"])[: item["size"]]
        return len(view) == item["size"] and bool((view == item["value"]).all())

    def _lose(self, tag: str) -> None:
        """Note that the content of the tag is undefined now."""
        self.discarded.add(tag)
        for item in self._on(tag):
            item["size"] = 0

    @rule(target=tensors, tag=tags, size=sizes, how=st.sampled_from(["empty", "elastic", "region"]))
    def allocate(self, tag: str, size: int, how: str) -> int:
        self.counter += 1
        nbytes = size * self.scale
        committed, known = self.saver.report().committed_bytes, tag in self.saver.tags
        missing = self.saver.unbacked_bytes(tag) if known and not self.paused[tag] else 0
        try:
            if how == "region" and self.regions:
                with self.saver.region(tag, content=TAGS[tag]):
                    tensor = torch.empty(nbytes, dtype=torch.uint8)
            else:
                place = {"tag": tag, "content": TAGS[tag], "elastic": how == "elastic"}
                tensor = self.saver.empty(nbytes, torch.uint8, **place)
        except memsaver.StateError:
            assert self.paused[tag]
            return -1
        except memsaver.LeaseError:
            assert tag in self.aliased
            return -1
        except memsaver.OutOfMemory as error:
            report, most = self.saver.report(), self.limit - nbytes - missing - 2 * self.page
            assert committed - report.pool_bytes > most or report.committed_bytes > most
            assert error.missing_bytes > 0 and report.committed_bytes <= committed
            if tag in self.saver.tags:
                self.paused.setdefault(tag, False)
            return -1
        assert not self.paused.setdefault(tag, False)
        item = {"tag": tag, "tensor": tensor, "address": tensor.data_ptr()}
        self._write(item, self.counter % 251)
        assert item["size"] == nbytes
        self.alive[self.counter] = item
        return self.counter

    @rule(key=consumes(tensors))
    def free(self, key: int) -> None:
        self.alive.pop(key, None)

    @rule(
        tag=tags,
        content=st.sampled_from([None, "host", "disk", "discard"]),
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
            assert tag in self.aliased and (content or TAGS[tag]) != "discard"
            return
        if tag in self.aliased:
            self.aliased.remove(tag)
            self.discarded.add(tag)
        elif not self.paused[tag]:
            self._note_pause(tag, content, committed)
        self.paused[tag] = True
        after = self.saver.report().committed_bytes + self.peer.report().committed_bytes
        assert after == total or (release == "driver" and after < total)

    def _note_pause(self, tag: str, content: str | None, committed: int) -> None:
        """Note that an active tag with this many bytes was paused."""
        self.asleep[tag] = committed
        if (content or TAGS[tag]) == "discard":
            self._lose(tag)

    @rule(out=tags, into=tags, content=st.sampled_from([None, "host", "discard"]))
    def swap(self, out: str, into: str, content: str | None) -> None:
        if not {out, into} <= self.paused.keys():
            return
        committed = self.saver.report().tags[out].committed_bytes
        try:
            self.saver.swap(pause=out, resume=into, content=content)
        except memsaver.StateError:
            assert self.paused[out] or not self.paused[into]
        except memsaver.LeaseError:
            assert out in self.aliased
        except ValueError:
            assert (content or TAGS[out]) == "disk"
        except memsaver.OutOfMemory:
            assert self.asleep[into] > 0
        else:
            assert self.paused[into] and not self.paused[out]
            self._note_pause(out, content, committed)
            self.paused |= {out: True, into: False}

    @precondition(lambda self: getattr(self, "paused", None))
    @rule(number=st.integers(0, 2), ready=st.booleans(), back=st.booleans())
    def alias(self, number: int, ready: bool, back: bool) -> None:
        """Map the peer's pages behind the tag with this number.

        With `ready`, pause the tag and wake the peer first. With `back`, end the alias immediately.
        """
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
            self.discarded.add(tag)
        if back and tag in self.aliased:
            self.agrees()
            self.pause(tag, "discard", "driver")

    @precondition(lambda self: list(getattr(self, "paused", {}).values()).count(False) >= 2)
    @rule(left=st.integers(0, 2))
    def exchange(self, left: int) -> None:
        """Exchange two active tags; if there are three, leave out the one with number `left`."""
        active = [tag for tag in sorted(self.paused) if not self.paused[tag]]
        one, other = active[:left] + active[left + 1 :] if len(active) == 3 else active
        try:
            size = max(self.saver.report().tags[tag].committed_bytes for tag in (one, other))
            for tag in (one, other):
                self.saver.resize(tag, size)
            before = [self._bytes(tag, size) for tag in (one, other)]
            calls = driver_calls(self.saver)
            self.saver.exchange(one, other)
        except memsaver.OutOfMemory:
            return
        except memsaver.LeaseError:
            assert {one, other} & self.aliased
            return
        made = {name for name, stats in driver_calls(self.saver).items() if stats != calls[name]}
        assert made <= {"map", "unmap", "set_access", "synchronize"}, "copied, cleared or created"
        assert all(map(torch.equal, before, [self._bytes(tag, size) for tag in (other, one)]))
        for item in self._on(one) + self._on(other):
            self._write(item, item["value"])
        self.discarded |= {one, other}

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
        self.peer.resume()  # succeeds, because the peer's retained memory is reused
        assert bool((self.peer_tensor == 77).all())

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

    @rule(tag=tags, size=st.integers(0, 150_000))
    def resize(self, tag: str, size: int) -> None:
        if tag not in self.paused:
            return
        nbytes, missing = size * self.scale, self.saver.unbacked_bytes(tag)
        try:
            backed = self.saver.resize(tag, nbytes)
        except memsaver.StateError:
            assert self.paused[tag]
        except memsaver.LeaseError:
            assert tag in self.aliased
        except memsaver.OutOfMemory as error:
            assert error.missing_bytes > 0
        else:
            assert not self.paused[tag] and tag not in self.aliased and backed >= nbytes
            assert self.saver.report().tags[tag].committed_bytes == backed
            if self.saver.unbacked_bytes(tag) > missing:
                self.discarded.add(tag)
            for item in self._on(tag):
                item["size"] = min(item["size"], len(self.saver.backed_view(item["tensor"])))

    @rule(tag=st.one_of(st.none(), tags), prefetched=st.booleans())
    def resume(self, tag: str | None, prefetched: bool) -> None:
        """Resume one tag, or all tags for None."""
        chosen = [tag] if tag else list(self.paused)
        if not chosen or tag not in (None, *self.paused):
            return
        try:
            if prefetched:
                self._prefetch(chosen)
            else:
                self.saver.resume(*([tag] if tag else ()))
            self.paused |= dict.fromkeys(chosen, False)
        except memsaver.OutOfMemory as error:
            report = self.saver.report()
            assert any(self.paused[tag] for tag in chosen)
            held = report.committed_bytes - report.pool_bytes
            assert error.requested_bytes + held - self.limit == error.missing_bytes > 0

    def _prefetch(self, chosen: list[str]) -> None:
        """Prefetch tags, the last tensor first, and check each tensor when it has arrived."""
        asleep = [tag for tag in chosen if self.paused[tag]]
        items = [item for item in reversed(self.alive.values()) if item["tag"] in asleep]
        prefetch = self.saver.begin_resume(*chosen, order=[item["tensor"] for item in items])
        for item in items:
            prefetch.wait([self.saver.backed_view(item["tensor"])])
            assert self._shown(item)
        prefetch.wait()

    @rule(tag=tags, version=st.integers(1, 2), save=st.booleans())
    def name(self, tag: str, version: int, save: bool) -> None:
        """Name a version that may be wrong: a pause that trusts the name would lose content."""
        if tag not in self.paused:
            return
        try:
            if not save:
                self.saver.mark_clean(tag, version)
            elif copied := self.saver.save(tag, version):
                copied.synchronize()
        except memsaver.StateError:
            assert self.paused[tag]
        except memsaver.LeaseError:
            assert tag in self.aliased

    @rule(tag=tags, value=st.integers(0, 250), fresh=st.booleans())
    def use(self, tag: str, value: int, fresh: bool) -> None:
        """Check and write the tag's tensors through a cached lease, or with `fresh` a new one."""
        if fresh:
            self.kept.close()
            self.kept = memsaver.LeaseCache()
        if tag not in self.paused:
            return
        committed = self.saver.report().tags[tag].committed_bytes
        try:
            with self.kept.use(self.saver.share(tag, writable=True), at_least=committed) as lease:
                for item in self._on(tag):
                    if nbytes := len(self.saver.backed_view(item["tensor"])):
                        offset = self.saver.offset_of(item["tensor"])
                        view = lease.tensor((nbytes,), torch.uint8, offset)
                        assert bool((view[: item["size"]] == item["value"]).all())
                        item |= {"value": value, "size": nbytes}
                        view.fill_(value)
        except memsaver.LeaseError:
            assert self.paused[tag] or tag in self.aliased

    @rule(key=tensors)
    def rewrite(self, key: int) -> None:
        item = self.alive.get(key)
        if item and not self.paused[item["tag"]] and item["tag"] not in self.aliased:
            self._write(item, item["value"] * 7 % 251)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "saver"):
            return
        self.saver.check_integrity()
        report = self.saver.report()
        self.peer.check_integrity()
        held = sum(tag.committed_bytes for tag in report.tags.values()) + report.pool_bytes
        assert report.committed_bytes == held <= self.limit
        assert {*self.watch.lost(*self.paused)} == self.discarded
        self.watch.note(*self.paused)
        self.discarded.clear()
        for tag, paused in self.paused.items():
            assert (report.tags[tag].state == "paused") == paused == (self.saver.is_paused(tag))
            held = sum(item["tensor"].nbytes for item in self._on(tag))
            assert report.tags[tag].live_bytes == held
            assert bool(report.tags[tag].aliased_bytes) == (tag in self.aliased)
            assert report.tags[tag].leases <= (not paused and tag not in self.aliased), (
                "more than the cached lease"
            )
        for item in self.alive.values():
            assert item["tensor"].data_ptr() == item["address"]
            if item["tag"] in self.aliased:
                assert bool((self.saver.backed_view(item["tensor"]) == 77).all())
            elif not self.paused[item["tag"]]:
                assert self._shown(item)


class CudaMachine(SaverMachine):
    """The state machine on a GPU, without regions: the model does not know torch's segments."""

    device, page, scale, regions = "cuda:0", 2 << 20, 128, False


TestSaver = pytest.mark.soak(SaverMachine.TestCase)


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.soak
class TestSaverOnGpu(CudaMachine.TestCase):
    """Runs all examples twice, because the code of a kernel stays on the device once loaded."""

    def runTest(self) -> None:
        CudaMachine.counts = False
        super().runTest()
        settled(lambda: process_bytes(CudaMachine.device), still=0.5, patience=30.0)
        CudaMachine.counts = True
        super().runTest()


TestSaver.settings = TestSaverOnGpu.settings = settings(
    max_examples=rounds(35, 400), stateful_step_count=25
)
