"""The native engine: generates, sleeps and wakes up, and replaces its weights in place."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kvcache import KVPool
from memsaver import MemorySaver, Release, StateError, Ticket
from memsaver.content_watch import lost_by_others, shortfall
from memsaver.system.interrupts import held
from memsaver.types import check_choice
from rollout.config import EngineConfig
from rollout.engine.cache_memory import CacheMemory
from rollout.engine.checks import check_options, context_len, probe
from rollout.engine.engine_base import EngineBase, InFlight, Unfinished
from rollout.engine.served_adapters import ServedAdapters
from rollout.engine.step_decisions import StepDecisions
from rollout.engine.stepping import SteppedEngine
from rollout.engine.token_steps import TokenSteps
from rollout.model.adapter_params import adapter_groups
from rollout.model.decoder import ModelConfig, aliases, buffers, rank_groups, rank_model
from rollout.model.guide import Guides
from rollout.model.hub import resolve_model
from rollout.model.loading import differences, load_model_config, read_buffers
from rollout.model.model_folder import iter_checkpoint
from rollout.parallel import TensorParallel
from rollout.pool_size import ALONE, free_share, sized
from rollout.requests import Output, SamplingParams
from rollout.running.graphs import DecodeGraphs, ladder, token_ladder
from rollout.running.runner import ModelRunner
from rollout.scheduling.kv_cache import Cache
from rollout.scheduling.open_requests import OpenRequests
from rollout.scheduling.prompt_source import PromptSource
from rollout.scheduling.samples import EngineStats, names_of
from rollout.scheduling.scheduler import Scheduler
from rollout.tag_names import ADAPTER_SLOTS, CUDA_GRAPH, KV_CACHE, WEIGHTS
from rollout.weights.adapters import AdapterPages, ServedAdapter
from rollout.weights.messages import UpdateReceipt, WeightOffer
from rollout.weights.store import WeightStore
from rollout.weights.update import WeightUpdate, require_active


class Engine(EngineBase, SteppedEngine):
    """Engine for one model on one device, or for one rank's part of the model.

    The weights lie on tag `weights`, adapters on `adapter_slots`, keys and values on `kv_cache`,
    and the memory of CUDA graphs on `cuda_graph`. All bookkeeping lies outside of the tags. The
    engine generates only while all its tags are active and the weights are defined;
    `unavailable_reason` names what is missing. The engine notices when another user of its saver
    discards content: it computes discarded keys and values again, and treats discarded weights as
    undefined.

    The engine is not thread-safe: one call at a time, except that callbacks of `generate` may call
    methods. Of the ranks of a tensor-parallel engine, the first decides on requests and steps, and
    the others `follow`; all other methods are called on every rank.

    Construction allocates all memory. The weights are undefined until `load` or a weight update.
    `store` (weights), `cache` (pool, request table, states), `blocks` and `prefixes` (pages),
    `scheduler` and `requests` (requests), `steps` and `runner` (computation) are open to
    inspection; only the engine's methods may change them.

    Args:
        model: The model's configuration.
        config: Sizes and policies.
        dtype: Dtype of weights and computation.
        saver: Saver on whose tags the memory lies; it also chooses the device.
        group: Process group of the tensor-parallel ranks. Its timeout limits the wait for a rank
            that failed.
        gpu_share: Without `config.kv_tokens`, share of the GPU's memory for weights, KV cache,
            steps and CUDA graphs (`pool_size`); None: 0.9 of the memory that is free now. The pool
            has no more tokens than `max_running` requests of the longest length. On a CPU it has
            4,096 tokens, or `max_context_len` if that is more.
        filters: Whether that share has room for top-k or top-p in all samples of a step.

    Attributes:
        store: The weights.
        config: Sizes and policies, with the tokens of the pool.
        adapters: The adapters; None without `config.adapters`.
        guides: The grammars of requests with a JSON schema; None: the model has no folder.
        prompts: Where keys and values of prompts come from; `rollout.split` has other sources.

    Raises:
        ValueError: The configuration does not fit the model, or differs between ranks.
        OutOfMemory: The device has too little memory.
        StateError: A tensor-parallel engine with CUDA graphs is built inside a region.
    """

    store: WeightStore
    guides: Guides | None = None

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        dtype: torch.dtype,
        saver: MemorySaver,
        group: ProcessGroup | None = None,
        gpu_share: float | None = None,
        filters: bool = True,
    ) -> None:
        check_options(model, config, dtype, saver.device)
        if config.fp32_router:
            model = model.with_fp32_routers()
        if config.sample_all_ids:
            model = replace(model, tokenizer_ids=None)
        self._ranks = TensorParallel(config.tensor_parallel_size, group, exact=bool(config.exact))
        self._ranks.check_same("the model or EngineConfig", f"{model} {config} {dtype}")
        self.model = model
        self.config = config = sized(
            config, model, dtype, saver.device, gpu_share, filters, self._ranks
        )
        self.saver = saver
        self.max_context_len = context_len(model, config)
        self._expert_parallel = config.expert_parallel
        split = self._ranks.rank, self._ranks.size, config.expert_parallel
        groups = rank_groups(model, *split)
        self.store = WeightStore(groups, aliases(model), dtype, saver, buffers=buffers(model))
        pages = None
        if config.adapters is not None:
            parts = adapter_groups(model, config.adapters, *split)
            pages = AdapterPages(parts, config.adapters.slots, dtype, saver)
            self.adapters = ServedAdapters(pages, config.adapters.rank, saver)
        self._product_report = probe(self.store, groups, model, config, dtype)
        self.cache = Cache(model, config, self.max_context_len, dtype, saver)
        self.blocks = self.cache.blocks
        self.prefixes = self.cache.prefix_blocks(config)
        self.scheduler = Scheduler(self.prefixes, config)
        mine, how = rank_model(model, *split), config.attention
        self.runner = ModelRunner(
            mine,
            self.store,
            self.cache,
            rows=self.scheduler.rows,
            attention=how,
            ranks=self._ranks,
            adapters=pages,
        )
        if config.return_routed_experts:
            self.runner.record_routing(config.max_running + config.max_prefill_tokens)
        if config.cuda_graphs and saver.device.type == "cuda" and self.runner.capturable:
            sizes = config.graph_batch_sizes or ladder(config.max_running)
            self.runner.capture(sizes, token_ladder(config.captured_tokens), saver)
        optional = {ADAPTER_SLOTS: pages, CUDA_GRAPH: self.runner.graphs}
        self.tags = [WEIGHTS, KV_CACHE, *(tag for tag in optional if optional[tag] is not None)]
        self.requests = OpenRequests(
            model, self.scheduler, max_context_len=self.max_context_len, seed=config.seed
        )
        self.prompts = PromptSource()
        ahead = int(saver.device.type == "cuda")  # a CPU computes a step while it is launched
        self.steps = TokenSteps(self.scheduler, self.runner, self.store, ahead)
        self.decisions = StepDecisions(self._ranks)
        self._update = WeightUpdate(self.store, self.saver, self.prefixes.new_weights)
        self._memory = CacheMemory(self.cache, self.scheduler, saver, self.steps.drain)
        self._checked = -1  # the saver's number of operations when the engine was found ready
        self._in_flight: InFlight = "refuse"  # of the update that was begun last

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
        kv_tokens: int | None = None,
        saver: MemorySaver | None = None,
        load_weights: bool = True,
        group: ProcessGroup | None = None,
        gpu_share: float | None = None,
        filters: bool = True,
        **engine_config: Any,
    ) -> Self:
        """Build an engine for a model, and load its weights as version 0.

        Args:
            path: Model directory, or ORG/NAME of the Hub.
            device: Device of the engine.
            dtype: Dtype of weights and computation.
            kv_tokens: Tokens in the KV pool; None: as many as fit `gpu_share`, or 4,096 on a CPU.
            saver: Saver on whose tags the memory lies; None: a new one.
            load_weights: False reads no weights, and the files may be missing. The weights are then
                undefined until an update commits.
            group: Process group of the tensor-parallel ranks.
            gpu_share: Share of the GPU's memory, see `Engine`. None: 0.9 of the memory that is free
                now; without a saver 0.4 of it, because a trainer that is built later needs room.
            filters: See `Engine`.
            **engine_config: Further fields of `EngineConfig`.

        Returns:
            The engine.

        Raises:
            ValueError: Names what is wrong with the directory or the configuration.
        """
        config = EngineConfig(kv_tokens=kv_tokens, **engine_config)
        path = resolve_model(path)
        model = load_model_config(path)
        if saver is None:
            saver = MemorySaver(device=device)
            if (kv_tokens, gpu_share) == (None, None) and saver.device.type == "cuda":
                gpu_share = free_share(saver.device, ALONE)
        elif saver.device.type != torch.device(device).type:
            raise ValueError(
                f"device={device} but the saver is on {saver.device}; use one device for both"
            )
        given: Any = {"dtype": dtype, "saver": saver, "group": group, "gpu_share": gpu_share}
        engine = cls(model, config, filters=filters, **given)
        engine.guides = Guides(path, model)
        if load_weights:
            engine.load(path)
        else:
            engine.store.set_buffers(read_buffers(path, engine.store.buffers), str(path))
        return engine

    def load(self, path: str | Path, *, in_flight: InFlight = "refuse") -> None:
        """Load a checkpoint of the same model as version 0, which ends an open update.

        Args:
            path: Model directory, whose configuration and end tokens are the engine's.
            in_flight: What this means for running requests.

        Raises:
            StateError: Requests run and `in_flight` is "refuse", or the weights sleep or lie in the
                trainer's pages. Nothing changed.
            ValueError: The directory describes another model, which changes nothing and names the
                keys; or its weights do not fit.
        """
        check_choice("in_flight", in_flight, InFlight)
        self._settle("load weights", in_flight)
        model = load_model_config(path)
        model = model.with_fp32_routers() if self.config.fp32_router else model
        if other := differences(self.model, model):
            rule = f"is not the engine's model: {other}"
            raise ValueError(f"{path} {rule}; build an engine of it by Engine.from_pretrained()")
        require_active(self.saver, WEIGHTS, "load weights")
        self._update.require_own("load weights")
        self._update.abort(f"loading from {path} did not finish")
        self.prefixes.new_weights()
        self._start_again(in_flight)
        self.store.load(iter_checkpoint(path), str(path))

    # ---------------------------------------------------------------- requests and steps

    @property
    def idle_seconds(self) -> float:
        """Return how long the last step waited for the device."""
        return self.steps.waited

    @property
    def unfinished(self) -> list[int]:
        """Return the numbers of the requests whose last outputs `step` has not returned."""
        return self.requests.ids

    @held()
    def load_adapter(self, path: str | Path, name: str) -> None:
        """Load a low-rank adapter, or the next version of one that has this name.

        Unfinished requests keep the version that they were submitted with. No request uses cached
        prefixes of another adapter or version.

        Args:
            path: Folder of PEFT.
            name: Name by which `SamplingParams.adapter` chooses it.

        Raises:
            StateError: The engine has no slots, they sleep, none is free, or the other ranks do not
                know of all requests yet. Nothing changed.
            ValueError: The adapter does not fit the slots; see `ServedAdapters.load`.
        """
        self._settled_adapters("load").load(path, name, self._adapters_in_use())

    @held()
    def unload_adapter(self, name: str) -> None:
        """Forget an adapter, whose slot is free then.

        Args:
            name: Its name.

        Raises:
            ValueError: No adapter has this name.
            StateError: Unfinished requests use it, or as in `load_adapter`. Nothing changed.
        """
        self._settled_adapters("unload").unload(name, self._adapters_in_use())

    def _settled_adapters(self, action: str) -> ServedAdapters:
        """Return the adapters when no step is under way, and all ranks know of all requests."""
        adapters = self._adapters_for(action)
        self.decisions.require_outside(f"{action} adapters")
        if self.decisions.unsent:
            rule = f"cannot {action} adapters: the other ranks do not know of all requests"
            raise StateError(f"{rule}; step once, or submit later")
        require_active(self.saver, ADAPTER_SLOTS, f"{action} adapters")
        self.drain()
        return adapters

    def _adapters_in_use(self) -> set[ServedAdapter | None]:
        return {sample.adapter for sample in self.scheduler.unfinished}

    def _adapter(self, params: SamplingParams) -> ServedAdapter | None:
        """Return the adapter of a request, or raise a ValueError if there is none of its name."""
        if params.adapter is None:
            return None
        if self.adapters is None:
            rule = f"adapter={params.adapter!r}, and the engine has no adapters"
            raise ValueError(f"{rule}; build it with adapters=AdapterSlots(...)")
        if type(self.prompts) is not PromptSource:
            rule = f"adapter={params.adapter!r}, and another engine computes prompts"
            raise ValueError(f"{rule}, which has no adapters; leave adapter out")
        return self.adapters.find(params.adapter)

    def prepare(self, params: SamplingParams) -> None:
        if isinstance(schema := params.json_schema, str):
            if self.guides is None:
                rule = "needs the tokenizer of a model folder; build it by Engine.from_pretrained"
                raise ValueError(f"json_schema {rule}")
            self.guides.compile(schema)

    def _check(self, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self.requests.check(name, prompt, params)
        if params.prompt_logprobs is not None and type(self.prompts) is not PromptSource:
            raise ValueError(f"prompt_logprobs of {name}: another engine computes prompts")
        self._adapter(params)
        self.prepare(params)
        if params.beam_width > 1 and self.cache.withheld_pages:
            raise ValueError(
                f"{name}: no beam search in a pool that woke partly; sleep, then wake_up()"
            )

    def _enqueue(self, prompt: Sequence[int], params: SamplingParams, stream: bool) -> int:
        samples = self.requests.submit(prompt, params, stream, self._adapter(params))
        if isinstance(schema := params.json_schema, str):
            assert self.guides is not None, "a checked request"
            for sample in samples:
                sample.guide = self.guides.begin(schema)
        self.prompts.accept(samples)
        if self.cache.elastic is not None:
            self.cache.elastic.hurry()
        return samples[0].request

    @held()
    def drain(self) -> None:
        """Wait for steps under way; the next `step` returns their outputs.

        Methods that need this call it themselves.

        Raises:
            RuntimeError: The device failed.
        """
        self.steps.drain()

    def _abort(self, ids: Sequence[int]) -> None:
        if ids:
            self.drain()
            self.requests.abort(ids)

    def _drop(self, ids: Sequence[int]) -> None:
        if ids:
            with contextlib.suppress(Exception):  # the call that failed raises its own error
                self.drain()
            with contextlib.suppress(StateError):  # raised if the saver is closed
                self._memory.notice_loss(self.prompts)
            self.requests.drop(ids)

    def _requeue(self) -> None:
        self.drain()
        self.scheduler.preempt_all()

    def _advance(self) -> list[Output]:
        ended = self.requests.take(self.steps.not_finite, ends_only=True)
        if ended or not self.requests.ids:
            return ended
        if not self.scheduler.running:
            self.require_current(together=True)
        try:
            self.require_current()
            self.prompts.receive()
            self._memory.fit(self.prompts)
            self.steps.run(self.prompts)
            outputs = self.requests.take(self.steps.not_finite, self.ends_only)
            if not self.requests.ids:
                self.drain()  # a step of samples that have ended
            return outputs
        except BaseException as error:
            self._ranks.fail(error)
            raise

    # ---------------------------------------------------------------- sleep and wake up

    @property
    def kv_pool(self) -> KVPool:
        """Return the pool of keys and values.

        Of an fp8 pool, call `set_scales(layer, k, v)` only while no request runs.
        """
        return self.cache.pool

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Return the captured graphs; None where decode runs without graphs."""
        return self.runner.graphs

    def _before_sleep(self, unfinished: Unfinished) -> None:
        self.drain()
        if unfinished == "refuse" and (left := self.scheduler.unfinished):
            raise StateError(
                f"cannot sleep with unfinished requests: {names_of(left)}; let them finish, or "
                f'sleep with unfinished="recompute", "keep" or "abort"'
            )

    def _sleep_caches(self, tags: Sequence[str], unfinished: Unfinished, release: Release) -> None:
        left = self.scheduler.unfinished
        with self._memory.own_discards(self.prompts):
            if unfinished == "abort":
                self.scheduler.abort(left)
                self.decisions.abort([sample.request for sample in left])
            if unfinished == "keep" and KV_CACHE in tags:
                self.scheduler.park_all()
            elif unfinished != "keep":
                self.scheduler.preempt_all()
            if ADAPTER_SLOTS in tags:
                self.saver.pause(ADAPTER_SLOTS, content="host", release=release)
            others = [tag for tag in tags if tag != ADAPTER_SLOTS]
            self._memory.sleep(others, release, keep=self.store.version is not None)

    @held()
    def wake_up(self, tags: Sequence[str] | None = None, partly: bool = False) -> None:
        """Map memory behind tags at their addresses, all of them or none. Active tags are skipped.

        An engine without CUDA graphs has nothing on tag "cuda_graph", but accepts its name.

        Args:
            tags: Tags to resume; None: all.
            partly: Let an elastic pool start small and grow while the engine generates, up to the
                tokens that its requests can use together. A pool that cannot grow (see
                `why_one_size`) wakes up whole.

        Raises:
            OutOfMemory: The device has too little memory. Nothing changed.
            ValueError: A tag is unknown.
        """
        paused = [tag for tag in self._known(tags) if self.saver.is_paused(tag)]
        with self._memory.waking(self.prompts, KV_CACHE in paused, partly):
            if others := [tag for tag in paused if tag != KV_CACHE]:
                self.saver.resume(*others)

    def shrink(self) -> None:
        """Let an elastic pool release memory between steps as its requests end.

        This lasts until the next wake-up. Cached prefixes are evicted, too. A pool of fixed size
        does nothing.
        """
        if self.cache.elastic is not None:
            self.cache.elastic.shrinking = True

    def unavailable_reason(self) -> str | None:
        """Return why `generate` would raise a StateError now.

        Returns:
            The reasons; None if the engine is available.
        """
        reasons = []
        # An elastic pool is used without all of its memory.
        whole = [tag for tag in self.tags if tag != KV_CACHE or self.cache.elastic is None]
        if paused := [tag for tag in self.tags if self.saver.is_paused(tag)]:
            reasons.append(f"paused: {', '.join(paused)} (call wake_up)")
        elif lacking := shortfall(self.saver, whole):
            reasons.append(lacking)
        if self.store.version is None:
            reasons.append(f"weights undefined: {self.store.undefined_reason}")
        if self.adapters is not None and (lost := self.adapters.lost()):
            reasons.append(f"adapters were discarded: {', '.join(lost)} (load or unload them)")
        if self._ranks.failure is not None:
            reasons.append(self._ranks.failure)
        if self.prompts.refusal is not None:
            reasons.append(self.prompts.refusal)
        return "; ".join(reasons) or None

    # ---------------------------------------------------------------- weight update

    @held()
    def begin_update(
        self,
        version: int,
        *,
        shadow: bool = False,
        names: Sequence[str] | None = None,
        in_flight: InFlight = "refuse",
        adapter: str | None = None,
    ) -> WeightOffer:
        """Offer pages into which a new version can be written; replaces an open update.

        `rollout/weights/update.py` documents the states of an update.

        Args:
            version: Number of the new version, not lower than the present one.
            shadow: Offer a second copy of the pages. The present version is served until the
                commit. Otherwise the pages of tag `weights` are offered, and the weights are
                undefined from now on, so that no step runs.
            names: Only these parameters will be written, and the rest keeps its values, which must
                be defined. Tied names count as one. None: all parameters.
            in_flight: What the update means for requests that run now or, with `shadow`, at the
                commit.
            adapter: Name of an adapter, which need not be known. The offer is a free slot: requests
                end under the version that they began with, and `in_flight` decides only where no
                slot is free but that of the present version.

        Returns:
            The offer, with a ticket to the pages.

        Raises:
            StateError: The weights sleep or lie in the trainer's pages, requests run and
                `in_flight` is "refuse", `names` are given while the weights are undefined, or
                `shadow` is wanted while other tensors lie on tag `weights`. Nothing changed, as
                after every error.
            ValueError: The version is older than the present one, a name is unknown, or `names` is
                empty.
            OutOfMemory: There is no room for shadow pages.
        """
        check_choice("in_flight", in_flight, InFlight)
        if adapter is not None:
            adapters, needed = self._settled_adapters("sync"), self._adapters_in_use()
            self._in_flight = in_flight
            return adapters.begin(adapter, version, needed, overwrite=in_flight != "refuse")
        if not shadow:
            self._settle("begin a weight update", in_flight)
        offer = self._update.begin(version, shadow, names)
        self._in_flight = in_flight
        if not shadow:
            self._start_again(in_flight)
        return offer

    @held()
    def commit_update(self, version: int, adapter: str | None = None) -> UpdateReceipt:
        """Serve the verified version. Addresses do not change.

        Shadow pages become the pages of tag `weights`, and the old pages go back to the driver.

        Args:
            version: The verified version.
            adapter: Name of the adapter that is updated; None: the weights.

        Returns:
            The version that is served now.

        Raises:
            WeightUpdateError: The version is not verified; nothing changed. Or other users of the
                saver discarded its pages, which closes the update.
            StateError: Requests run and `in_flight` was "refuse", or the weights sleep. Nothing
                changed.
            LeaseError: A process maps the shadow pages or the weights. Nothing changed, and a later
                call may succeed.
        """
        if adapter is not None:
            adapters = self._settled_adapters("sync")
            receipt = adapters.commit(adapter, version)
            self.scheduler.serve(adapters.find(adapter), again=self._in_flight == "recompute")
            return receipt
        self._settle("commit a weight update", self._in_flight)
        receipt = super().commit_update(version)
        self._start_again(self._in_flight)
        return receipt

    @held()
    def alias_update(
        self,
        version: int,
        ticket: Ticket,
        layout_hash: str,
        digest: int | None = None,
        buffers: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> UpdateReceipt:
        """Serve another saver's pages as a new version, without a copy; replaces an open update.

        The engine releases its own memory of the weights, whose tag may also sleep already.
        Addresses do not change. The owner must not write to the pages until a sleep or an abort has
        given them back.

        Args:
            version: Number of the new version, not lower than the present one.
            ticket: Ticket to a tag that is laid out as this engine's manifest says
                (`Trainer(layout=...)`).
            layout_hash: Hash of that layout.
            digest: Expected digest of the pages, which are read back; None: they are not read.
            buffers: Values of buffers, as in `WriteReceipt`.

        Returns:
            The version that is served now.

        Raises:
            ValueError: The version is older than the present one, or the layout or the shape of a
                buffer differs. Nothing changed.
            StateError: Requests run, or other tensors lie on tag `weights`. Nothing changed.
            LeaseError: A process maps the weights or shadow pages. The served version did not
                change, but an open update with shadow pages may be rolled back.
            WeightUpdateError: The digest differs. After this and any later error the engine is
                poisoned and has no pages.
        """
        self._settle("alias weights", "refuse")
        if self.adapters is not None:  # they wake up with the weights, which do not
            self.saver.resume(ADAPTER_SLOTS)
        return self._update.alias(version, ticket, layout_hash, digest, buffers)

    def forget_prefixes(self) -> None:
        """Let no later request use the prefixes that are cached now."""
        self.prefixes.new_weights()

    # ---------------------------------------------------------------- reports and checks

    def product_report(self) -> str:
        """Return what was measured at the start of an exact engine.

        Returns:
            How many products the library computes with the defined bits, and which ones Triton
            computes; empty if nothing was measured.
        """
        return self._product_report

    @property
    def stats(self) -> EngineStats:
        """Return the counts of computed tokens, prefix cache hits, and preemptions."""
        return replace(self.scheduler.stats)

    def check_integrity(self) -> None:
        """Check that page ledger, request table, prefix cache and scheduler agree between calls.

        Raises:
            AssertionError: They do not.
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

    def _settle(self, action: str, in_flight: InFlight) -> None:
        """Raise a StateError if requests run, and new weights are refused for them."""
        self.decisions.require_outside(action)
        self.drain()
        if (running := self.scheduler.running) and in_flight == "refuse":
            rule = f"cannot {action} while requests run: {names_of(running)}; step until they end"
            raise StateError(f'{rule}, or use in_flight="recompute" or "keep"')

    def _start_again(self, in_flight: InFlight) -> None:
        """Let running requests compute their keys and values again, unless they are to be kept."""
        if in_flight == "recompute":
            self.scheduler.preempt_all()
            self.scheduler.forget_parked()

    def require_current(self, together: bool = False) -> None:
        """Check that the engine can compute; forget keys and values that were lost.

        Args:
            together: All tensor-parallel ranks call this without a request, and decide together.
                Otherwise one question answers: whether the saver has changed a tag since.

        Raises:
            StateError: Names why the engine cannot compute.
        """
        operations = self.saver.operations
        known = operations == self._checked and self.store.version is not None
        if known and not together and self._ranks.failure is None:
            return
        reason = self.unavailable_reason()
        kept = not self._memory.notice_loss(self.prompts)
        if together and self._ranks.failure is None:
            rank_reason, kept = self._ranks.agree_ready(reason, kept, self.saver.device)
            reason = reason or rank_reason
        if not kept and not together and self._ranks.size > 1:
            reason = reason or f"{lost_by_others([KV_CACHE], 'engine')} while requests run"
        if reason:
            raise StateError(f"cannot generate: {reason}")
        self._memory.renew(self.prompts, kept)
        self._checked = operations
