"""A trainer of verl and its servers of the native engine, in actors of a Ray cluster."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from tests.helpers.docs.pages import ROOT
from tests.helpers.ray_cluster import until
from tests.helpers.trainer_bridge.other_trainers import VERL_VARIABLES
from tests.helpers.trainer_bridge.verl_sides import rollout_config, trainer_engine

NAME = "memsaver"
SECONDS = 220.0  # each process imports verl, which takes 15 s of CPU time
ENGINE = {"kv_tokens": 1024, "page_size": 16}


def configs(path: str, size: int, **changes: Any) -> tuple[Any, Any]:
    """Return verl's configurations of rollout and model."""
    from verl.workers.config import HFModelConfig

    fixed = {
        "name": NAME,
        "tensor_model_parallel_size": size,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 16,
        "prompt_length": 64,
        "response_length": 8,
        "engine_kwargs": {NAME: ENGINE},
    }
    return rollout_config(**fixed | changes), HFModelConfig(path=path, load_tokenizer=False)


class TrainerRank:
    """One rank of verl's trainer, with the engine and the rollout that verl's registries choose."""

    def __init__(self, rank: int, count: int, folder: str, path: str, size: int) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(f"{folder}/trainer", count)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
        from verl.workers.rollout.base import get_rollout_class

        config, model = configs(path, size)
        self.module: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        for layer in self.module.model.layers:
            fully_shard(layer)
        fully_shard(self.module)
        self.engine = trainer_engine(self.module, model)
        self.rollout: Any = get_rollout_class(NAME)(config, model, None)

    def refused(self, path: str, **changes: Any) -> str:
        """Return the error of a rollout with other settings."""
        try:
            type(self.rollout)(*configs(path, 1, **changes), None)
        except ValueError as error:
            return str(error)
        return "accepted"

    def resume(self, tag: str) -> None:
        asyncio.run(self.rollout.resume(tags=[tag]))

    def release(self) -> None:
        asyncio.run(self.rollout.release())

    def sync(self, version: int | None, module: bool = True) -> int:
        """Sync, and return the bytes; without `module`, from a module of other shapes."""
        if not module:
            vars(self.rollout)["_sync"] = None  # the first sync plans all later ones
        self.engine.module = self.module if module else fully_shard(torch.nn.Linear(4, 4))
        weights, _ = self.engine.get_per_tensor_param(base_sync_done=True)
        asyncio.run(self.rollout.update_weights(weights, global_steps=version))
        return int(self.rollout.receipt.nbytes)

    def update(self, version: int) -> None:
        """Change the weights and hand them over, in the order of verl's worker."""
        with torch.no_grad():
            for param in self.module.parameters():
                param.mul_(-0.5)
        self.resume("weights")
        self.sync(version)
        self.resume("kv_cache")

    def state(self) -> dict[str, torch.Tensor]:
        """Return the whole weights."""
        return {
            name: param.full_tensor().detach() for name, param in self.module.named_parameters()
        }


class VerlDriver:
    """The process of verl's trainer loop, which starts the servers and sends requests."""

    def __init__(self, workers: Sequence[Any], path: str, size: int) -> None:
        from verl.workers.rollout.llm_server import LLMServerManager

        rollout, model = configs(path, size)
        config: Any = SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(rollout=rollout, model=model)
        )
        group: Any = SimpleNamespace(workers=workers, world_size=len(workers))
        self.manager = LLMServerManager.create(config, group)
        self.client = self.manager.get_client()

    def kinds(self) -> list[str]:
        """Return the classes of the replicas, and the engines of others that were imported."""
        found = [type(replica).__name__ for replica in self.manager.rollout_replicas]
        return found + [name for name in ("vllm", "sglang") if name in sys.modules]

    def sleep(self) -> None:
        for replica in self.manager.rollout_replicas:
            asyncio.run(replica.sleep())

    def generate(self, requests: Sequence[tuple[list[int], dict[str, Any]]], **more: Any) -> Any:
        """Send requests together, and return the fields of verl's outputs."""

        async def together() -> list[Any]:
            calls = [
                self.client.generate(
                    str(number), prompt_ids=prompt, sampling_params=dict(params), **more
                )
                for number, (prompt, params) in enumerate(requests)
            ]
            return await asyncio.gather(*calls)

        return [SimpleNamespace(**vars(output)) for output in asyncio.run(together())]

    def aborted(self, prompt: list[int], params: dict[str, Any]) -> Any:
        """Abort a request that runs; return its output, and those of a held and a rejected one."""

        async def interrupted() -> Any:
            (replica,) = self.manager.rollout_replicas

            def ask(name: str) -> asyncio.Task[Any]:
                asked = {"prompt_ids": prompt, "sampling_params": dict(params)}
                return asyncio.ensure_future(self.client.generate(name, **asked))

            before = (await call_engines(self.manager, "stats"))[0].computed_tokens
            first = ask("first")
            while (await call_engines(self.manager, "stats"))[0].computed_tokens == before:
                await asyncio.sleep(0.001)
            await replica.abort_all_requests()
            held = ask("held")
            await asyncio.sleep(0.2)
            assert not held.done()
            await replica.resume_generation()
            outputs = [await first, await held]
            await replica.abort_all_requests(reject_request=True)
            outputs.append(await ask("rejected"))
            await replica.resume_generation()
            return outputs

        return [SimpleNamespace(**vars(output)) for output in asyncio.run(interrupted())]

    def engine(self, method: str) -> list[Any]:
        """Call a method of all ranks of all engines."""
        return asyncio.run(call_engines(self.manager, method))

    def end(self) -> None:
        import ray

        for handle in (*self.manager.server_handles, self.manager.global_load_balancer):
            ray.kill(handle)


async def call_engines(manager: Any, method: str) -> list[Any]:
    answers = [server.engine.remote(method) for server in manager.server_handles]
    return [*chain.from_iterable(await asyncio.gather(*answers))]


class Verl:
    """Both sides; methods of the driver and the trainer are called by name."""

    def __init__(self, trainers: list[Any], driver: Any) -> None:
        self._trainers, self._driver = trainers, driver

    def driver(self, method: str, *args: Any, **kwargs: Any) -> Any:
        import ray

        return ray.get(getattr(self._driver, method).remote(*args, **kwargs), timeout=SECONDS)

    def trainer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of all trainer ranks, and return the result of rank 0."""
        import ray

        calls = [getattr(rank, method).remote(*args, **kwargs) for rank in self._trainers]
        return ray.get(calls, timeout=SECONDS)[0]


@contextmanager
def verl_on_ray(wheels: Path, folder: Path, path: str, count: int, size: int) -> Iterator[Verl]:
    """Start `count` trainer ranks and the servers; every `size` ranks share an engine."""
    import ray

    places = [str(ROOT / "tests/helpers/trainer_bridge/verl_site"), str(ROOT), str(wheels)]
    common = {**VERL_VARIABLES, "PYTHONPATH": os.pathsep.join(places)}

    def started(kind: type, variables: dict[str, str], *args: Any) -> Any:
        options = {"num_cpus": 0, "runtime_env": {"env_vars": common | variables}}
        actor: Any = ray.remote(**options)(kind)
        return actor.remote(*args)

    trainers = [
        started(
            TrainerRank,
            {"RANK": str(rank), "RAY_LOCAL_WORLD_SIZE": str(count)},
            *(rank, count, str(folder), path, size),
        )
        for rank in range(count)
    ]
    driver = started(VerlDriver, {}, trainers, path, size)
    verl = Verl(trainers, driver)
    try:
        pids = verl.driver("engine", "pid")
        yield verl
    finally:
        try:
            ray.get(driver.end.remote(), timeout=60)
        finally:
            for actor in (*trainers, driver):
                ray.kill(actor)
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
