"""The memory of an engine's KV cache: sleep and wake-up, growth, and loss of its content."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from memsaver import ContentWatch, MemorySaver, Release
from rollout.scheduling.kv_cache import Cache
from rollout.scheduling.prompt_source import PromptSource
from rollout.scheduling.scheduler import Scheduler
from rollout.tag_names import KV_CACHE


class CacheMemory:
    """The memory behind the keys and values of one engine, which calls this between steps.

    After a resume the KV cache must be prepared before the next step. `waking` prepares it, and
    `renew` does so after a resume or a discard that other users of the saver made. Methods
    that may find keys and values lost tell the engine's present source of prompts.

    Args:
        cache: The KV cache.
        scheduler: The requests, which start over when keys and values are lost.
        saver: The saver that has the tag `kv_cache`.
        drain: Waits for the steps under way.
    """

    def __init__(
        self, cache: Cache, scheduler: Scheduler, saver: MemorySaver, drain: Callable[[], None]
    ) -> None:
        self._cache, self._scheduler, self._saver, self._drain = cache, scheduler, saver, drain
        self._watch = ContentWatch(saver, KV_CACHE)
        self._renewed = True  # whether the KV cache was prepared after its last resume

    def sleep(self, tags: Sequence[str], release: Release, keep: bool) -> None:
        """Pause tags without their content, inside of `own_discards`; no request runs.

        Args:
            tags: The KV cache, and other tags that are paused together with it.
            release: Receiver of the memory, see `MemorySaver.pause`.
            keep: Whether cached pages move to the host first, if the engine has tiers.
        """
        if KV_CACHE in tags and not self._saver.is_paused(KV_CACHE):
            self._renewed = False
            self._scheduler.blocks.move_below(keep=keep)
            if self._cache.elastic is not None:
                self._cache.elastic.shrink()
        if tags:  # without tags the saver would pause all
            self._saver.pause(*tags, content="discard", release=release)

    @contextlib.contextmanager
    def waking(self, prompts: PromptSource, asleep: bool, partly: bool) -> Iterator[None]:
        """Resume the KV cache before the block, and pause it again if the block fails.

        Args:
            prompts: Present source of prompts.
            asleep: Whether to resume the KV cache; otherwise an elastic pool only stops to shrink.
            partly: Let an elastic pool start small, see `Engine.wake_up`.

        Raises:
            OutOfMemory: The device has too little memory. The KV cache is paused.
        """
        if self._cache.elastic is not None:
            self._cache.elastic.shrinking = False
        with self.own_discards(prompts), contextlib.ExitStack() as undo:
            if asleep:
                self._saver.resume(KV_CACHE)
                undo.callback(self._saver.pause, KV_CACHE, content="discard")
                self._cache.on_resume(partly)
            yield
            undo.pop_all()
            self._renewed |= asleep

    def fit(self, prompts: PromptSource) -> None:
        """Let an elastic pool grow or shrink toward the tokens that its requests can use.

        Args:
            prompts: Present source of prompts.
        """
        if self._cache.elastic is not None:
            with self.own_discards(prompts):
                self._cache.elastic.fit(self._scheduler.wanted_tokens, self._compact)

    def _compact(self, pages: int) -> bool:
        """Move all pages in use to the first `pages` pages; return whether that was possible."""
        self._drain()
        arriving = any(sample.remote for sample in self._scheduler.running)
        return not arriving and self._scheduler.blocks.compact(pages)

    def notice_loss(self, prompts: PromptSource) -> bool:
        """Start over if another user of the saver discarded or paused the KV cache.

        Args:
            prompts: Present source of prompts.

        Returns:
            Whether content of the KV cache was lost. The loss stays recorded until `renew`.
        """
        lost = bool(self._watch.lost(KV_CACHE))
        if lost or (self._scheduler.running and self._saver.is_paused(KV_CACHE)):
            self._start_over(prompts)
        return lost

    def renew(self, prompts: PromptSource, kept: bool) -> None:
        """Prepare the active KV cache for the next step.

        Args:
            prompts: Present source of prompts.
            kept: Whether its content is valid on all ranks; otherwise all keys and values are
                forgotten, and the loss is no longer recorded.
        """
        if not kept:
            self._start_over(prompts)
            self._watch.note(KV_CACHE)
            self._renewed = False
        if not self._renewed:
            self._cache.on_resume(partly=True)
            self._renewed = True

    @contextlib.contextmanager
    def own_discards(self, prompts: PromptSource) -> Iterator[None]:
        """Ignore discards of the KV cache inside the block, which are the engine's own.

        An earlier loss is handled first. It stays recorded, because all ranks must agree on it.

        Args:
            prompts: Present source of prompts.
        """
        lost = self.notice_loss(prompts)
        try:
            yield
        finally:
            if not lost:
                self._watch.note(KV_CACHE)

    def _start_over(self, prompts: PromptSource) -> None:
        """Forget all keys and values; running requests will compute theirs again."""
        self._scheduler.blocks.clear()
        self._scheduler.preempt_all()
        prompts.lost()
