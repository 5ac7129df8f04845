"""verl's server of the native engine: an actor that answers requests, and its replica."""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils import normalize_token_ids
from verl.utils.device import get_resource_name
from verl.utils.fs import copy_to_local
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

from rollout import Completion, SamplingParams
from trainer_bridge.adoption.verl.engine_rank import RankSettings, start_ranks
from trainer_bridge.adoption.verl.engine_rollout import server_name
from trainer_bridge.adoption.verl.named_requests import NamedRequests
from trainer_bridge.adoption.verl.names import ENGINE_ROLLOUT, engine_pair
from trainer_bridge.adoption.verl.updated_server import Outcome, UpdatedServer

# Sampling parameters of verl that have no effect at these values, and are refused at others.
NEUTRAL = {"n": 1}
SUPPORTED = (
    "temperature", "top_k", "top_p", "min_p", "min_tokens", "seed", "stop_token_ids", "ignore_eos",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
    "allowed_token_ids",
)  # fmt: skip


class EngineServer(UpdatedServer):
    """Ray actor that serves one replica of the engine.

    Its methods are those that verl calls. The engine's processes run beside it on its node.
    """

    def __init__(
        self, config: Any, model_config: Any, replica_rank: int, devices: Sequence[str]
    ) -> None:
        """Prepare a server, which `launch_server` starts.

        Args:
            config: verl's `RolloutConfig`.
            model_config: verl's configuration of the model.
            replica_rank: Number of the replica.
            devices: Ids of the replica's GPUs; without GPUs, one empty id per rank.
        """
        self._config, self._replica, self._devices = config, replica_rank, devices
        self._model_config = model_config
        self._admitting = asyncio.Event()
        self._admitting.set()
        self._rejecting = False
        self._global_steps: int | None = None

    async def launch_server(self) -> None:
        """Start the engine; an error of its start is raised here."""
        given = self._model_config
        path = copy_to_local(given.path, use_shm=given.get("use_shm", False))
        job = ray.get_runtime_context().get_job_id()
        settings = rank_settings(self._config, path, self._replica, self._devices, job)
        self._requests = NamedRequests(await asyncio.to_thread(start_ranks, settings))
        self._limit: int = (await self._requests.call("max_context_len"))[0]

    # ---------------------------------------------------------------- requests

    async def generate(
        self,
        prompt_ids: Any,
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: Any = None,
        video_data: Any = None,
        audio_data: Any = None,
        mm_processor_kwargs: Any = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Continue a prompt, together with the other requests that are unfinished.

        Args:
            prompt_ids: Token ids.
            sampling_params: verl's sampling parameters, see `sampling`.
            request_id: Unique name of the request.
            image_data: Must be None, like the other inputs of multi-modal models.
            video_data: Must be None.
            audio_data: Must be None.
            mm_processor_kwargs: Ignored.
            priority: Requests of lower numbers leave the queue first.

        Returns:
            The answer. Log-probs are those of log_softmax(logits / temperature), before top-k and
            top-p.

        Raises:
            ValueError: Names what is not supported, or a request that can never be answered.
            StateError: Names why the engine is unavailable.
        """
        self.require_defined()
        for name, data in (("image", image_data), ("video", video_data), ("audio", audio_data)):
            if data:
                raise ValueError(
                    f"request {request_id} has {name} data: rollout.name={ENGINE_ROLLOUT} takes "
                    "text only; use rollout.name=vllm"
                )
        prompt = normalize_token_ids(prompt_ids)
        params = sampling(sampling_params, self._config, len(prompt), self._limit, request_id)
        params = replace(params, priority=priority)
        while not self._admitting.is_set():
            if self._rejecting:
                return self._output(None, log_probs=False)
            await self._admitting.wait()
        answer = await self._requests.answer(request_id, prompt, params)
        return self._output(answer, bool(sampling_params.get("logprobs")))

    def _output(self, answer: Completion | None, log_probs: bool) -> TokenOutput:
        """Return verl's form of an answer; None: the request was rejected."""
        aborted = answer is None or answer.finish_reason == "abort"
        cached = None if answer is None else answer.cached_tokens
        return TokenOutput(
            token_ids=[] if answer is None else answer.token_ids,
            log_probs=answer.logprobs if answer is not None and log_probs else None,
            stop_reason="aborted" if aborted else "completed",
            extra_fields={"global_steps": self._global_steps, "num_cached_tokens": cached},
        )

    async def abort_all_requests(
        self, reset_prefix_cache: bool = True, reject_request: bool = False
    ) -> dict[str, Any]:
        """End all requests with their present answers, and admit none until `resume_generation`.

        Args:
            reset_prefix_cache: Also forget cached prefixes.
            reject_request: Answer later requests as aborted, instead of holding them.

        Returns:
            The number of the requests, and their ids.
        """
        self._admitting.clear()
        self._rejecting = reject_request
        ids = self._requests.cancel()
        await self._requests.drained()
        if reset_prefix_cache:
            await self.clear_kv_cache()
        return {"aborted_count": len(ids), "request_ids": ids}

    async def resume_generation(self) -> None:
        """Admit requests after `abort_all_requests`."""
        self._rejecting = False
        self._admitting.set()

    async def abort_request(self, request_id: str) -> dict[str, Any]:
        """End a request with its present answer; return whether there was one of this id."""
        return {"aborted": bool(self._requests.cancel(request_id)), "request_id": request_id}

    async def wait_for_requests_to_drain(self) -> None:
        """Wait until no request is unfinished."""
        await self._requests.drained()

    # ---------------------------------------------------------------- memory and weights

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Map the memory of tags, weights and kv_cache (None: both), with that of the graphs."""
        chosen = ["weights", "kv_cache"] if tags is None else [*tags]
        if "kv_cache" in chosen:
            chosen.append("cuda_graph")
        await self._requests.call("wake_up", chosen)

    async def sleep(self) -> None:
        """Release all memory of the engine once its requests have ended; weights are discarded."""
        if self._config.free_cache_engine:
            await self._requests.drained()
            await self._requests.call("sleep", 2)

    async def serve_update(self, secret: str) -> Sequence[Outcome]:
        # The engine forgets its prefixes when an update begins.
        return await self._requests.call("serve_update", secret)

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes."""
        await self._requests.call("forget_prefixes")

    async def set_global_steps(self, global_steps: int) -> None:
        self._global_steps = global_steps

    async def start_profile(self, **_: Any) -> None:
        """Do nothing, as the engine has no profiler; verl calls this when it profiles a trainer."""

    stop_profile = start_profile

    async def engine(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the engine's ranks, such as `report`, and return the results by rank."""
        return await self._requests.call(method, *args)


def rank_settings(
    config: Any, path: str, replica: int, devices: Sequence[str], job: str
) -> RankSettings:
    """Translate verl's configuration of a rollout into that of the engine's ranks.

    `rollout.engine_kwargs.memsaver` has further fields of `EngineConfig`, which take precedence.
    """
    own = dict((config.engine_kwargs or {}).get(ENGINE_ROLLOUT) or {})
    engine = {
        "max_running": config.max_num_seqs,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "max_context_len": config.max_model_len,
        "cuda_graphs": not config.enforce_eager,
        "graph_batch_sizes": config.cudagraph_capture_sizes
        and tuple(config.cudagraph_capture_sizes),
        "prefix_cache": config.enable_prefix_caching,
        "seed": replica + config.seed,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "expert_parallel": config.expert_parallel_size,
        "filters": config.top_k > 0 or config.top_p < 1,
    }
    return RankSettings(
        path=path,
        device="cuda" if any(devices) else "cpu",
        visible=",".join(devices),
        dtype=config.dtype,
        load_weights="dummy" not in config.load_format,
        share=config.gpu_memory_utilization,
        engine=engine | own,
        pairs=[engine_pair(job, replica, rank) for rank in range(len(devices))],
    )


def sampling(
    given: Mapping[str, Any], config: Any, prompt_len: int, limit: int, request_id: str
) -> SamplingParams:
    """Translate verl's sampling parameters.

    `max_tokens` (or `max_new_tokens`) is `rollout.response_length` by default, and at most what
    `limit`, the maximum tokens of prompt and answer, leaves.

    Raises:
        ValueError: Names a parameter that the engine does not support, or a prompt without room for
            an answer.
    """
    left = dict(given)
    left.pop("logprobs", None)
    if prompt_len >= limit:
        raise ValueError(
            f"request {request_id}: a prompt of {prompt_len} tokens leaves no room within "
            f"rollout.max_model_len={limit}; shorten it, or raise max_model_len"
        )
    room = min(config.response_length, config.prompt_length + config.response_length - prompt_len)
    asked = [left.pop(key, None) for key in ("max_tokens", "max_new_tokens")]
    most = next((number for number in asked if number is not None), room)
    left.setdefault("repetition_penalty", config.repetition_penalty)
    options = {key: left.pop(key) for key in SUPPORTED if left.get(key) is not None}
    for key, value in left.items():
        if value not in (None, [], NEUTRAL.get(key)):
            raise ValueError(
                f"sampling parameter {key}={value} has no effect with "
                f"rollout.name={ENGINE_ROLLOUT}; leave it out, or use rollout.name=vllm"
            )
    if options.get("top_k", 0) < 0:  # verl's "off"
        options["top_k"] = 0
    options.setdefault("ignore_eos", config.ignore_eos)
    if config.full_determinism:  # the engine's own seeds depend on the order of arrival
        options.setdefault("seed", zlib.crc32(request_id.encode()) + config.seed)
    return SamplingParams(max_tokens=max(1, min(most, limit - prompt_len)), **options)


class EngineReplica(RolloutReplica):
    """verl's replica of the native engine, on the GPUs of `tensor_model_parallel_size` workers."""

    async def launch_servers(self) -> None:
        """Start the server on the node of the workers, and the engine on their GPUs."""
        if self.rollout_mode != RolloutMode.HYBRID:
            raise ValueError(
                f"rollout.name={ENGINE_ROLLOUT} cannot run as a {self.rollout_mode.value} server: "
                "its weights come from trainer ranks on its GPUs; use rollout.name=vllm"
            )
        places = await asyncio.gather(
            *[worker.__ray_call__.remote(place) for worker in self.workers]
        )
        nodes = {node for node, _ in places}
        if len(nodes) > 1:
            raise ValueError(
                f"rollout.tensor_model_parallel_size={self.world_size} spans {len(nodes)} nodes; "
                f"the ranks of a replica of rollout.name={ENGINE_ROLLOUT} need one node; lower it"
            )
        platform = get_platform()
        keep = dict.fromkeys(platform.ray_noset_envvars(), "1")
        name = server_name(self.replica_rank, self.name_suffix)
        server: Any = ray.remote(EngineServer)
        handle = server.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(nodes.pop(), soft=False),
            runtime_env={"env_vars": keep | platform.rollout_env_vars()},
            name=name,
            max_concurrency=self.max_concurrency,
        ).remote(self.config, self.model_config, self.replica_rank, [gpu for _, gpu in places])
        self.servers.append(handle)
        await handle.launch_server.remote()
        # The address names the server in verl's load balancer. It serves no HTTP.
        self._server_handle, self._server_address = handle, name


def place(_: Any) -> tuple[str, str]:
    """Return the node and the GPU of the Ray actor in which this runs; no GPU is an empty id."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get(get_resource_name(), [])
    return context.get_node_id(), gpus[0] if gpus else ""
