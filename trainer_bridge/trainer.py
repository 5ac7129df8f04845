"""The policy that learns: an FSDP2 model and its optimizer, on memory that can be offloaded."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memsaver import MemorySaver
from memsaver.errors import StateError
from memsaver.system.devices import place_of
from rollout.engine_base import SaverSide
from rollout.model import stored_buffers
from rollout.protocols import UpdatableEngine
from rollout.weights import Manifest
from trainer_bridge.config import TrainerConfig
from trainer_bridge.offload import Offloader, Wait, reserve_offload
from trainer_bridge.sync.agree import group_agreement
from trainer_bridge.sync.alias import PageAlias
from trainer_bridge.sync.weight_sync import SyncReceipt, WeightSync
from trainer_bridge.sync.writer import Shards
from trainer_bridge.tags import ADAPTERS, CRITIC, CRITIC_OPTIM, OPTIM, PARAMS, REFERENCE, TRAINED
from trainer_bridge.training import checkpoint
from trainer_bridge.training.batch import MicroBatch, SequenceBatch, check_learning
from trainer_bridge.training.critic import Critic
from trainer_bridge.training.device import Runtime
from trainer_bridge.training.lora import Adapters, base_params, without_adapters
from trainer_bridge.training.losses import (
    add_gradients,
    micro_logprobs,
    policy_gradient,
    score_tokens,
)
from trainer_bridge.training.model import (
    await_shards,
    build_model,
    fill_weights,
    reshard,
    shards_in_order,
    trained_params,
)
from trainer_bridge.training.moe import balanced_routers, replay
from trainer_bridge.training.optimizer import (
    Schedule,
    StreamedAdamW,
    after_load,
    build_optimizer,
    optimizer_step,
)


class Trainer(SaverSide):
    """Scores sequences, learns from them, and writes its weights into a rollout's memory.

    Parameters lie on tag `params`, the optimizer's moments on tag `optim`, both with content host;
    gradients, activations and unsharded layers are torch's own memory. With `config.critic` a
    critic lies on `critic` and `critic_optim`; with `config.reference` the first weights lie on
    `reference`, which is offloaded until somebody reloads it.

    With `config.optimizer_offload` nothing is on `optim`: moments, and masters of more precision
    than the parameters, lie on the host for good (`StreamedAdamW`). An update that is interrupted
    leaves a mixture there, which every call but `load_checkpoint` then refuses.

    With `config.lora` adapters are trained alone. They lie on tag `adapters`, offloaded and
    reloaded with `params`. That is frozen then: it is copied to the host once, and later pauses
    compare a digest. It is the reference, too.

    With several ranks (a process group made by the caller) every rank calls every method with the
    same arguments: each computes its share of the sequences, all get the whole answer.
    """

    def __init__(
        self,
        config: TrainerConfig,
        saver: MemorySaver | None = None,
        *,
        shard_dims: Mapping[str, int] | None = None,
        layout: Manifest | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        """saver: None makes one.

        shard_dims: see `aligned_dims`; a parameter that is not named is sharded by its first
        dimension.

        layout: of the rollout that `alias_weights` is for: parameters lie on tag `params` as its
        weights do. One rank, whole parameters of the same dtypes; a ValueError says
        what is not so.

        runtime: in place of the device that `config` names and of this process's default group.
        """
        self.config = config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self._runtime = runtime = runtime or Runtime.open(config.device)
        self.device, self.rank = runtime.device, runtime.rank
        self.saver = saver = saver or MemorySaver(device=runtime.device)
        with contextlib.ExitStack() as undo:
            undo.callback(runtime.close)
            if layout is not None and (runtime.world > 1 or config.lora):
                rule = "layout is for one rank, without TrainerConfig.lora"
                raise ValueError(f"{rule}; leave it away, and sync by copies")
            self._offloader = Offloader(saver)
            reserve_offload(config, runtime.world, saver)
            self.reference = self._first_weights()
            self.model = build_model(config, runtime, saver, shard_dims, layout)
            if config.router_aux_loss_coef and not balanced_routers(self.model):
                rule = "is of a mixture of experts that has this loss, and this model is none"
                raise ValueError(f"TrainerConfig.router_aux_loss_coef {rule}; leave it 0")
            self.optimizer = build_optimizer(
                list(trained_params(self.model).values()), config, runtime, saver
            )
            if isinstance(self.optimizer, StreamedAdamW):
                fill_weights(self.model, config, runtime, self.optimizer.masters())
                self.optimizer.publish()
            self._began_with = runtime.digest(self.model)
            self.step, self._schedule = 0, Schedule.of(config)
            self._adapters = None if config.lora is None else Adapters(self.model, config.lora)
            self._add_params()
            self._offloader.order = partial(shards_in_order, self.model)
            await_shards(self.model, self._offloader.await_content)
            self._offloader.add(OPTIM, empty=config.optimizer_offload)
            self.critic = self._value_model()
            self._layout = layout
            self._params = base_params(self.model)
            self._buffers = tuple(stored_buffers(self.model))
            self._shards = Shards(self._named)
            self._sync: WeightSync | None = None
            self._share: PageAlias | None = None
            undo.pop_all()

    def compute_log_prob(self, batch: SequenceBatch, *, base: bool = False) -> list[list[float]]:
        """Return log_softmax(logits / temperature)[token] in fp32 of every response token.

        base: of the frozen model, without adapters.
        """
        if base and self._adapters is None:
            rule = "needs TrainerConfig.lora: all parameters are trained here"
            raise ValueError(f"compute_log_prob(base=True) {rule}")
        self._require("compute_log_prob", PARAMS, prefetching=True)
        with without_adapters(self.model) if base else contextlib.nullcontext():
            return self._logprobs(self.model, batch)

    def compute_ref_log_prob(self, batch: SequenceBatch) -> list[list[float]]:
        """Return `compute_log_prob` by the weights before the first update; needs tag `reference`
        reloaded, with adapters `params`.
        """
        if self._adapters is not None and self.config.reference:
            return self.compute_log_prob(batch, base=True)
        if self.reference is None:
            raise StateError(
                "compute_ref_log_prob() has no reference; make the trainer with reference=True"
            )
        self._require("compute_ref_log_prob", REFERENCE)
        return self._logprobs(self.reference, batch)

    def compute_values(self, batch: SequenceBatch) -> list[list[float]]:
        """Return the critic's value per response token (`Critic`); needs tag `critic` reloaded."""
        return self._critic("compute_values", CRITIC).compute_values(batch)

    def update_critic(self, batch: SequenceBatch) -> dict[str, float]:
        """Make one AdamW step of the critic; see `Critic.update`."""
        return self._critic("update_critic", CRITIC, CRITIC_OPTIM).update(batch)

    def update_actor(self, batch: SequenceBatch) -> dict[str, float]:
        """Make one AdamW step on the clipped policy-gradient loss, the mean over all response
        tokens of the batch, plus `kl_loss_coef` times the KL divergence from the reference
        (`kl_k3`, whose mean is estimated from these tokens), plus `router_aux_loss_coef` times the
        load-balance loss of each micro batch, by its share of these tokens.

        Returns loss, grad_norm (before clipping), clip_fraction, approx_kl, entropy, learning_rate,
        tokens. A gradient that is not finite raises a FloatingPointError and changes nothing.
        """
        self._require("update_actor", PARAMS, OPTIM, prefetching=True)
        self._require_unaliased("update_actor")
        needed = ["old_logprobs", "advantages"]
        needed += ["ref_logprobs"] if self.config.kl_loss_coef else []
        check_learning("update_actor", batch, self.model.config, needed)
        self.zero_grad()
        learn = partial(policy_gradient, self.model, self.config, batch, self._runtime.world)
        size = self.config.micro_batch_size
        means = add_gradients(self.model, batch, learn, size, self._runtime)
        self._offloader.await_content()
        rate = self._schedule.after(self.step)
        grad_norm = optimizer_step(self.optimizer, self.config, rate, self.step)
        self.step += 1
        self._runtime.finish()  # what waits for the step is no part of the next stage
        names = ("loss", "clip_fraction", "approx_kl", "entropy")
        return dict(zip(names, means, strict=True)) | {
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "tokens": float(batch.num_tokens),
        }

    def offload(self, *tags: str, wait: bool = True, into: str | None = None) -> None:
        """Empty the cache, then move the tags (none: all) to the host and free their memory.

        into: the tag of this device's engine (`hand_over_to`) that wakes up next: it gets what it
        needs, and the driver the rest. Not without waiting.

        A model's tag that has not changed since it was offloaded last is not copied again, where a
        trainer scores with several models. wait: False returns while the copies go on; a tag's
        memory is freed when its copy is there, and the next call that needs a tag waits.
        """
        self.empty_cache()
        self._offloader.offload(*tags, wait=wait, into=into, peer=self._peer)

    def reload(self, *tags: str, wait: Wait = True) -> None:
        """Bring the tags (none: all) back, bit-identical, at the same addresses. Out of memory
        changes nothing.

        wait: False returns while they come, and the next call that needs a tag waits. Where memory
        is short then they stay offloaded: a reload that waits tries it again. "memory" waits only
        until they have memory. Then the policy's forward waits for the parameters of the unit that
        is next, the step for the moments, every other call for all of the tags it needs.
        """
        self._offloader.reload(*tags, wait=wait)

    def empty_cache(self) -> None:
        """Drop gradients and unsharded layers, and give torch's cached blocks to the device."""
        self.zero_grad()
        for model in self.models():
            reshard(model)
        self._runtime.empty_cache()

    def models(self) -> list[nn.Module]:
        """Return policy, reference and critic, as far as there are."""
        critic = None if self.critic is None else self.critic.model
        return [model for model in (self.model, self.reference, critic) if model is not None]

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.critic is not None:
            self.critic.optimizer.zero_grad(set_to_none=True)

    def connect(self, targets: Sequence[UpdatableEngine]) -> None:
        """Say which rollout engines, or handles on them, this rank speaks for: `sync_weights`
        replaces their weights.

        Raises:
            ValueError: Lists what does not fit; nothing has been touched then.
            SyncError: Says which other rank found that.
        """
        if self._sync is not None:
            self._sync.close()
        agreement, place = group_agreement(dist.group.WORLD), place_of(self.device)
        self._sync = WeightSync(
            self._shards.described(), self._tensors, targets, agreement, place=place
        )
        if self._layout is not None:
            self._share = PageAlias(self.saver, PARAMS, self._layout, self._sync)

    def sync_weights(self, version: int, *, shadow: bool = False) -> SyncReceipt:
        """Write the parameters into the engines' pages, verify them, and have them served as
        `version`: on all ranks, or nowhere. See `WeightSync.sync`.

        With adapters: merged, each weight rounded once; and only the adapted ones where all engines
        still serve what the sync before wrote.
        """
        self._require("sync_weights", PARAMS)
        if self._sync is None:
            rule = "sync_weights() has no rollout to write to"
            raise StateError(f"{rule}; call connect([engine]) first, on every rank")
        if self._adapters is None:
            return self._sync.sync(version, shadow=shadow)
        names = self._adapters.names if self._sync.holds() else None
        factors = self._adapters.factors()
        return self._sync.sync(version, shadow=shadow, names=names, derived=factors)

    def alias_weights(self, version: int) -> SyncReceipt:
        """Have the engines serve the parameters as `version` in the trainer's own pages; nothing is
        copied.

        Until the engines' weights sleep, what would change or offload the parameters raises. See
        `PageAlias.share`.
        """
        self._require("alias_weights", PARAMS)
        if self._share is None:
            rule = "alias_weights() needs parameters that lie as the rollout's weights do"
            remedy = "make the trainer with layout=engine.manifest, and call connect([engine])"
            raise StateError(f"{rule}; {remedy}")
        return self._share.share(version)

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's rows of every parameter by checkpoint name, without adapters; tied
        ones once.
        """
        tensors = self._tensors()
        return {name: tensors[name] for name in self._params}

    def save_checkpoint(self, directory: str, extra: dict[str, Any] | None = None) -> None:
        """Save what is trained (parameters, or adapters), moments, step and `extra` (JSON), whole
        or not at all; replaces what was there.
        """
        self._require("save_checkpoint", *TRAINED)
        values = {"step": self.step, "extra": extra or {}, "adapters": self._identity()}
        values |= {"began_with": self._began_with, "schedule": dataclasses.asdict(self._schedule)}
        if self.critic is not None:
            values["critic_step"] = self.critic.step
            values["critic_schedule"] = dataclasses.asdict(self.critic.schedule)
        checkpoint.save(directory, self._state(), values)

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        """Go on where `save_checkpoint` was called, bit-identical, in place. Returns its `extra`.

        With another `decay_steps` the learning rate falls to 0 there from that of the last update.
        A ValueError says what is of another model, OtherWeights that the run began with other
        weights than this trainer (which reference and adapters build on); nothing was changed then.
        """
        self._offloader.require("load_checkpoint", *TRAINED, undefined=True)
        self._require_unaliased("load_checkpoint")
        self.zero_grad()
        values = checkpoint.load(directory, self._state(), self._identity(), self._began_with)
        self.step = values["step"]
        self._schedule = Schedule.of(self.config).continuing(values.get("schedule"), self.step)
        after_load(self.optimizer, self.step)
        if (critic := self.critic) is not None:
            critic.step = values["critic_step"]
            begun = Schedule.of(critic.config)
            critic.schedule = begun.continuing(values.get("critic_schedule"), critic.step)
            after_load(critic.optimizer, critic.step)
        learned = PARAMS if self._adapters is None else ADAPTERS
        self._offloader.note(learned, OPTIM, CRITIC, CRITIC_OPTIM)
        return values["extra"]

    def save_adapters(self, directory: str) -> None:
        """Save the adapters as PEFT reads them, whole or not at all; replaces what was there."""
        self._require("save_adapters", PARAMS)
        if self._adapters is None:
            raise ValueError("save_adapters() needs TrainerConfig.lora: this trainer has none")
        self._adapters.save(directory, self.config.model_path)

    def close(self) -> None:
        """Unmap the rollouts' pages, end the process group made here. The saver is its maker's."""
        self._offloader.close()
        if self._sync is not None:
            self._sync.close()
        self._runtime.close()

    def _named(self) -> dict[str, Tensor]:
        """Return what is synced, by checkpoint name. Buffers may be other tensors each time."""
        return self._params | {name: self.model.get_buffer(name) for name in self._buffers}

    def _tensors(self) -> dict[str, Tensor]:
        self._offloader.await_content()
        return self._shards.tensors()

    def _logprobs(self, model: nn.Module, batch: SequenceBatch) -> list[list[float]]:
        def score(micro: MicroBatch) -> Tensor:
            with replay(model, micro.routed):
                return micro_logprobs(model, micro, batch.temperature)[0]

        return score_tokens(model, batch, score, self.config.micro_batch_size, self._runtime)

    def _add_params(self) -> None:
        if self._adapters is not None:
            self._offloader.add(PARAMS, lambda: "frozen", beside=(ADAPTERS,))
            return
        # A policy is offloaded once a step, always changed.
        alone = self.reference is None and self.config.critic is None
        self._offloader.add(PARAMS, None if alone else lambda: self.step)

    def _first_weights(self) -> nn.Module | None:
        """Return the reference, frozen, offloaded before anything else takes memory."""
        config = self.config
        if not config.reference or config.lora is not None:
            return None
        stored = dataclasses.replace(config, optimizer_offload=False)
        reference = build_model(stored, self._runtime, self.saver, tag=REFERENCE)
        self._offloader.add(REFERENCE, lambda: 0)
        self._offloader.offload(REFERENCE)
        return reference

    def _value_model(self) -> Critic | None:
        if self.config.critic is None:
            return None
        critic = Critic(self.config, self._runtime, self.saver)
        self._offloader.add(CRITIC, lambda: critic.step)
        self._offloader.add(CRITIC_OPTIM)
        return critic

    def _critic(self, method: str, *tags: str) -> Critic:
        if self.critic is None:
            raise StateError(
                f"{method}() has no critic; make the trainer with critic=CriticConfig()"
            )
        self._require(method, *tags)
        return self.critic

    def _state(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds. The reference is remade from what the run began with."""
        found = checkpoint.state(self.model, self.optimizer)
        if self.critic is not None:
            found |= checkpoint.state(self.critic.model, self.critic.optimizer, "critic.")
        return found

    def _identity(self) -> dict[str, Any] | None:
        return None if self._adapters is None else self._adapters.identity()

    def _require(self, method: str, *tags: str, prefetching: bool = False) -> None:
        """Raise a StateError for an offloaded tag or a half update; see `Offloader.require`."""
        self._offloader.require(method, *tags, prefetching=prefetching)
        if isinstance(self.optimizer, StreamedAdamW) and not self.optimizer.whole:
            text = "an update was interrupted, and parameters, masters and moments are of two steps"
            raise StateError(f"{method}(): {text}; call load_checkpoint(), or start anew")

    def _require_unaliased(self, method: str) -> None:
        if self.saver.leases(PARAMS):
            text = f"{method}() would change parameters that a rollout serves"
            raise StateError(f"{text}; put its weights to sleep first")
