"""The generating engine: requests in, completions out; memory that sleeps; weights that are
replaced in place.
"""

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kvcache import KVPool
from kvcache.config import check_option
from memsaver import Content, ContentWatch, MemorySaver, StateError, Ticket
from memsaver.content_watch import lost_by_others, shortfall
from memsaver.memory import empty_torch_cache
from memsaver.system.interrupts import deliver, held
from rollout.config import EngineConfig
from rollout.engine_base import EngineBase, check_sleep_level, handing_over
from rollout.model.decoder import ModelConfig, aliases, buffers, rank_groups, rank_model
from rollout.model.loading import iter_checkpoint, load_model_config, read_buffers, resolve_model
from rollout.ops.row_wise import probe_products
from rollout.parallel import TensorParallel
from rollout.protocols import Progress
from rollout.requests import Completion, SamplingParams
from rollout.serving.kv_cache import Cache
from rollout.serving.runner import DecodeGraphs, ModelRunner, ladder
from rollout.serving.samples import EngineStats, Sample, Step, names_of
from rollout.serving.scheduler import Intake, Scheduler, for_each
from rollout.tag_names import KV_CACHE, TAGS, WEIGHTS
from rollout.weights.messages import UpdateReceipt, WeightOffer
from rollout.weights.params import ParamGroup
from rollout.weights.store import WeightStore
from rollout.weights.update import WeightUpdate, require_active

_log = logging.getLogger("rollout")
UNFINISHED = ("raise", "preempt", "abort")


class Engine(EngineBase):
    """One model on one device, or one rank's part of it. Not thread-safe: one call at a time
    (callbacks of `generate` may call back in).

    Weights are under tag `weights`, keys and values under tag `kv_cache`, on a GPU what CUDA graphs
    compute with under tag `cuda_graph`, all bookkeeping outside of them. The engine generates only
    while all its tags are active and the weights are some version; otherwise it says why not. What
    others do with its saver is noticed: keys and values that they discard are computed again,
    weights that they discard are undefined.

    Ranks of a tensor-parallel engine make the same calls in the same order, and all get the same
    answers.

    What it is made of can be looked at: `store` (the weights), `cache` (pool, request table,
    states), `blocks` and `prefixes` (pages), `scheduler` (requests) and `runner` (the computing
    half). Change it by the methods alone.
    """

    store: WeightStore

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        dtype: torch.dtype,
        saver: MemorySaver,
        group: ProcessGroup | None = None,
    ) -> None:
        """Takes the memory; the weights are undefined until `load` or a weight update. group: of
        the tensor-parallel ranks; its time-out is how long one waits for another that fails.
        """
        _check_experts(model, config)
        if config.fp32_router:
            model = model.with_fp32_routers()
        self._ranks = TensorParallel(config.tensor_parallel_size, group)
        self._ranks.check_same("the model or EngineConfig", f"{model} {config} {dtype}")
        self.model = model
        self.config = config
        self.saver = saver
        self.max_context_len = _context_len(model, config)
        split = self._ranks.rank, self._ranks.size, config.expert_parallel
        groups = rank_groups(model, *split)
        self.store = WeightStore(groups, aliases(model), dtype, saver, buffers=buffers(model))
        if saver.device.type == "cuda" and dtype != torch.float32:
            self._probe_products(groups, dtype)
        self.cache = Cache(model, config, self.max_context_len, dtype, saver)
        self.blocks = self.cache.blocks
        self.prefixes = self.cache.prefix_blocks(config)
        self.scheduler = Scheduler(self.prefixes, config)
        mine = rank_model(model, *split)
        self.runner = ModelRunner(
            mine, self.store, self.cache, attention=config.attention, ranks=self._ranks
        )
        if config.return_routed_experts:
            self.runner.record_routing(config.max_running + config.max_prefill_tokens)
        if config.cuda_graphs and saver.device.type == "cuda" and self.runner.capturable:
            self.runner.capture(config.graph_batch_sizes or ladder(config.max_running), saver)
        self.tags = TAGS if self.runner.graphs is not None else (WEIGHTS, KV_CACHE)
        self._intake = Intake(
            model, self.scheduler, max_context_len=self.max_context_len, seed=config.seed
        )
        self._update = WeightUpdate(self.store, self.saver, self.prefixes.new_weights)
        self._watch = ContentWatch(saver, KV_CACHE)
        self._renewed = True  # the KV cache, since its memory came back

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        kv_tokens: int = 4096,
        saver: MemorySaver | None = None,
        load_weights: bool = True,
        group: ProcessGroup | None = None,
        **engine_config: Any,
    ) -> Self:
        """An engine for a model directory, or ORG/NAME of the Hub, weights loaded as version 0.

        load_weights: False reads no weights, which may then be missing; they are undefined until an
        update commits.
        engine_config: fields of EngineConfig. ValueError names what the directory or the
        configuration gets wrong.
        """
        config = EngineConfig(kv_tokens=kv_tokens, **engine_config)
        path = resolve_model(path)
        model = load_model_config(path)
        if saver is None:
            saver = MemorySaver(device=device)
        elif saver.device.type != torch.device(device).type:
            raise ValueError(
                f"device={device} but the saver is on {saver.device}; use one device for both"
            )
        engine = cls(model, config, dtype=dtype, saver=saver, group=group)
        if load_weights:
            engine.load(path)
        else:
            engine.store.set_buffers(read_buffers(path, engine.store.buffers), str(path))
        return engine

    def _probe_products(self, groups: list[ParamGroup], dtype: torch.dtype) -> None:
        """Measure products; warn where they depend on the batch. The weights are undefined yet."""
        if shapes := probe_products(self.store.products(groups)):
            named = ", ".join(f"{words} x {inner}" for words, inner in shapes)
            text = (
                "%s products with weights of %s depend on the number of rows on this %s (torch %s):"
                " the same prompt may get other last bits in another batch"
            )
            gpu = torch.cuda.get_device_name(self.saver.device)
            _log.warning(text, dtype, named, gpu, torch.__version__)

    def load(self, path: str | Path) -> None:
        """Load a checkpoint of the same model as version 0. Ends an update that is open."""
        require_active(self.saver, WEIGHTS, "load weights")
        self._update.require_own("load weights")
        self._update.abort(f"loading from {path} did not finish")
        self.prefixes.new_weights()
        self.store.load(iter_checkpoint(path), str(path))

    # ---------------------------------------------------------------- generate

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[list[Completion]]:
        """Continue every prompt params.n times; result [prompt][sample], of a beam search the best
        n, best first.
        params: one for all, or one a prompt.

        Prompts beyond what the pool holds wait their turn. Raises StateError with the reason while
        the engine is unavailable, ValueError naming a prompt that could never fit. Whatever raises,
        no request of this call is left. A Ctrl-C, or another signal that Python handles, waits for
        the end of the present step.
        """
        self._require_current(together=True)
        each = for_each(prompts, params)
        for i, (prompt, param) in enumerate(zip(prompts, each, strict=True)):
            self._intake.check(f"prompt {i}", prompt, param)
            if param.beam_width > 1 and self.cache.withheld_pages:
                raise ValueError(
                    f"prompt {i}: no beam search in a pool that woke partly; sleep, then wake_up()"
                )
        with held():
            requests = [self._submit(*pair) for pair in zip(prompts, each, strict=True)]
            samples = list(chain.from_iterable(requests))
            if self.cache.elastic is not None:
                self.cache.elastic.hurry()
            try:
                while any(sample.finish_reason is None for sample in samples):
                    self._step()
                    if on_progress is not None:
                        done = sum(sample.finish_reason is not None for sample in samples)
                        tokens = sum(len(sample.output) for sample in samples)
                        on_progress(done, len(samples), tokens)
                    deliver()
            except BaseException as error:
                self._ranks.fail(error)
                with contextlib.suppress(StateError):  # the saver is closed
                    self._notice_loss()
                self.scheduler.abort(samples)
                raise
        return [list(map(Sample.completion, each[: each[0].params.n])) for each in requests]

    def _submit(self, prompt: Sequence[int], params: SamplingParams) -> list[Sample]:
        """Queue a request that was checked; an engine that does more with each overrides this."""
        return self._intake.submit(prompt, params)

    def _step(self) -> None:
        """One forward for whatever the scheduler chose, and a token for every sample that is due
        one.
        """
        self._require_current()
        if self.cache.elastic is not None:
            with self._own_discards():
                self.cache.elastic.fit(self.scheduler.wanted_tokens, self._compact)
        try:
            self._run(self.scheduler.schedule())
        except BaseException:
            # pages were taken for tokens that were not computed: start those over
            self.scheduler.preempt_all()
            raise

    def _compact(self, pages: int) -> bool:
        """Has the first `pages` pages of the pool hold all that requests use, if they can."""
        arriving = any(sample.remote for sample in self.scheduler.running)
        return not arriving and self.prefixes.compact(pages)

    def _run(self, step: Step) -> None:
        logits = self.runner.forward(step)
        routing = None
        if self.runner.recorder is not None:
            routing = self.runner.recorder.take(step.tokens)
            step.record(routing.experts)
        self.scheduler.computed(step)
        samples = list(step.decode)
        rows = list(range(len(samples)))
        last = (chunk for chunk in step.chunks if chunk.last)
        for row, chunk in enumerate(last, start=len(samples)):
            family = self._prefilled(chunk.sample)
            samples += family
            rows += [row] * len(family)
        members = list(zip(rows, samples, strict=True))
        self._branch(logits, [(row, each) for row, each in members if each.beams is not None])
        plain = [(row, each) for row, each in members if each.beams is None]
        if plain:
            rows, samples = [row for row, _ in plain], [each for _, each in plain]
            tokens, logprobs = self.runner.sample(logits, rows, samples)
            for sample, token, logprob in zip(samples, tokens, logprobs, strict=True):
                self.scheduler.append(sample, token, logprob, self.store.last_version)
        if routing is not None:
            routing.arrive(waited=bool(samples))

    def _branch(self, logits: Tensor, members: Sequence[tuple[int, Sample]]) -> None:
        """The next token of every beam search: all branches of one are in the same step."""
        groups = list(dict.fromkeys(each.beams for _, each in members if each.beams is not None))
        if not groups:
            return
        count = max(group.search.num_candidates for group in groups)
        found = self.runner.candidates(logits, [row for row, _ in members], count)
        of = {each: row for (_, each), row in zip(members, found, strict=True)}
        for group in groups:
            likeliest = [of[each] for each in group.members]
            self.scheduler.branch(group, likeliest, self.store.last_version)

    def _prefilled(self, sample: Sample) -> list[Sample]:
        """Samples whose first token follows from this sample's prompt, all of which is computed
        now.
        """
        return [sample, *self.scheduler.fork_siblings(sample)]

    # ---------------------------------------------------------------- sleep and wake up

    @property
    def kv_pool(self) -> KVPool:
        """The memory of keys and values.

        Of an fp8 pool, `set_scales(layer, k, v)` while no request runs.
        """
        return self.cache.pool

    @property
    def graphs(self) -> DecodeGraphs | None:
        """The captured graphs; None where decode runs without."""
        return self.runner.graphs

    @held()
    def sleep(
        self,
        level: int = 1,
        unfinished: str = "raise",
        tags: Sequence[str] | None = None,
        into: str | None = None,
    ) -> None:
        """Give the memory of the tags (None: all) back. Tags that already sleep are skipped.

        into: the tag of this device's trainer (`hand_over_to`) that is reloaded next: it gets what
        it needs, and the driver the rest.

        level 1 keeps the weights in host memory; 2 discards them: undefined until a weight update
        commits. With tiers, cached pages go to the host first and are found again if the weights
        are still the same.
        unfinished: "raise" StateError naming unfinished requests (nothing changes); "preempt"
        recomputes them after wake-up under the version then loaded; "abort" ends them with what
        they have. A sleep of the weights ends an open update: one with shadow pages is rolled back
        first (and stays so where the sleep is refused after all), what another has written is lost,
        and the weights are undefined. Aliased pages go back to the trainer at either level: the
        weights are undefined.
        """
        check_sleep_level(level)
        if unfinished not in UNFINISHED:
            raise ValueError(f"unfinished={unfinished!r} must be one of {', '.join(UNFINISHED)}")
        chosen = self._known(tags)
        left = self.scheduler.unfinished
        if left and unfinished == "raise":
            raise StateError(
                f"cannot sleep with unfinished requests: {names_of(left)}; let them finish, or "
                f'sleep with unfinished="preempt" or "abort"'
            )
        with handing_over(self.saver, self._peer, into) as release:
            if WEIGHTS in chosen:
                self._update.before_sleep()
                keep = level == 1 and self._update.keepable
                content: Content = "host" if keep else "discard"
                self.saver.pause(WEIGHTS, content=content, release=release)
                self._update.on_sleep(level)
            with self._own_discards():
                if unfinished == "abort":
                    self.scheduler.abort(left)
                self.scheduler.preempt_all()
                if rest := [tag for tag in chosen if tag != WEIGHTS]:
                    if KV_CACHE in rest and not self.saver.is_paused(KV_CACHE):
                        self._renewed = False
                        self.prefixes.move_below(keep=self.store.version is not None)
                        if self.cache.elastic is not None:
                            self.cache.elastic.shrink()
                    self.saver.pause(*rest, content="discard", release=release)
        if KV_CACHE in chosen:
            # what steps left there; whoever works next needs it
            empty_torch_cache(self.saver.device)

    @held()
    def wake_up(self, tags: Sequence[str] | None = None, partly: bool = False) -> None:
        """Put memory of the tags (None: all) back at the same addresses. Active tags are skipped.

        An engine without CUDA graphs has nothing on tag "cuda_graph", and takes its name all the
        same. partly: an `elastic` pool may begin with little, and grow while the engine generates,
        to what its requests can use at once. A pool that cannot grow wakes whole, as without it:
        see `why_one_size`.
        """
        paused = [tag for tag in self._known(tags) if self.saver.is_paused(tag)]
        if self.cache.elastic is not None:
            self.cache.elastic.shrinking = False
        renews = KV_CACHE in paused
        with self._own_discards(), contextlib.ExitStack() as undo:  # all of them or none
            if renews:
                self.saver.resume(KV_CACHE)
                undo.callback(self.saver.pause, KV_CACHE, content="discard")
                self.cache.on_resume(partly)
                paused.remove(KV_CACHE)
            if paused:
                self.saver.resume(*paused)
            undo.pop_all()
            self._renewed |= renews

    def shrink(self) -> None:
        """Have an `elastic` pool give memory back between steps as its requests end, until the next
        wake-up: others wait for it, and nobody comes back to what is cached.
        """
        if self.cache.elastic is not None:
            self.cache.elastic.shrinking = True

    def unavailable_reason(self) -> str | None:
        """Returns why `generate` would refuse now; None when it would not."""
        reasons = []
        if paused := [tag for tag in self.tags if self.saver.is_paused(tag)]:
            reasons.append(f"paused: {', '.join(paused)} (call wake_up)")
        elif lacking := shortfall(self.saver, self._whole_tags):
            reasons.append(lacking)
        if self.store.version is None:
            reasons.append(f"weights undefined: {self.store.undefined_reason}")
        if self._ranks.failure is not None:
            reasons.append(self._ranks.failure)
        return "; ".join(reasons) or None

    # ---------------------------------------------------------------- weight update

    @held()
    def begin_update(
        self, version: int, *, shadow: bool = False, names: Sequence[str] | None = None
    ) -> WeightOffer:
        """Offer pages for version `version` to be written into; replaces an open update.

        See `rollout/weights/update.py`.

        shadow: pages beside those of `weights`, as many; the present version is served until the
        commit. Otherwise the pages of `weights`, which are undefined from here on, so that no
        request may hold keys of the old version.
        names: only these parameters will be written, the others stay as they are (tied names count
        as one). Needs the tag active and a version not lower than the present one; names need
        weights that are defined. Where it is refused (StateError, ValueError, OutOfMemory: no room
        for shadow pages), nothing changes.
        """
        if not shadow:
            self._require_idle(
                "begin a weight update", "begin one with shadow=True, or when generate has returned"
            )
        return self._update.begin(version, shadow, names)

    @held()
    def commit_update(self, version: int) -> UpdateReceipt:
        """Serve the version that was verified. Addresses stay; shadow pages become those of
        `weights`, and the old ones go back to the driver. Needs that no request runs and no process
        maps shadow pages or `weights`; otherwise StateError or LeaseError, and a later call may go
        through.
        """
        self._require_idle("commit a weight update", "commit it when generate has returned")
        return super().commit_update(version)

    @held()
    def alias_update(
        self,
        version: int,
        ticket: Ticket,
        layout_hash: str,
        digest: int | None = None,
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> UpdateReceipt:
        """Serve another saver's pages as version `version`, without a copy. Replaces an open
        update.

        ticket: of a tag laid out as this engine's manifest says (`Trainer(layout=...)`);
        layout_hash: of that. Memory of the engine's own goes back, the tag may sleep already;
        addresses stay. digest: what the pages must hold, read back; None: not read. buffers: as in
        `WriteReceipt`. Their owner
        must not write to them until a sleep or an abort has given them back. Nothing changes where
        it raises a ValueError (an older version, another layout), a StateError (requests run, other
        tensors on tag `weights`) or a LeaseError before the engine's own memory went. After other
        errors (WeightUpdateError: the digest) the engine is poisoned and holds no pages.
        """
        self._require_idle("alias weights", "alias them when generate has returned")
        return self._update.alias(version, ticket, layout_hash, digest, buffers)

    # ---------------------------------------------------------------- memory

    @property
    def stats(self) -> EngineStats:
        """Tokens computed, those that the prefix cache spared, and preemptions."""
        return replace(self.scheduler.stats)

    def check_integrity(self) -> None:
        """AssertionError unless the page ledger, the request table, the prefix cache and the
        scheduler agree. Any time between calls.
        """
        self.prefixes.check_integrity()
        if not self.scheduler.running:
            for ledger in self.prefixes.ledgers:
                assert ledger.available == ledger.total - self.cache.withheld_pages, (
                    f"{ledger.name} pages are held by no request"
                )
            assert self.cache.table.available_size() == self.cache.table.size, (
                "rows are held by no request"
            )
        if not self.scheduler.unfinished:
            assert not self.prefixes.swapped_pages(), "host pages are held by no request"

    def _require_idle(self, action: str, instead: str) -> None:
        if running := self.scheduler.running:
            raise StateError(f"cannot {action} while requests run: {names_of(running)}; {instead}")

    @property
    def _whole_tags(self) -> Sequence[str]:
        """The tags that compute with all of their memory or not at all."""
        return self.tags if self.cache.elastic is None else [t for t in self.tags if t != KV_CACHE]

    def _require_current(self, together: bool = False) -> None:
        """Raise a StateError while the engine cannot compute, and start over with the keys and
        values that others discarded.

        together: all tensor-parallel ranks call it, none has a request, and all decide alike.
        """
        reason = self.unavailable_reason()
        kept = not self._notice_loss()
        if together and self._ranks.failure is None:
            others, kept = self._ranks.agree_ready(reason, kept, self.saver.device)
            reason = reason or others
        if not kept and not together and self._ranks.size > 1:
            reason = reason or f"{lost_by_others([KV_CACHE], 'engine')} while requests run"
        if reason:
            raise StateError(f"cannot generate: {reason}")
        if not kept:
            self._start_over()
            self._watch.note(KV_CACHE)
            self._renewed = False
        if not self._renewed:
            self.cache.on_resume(partly=True)
            self._renewed = True

    def _notice_loss(self) -> bool:
        """Start over where others took what running requests compute with, or what they may find.

        Returns:
            Whether content of the KV cache is lost.
        """
        lost = bool(self._watch.lost(KV_CACHE))
        if lost or (self.scheduler.running and self.saver.is_paused(KV_CACHE)):
            self._start_over()
        return lost

    def _start_over(self) -> None:
        """Forget all keys and values; running requests compute theirs again."""
        self.prefixes.clear()
        self.scheduler.preempt_all()

    @contextlib.contextmanager
    def _own_discards(self) -> Iterator[None]:
        """Take discards of the KV cache inside as the engine's own; what others discarded before is
        forgotten first, and stays noticed, so that all ranks hear of it.
        """
        lost = self._notice_loss()
        try:
            yield
        finally:
            if not lost:
                self._watch.note(KV_CACHE)


def _check_experts(model: ModelConfig, config: EngineConfig) -> None:
    for key in ("fp32_router", "return_routed_experts", "expert_parallel"):
        asked = getattr(config, key) != getattr(EngineConfig, key)
        rule = "is for mixtures of experts, and this model is dense; leave it out"
        check_option(config, key, model.has_experts or not asked, rule)


def _context_len(model: ModelConfig, config: EngineConfig) -> int:
    if config.max_context_len is None:
        return min(model.max_position_embeddings, config.kv_tokens)
    if config.max_context_len > model.max_position_embeddings:
        raise ValueError(
            f"max_context_len={config.max_context_len} exceeds the model's max_position_embeddings="
            f"{model.max_position_embeddings}; lower it"
        )
    return config.max_context_len
