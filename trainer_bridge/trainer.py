"""The trainer: an FSDP2 policy and its optimizer, on memory that can be offloaded."""

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
from rollout.engine import InFlight, SaverSide
from rollout.protocols import ShardedEngine, UpdatableEngine
from rollout.weights import Manifest
from trainer_bridge.config import Dtype, TrainerConfig
from trainer_bridge.exact.record import BitComparison
from trainer_bridge.fsdp_internals import await_shards, shards_in_order
from trainer_bridge.learning.batch import SequenceBatch
from trainer_bridge.learning.critic import Critic
from trainer_bridge.learning.optimizer import StreamedAdamW
from trainer_bridge.learning.policy import Policy
from trainer_bridge.learning.tokens import Tokens
from trainer_bridge.learning.trainer_model import Model
from trainer_bridge.models.adapters.lora import Adapters, without_adapters
from trainer_bridge.models.moe import balanced_routers
from trainer_bridge.models.runtime import Runtime
from trainer_bridge.models.sharded_model import fill_weights
from trainer_bridge.offload import Offloader, Wait, reserve_offload
from trainer_bridge.policy_sync import PolicySync
from trainer_bridge.sync.shards import local_shard
from trainer_bridge.sync.weight_sync import SyncReceipt
from trainer_bridge.tag_names import ADAPTERS, CRITIC, CRITIC_OPTIM, OPTIM, PARAMS, REFERENCE
from trainer_bridge.trainer_files import TrainerFiles


class Trainer(SaverSide):
    """A policy that scores sequences, learns from them, and writes its weights into a rollout.

    Parameters are on tag `params` and the optimizer's moments on tag `optim`. Both move to the host
    when they are offloaded. Gradients, activations and unsharded layers use torch's own memory, or
    with `config.cuda_graphs` tags that lose their memory in an offload (`LayerGraphs`).
    With `config.critic` a critic is on `critic` and `critic_optim`. With `config.reference` the
    initial weights are on `reference`, which stays offloaded until it is reloaded, and keeps its
    content until `refresh_reference` replaces it.

    With `config.optimizer_offload` tag `optim` is empty. Moments and fp32 masters of the parameters
    stay on the host (`StreamedAdamW`). An interrupted update leaves them at different steps, and
    every method except `load_checkpoint` then refuses to use them.

    With `config.lora` only adapters are trained. They are on tag `adapters`, which is offloaded and
    reloaded with `params`. The frozen `params` are copied to the host once; later pauses compare a
    digest. They are the reference, too.

    With several ranks, in a process group of the caller, every rank calls every method with the
    same arguments. Each rank computes its share of the sequences, and all ranks get the whole
    result. Calls from several threads must not overlap.

    Args:
        config: Configuration, kept as attribute `config`.
        saver: Saver of the tags, which the caller closes; None creates one.
        shard_dims: Dimension by which to shard a parameter, by name, as from `aligned_dims`. Other
            parameters are sharded by dimension 0.
        layout: Manifest of the rollout that `alias_weights` is for. Parameters are laid out on tag
            `params` like the rollout's weights. Only for one rank with the rollout's dtypes, and
            not for adapters that are merged; for several with `TrainerConfig.replicate`.
        runtime: Device and process group to use in place of `config.device` and this process's
            default group.

    Raises:
        ValueError: The configuration does not fit the model, or the model does not fit `layout`.

    Attributes:
        policy: The policy: module, optimizer, learning rate and loss scale (`Model`).
        critic: The critic, another such model; None without one.
        reference: The reference, which has no optimizer; None without one, or with adapters.
        models: The models that this trainer has, in this order.
        model: The policy's module, sharded by FSDP2. Call `reload` before you read its parameters.
        optimizer: The policy's optimizer.
        saver: Saver of the tags.
        device: Device of this rank.
        rank: This rank.
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
        self.config = config
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self._runtime = runtime = runtime or Runtime.open(config.device, config.replicate)
        runtime.keep_unsharded = config.keep_unsharded
        self.device, self.rank = runtime.device, runtime.rank
        self.saver = saver = saver or MemorySaver(device=runtime.device)
        with contextlib.ExitStack() as undo:
            undo.callback(runtime.close)
            merged = config.lora is not None and config.lora.served_as is None
            ranks = runtime.mesh.size()
            if layout is not None and (ranks > 1 or merged):
                rule = "layout is for ranks with all parameters, without adapters that are merged"
                raise ValueError(f"{rule}; omit it, and sync by copies")
            self._offloader = Offloader(saver)
            reserve_offload(config, ranks, saver)
            self.reference = self._build_reference(shard_dims)
            self.policy = self._build_policy(shard_dims=shard_dims, layout=layout)
            self.critic = self._build_critic()
            self.model, self.optimizer = self.policy.module, self.policy.optimizer
            built: list[Model | None] = [self.policy, self.critic, self.reference]
            self.models = [model for model in built if model is not None]
            self._bits = BitComparison(self.model)
            adapters = None if config.lora is None else Adapters(self.model, config.lora)
            self._files = TrainerFiles(self.models, adapters, runtime, self._began_with)
            self._sync = PolicySync(self.policy, adapters, saver, layout, self._offloader)
            undo.pop_all()

    @property
    def step(self) -> int:
        """Return the number of the policy's updates."""
        return self.policy.step

    def compute_log_prob(self, batch: SequenceBatch, *, base: bool = False) -> Tokens:
        """Compute the policy's log-probability of every response token.

        Needs tag `params` reloaded.

        Args:
            batch: Sequences; their `temperature` divides the logits.
            base: Score with the frozen base model, without adapters.

        Returns:
            log_softmax(logits / temperature)[token], computed in fp32, per sequence and response
            token.

        Raises:
            ValueError: `base` is set, but the trainer has no adapters.
            StateError: Tag `params` is offloaded, or its content is lost.
            FloatingPointError: A log-probability is not finite: the model exceeds the range of
                float16, or its weights are not finite.
        """
        if base and self.config.lora is None:
            rule = "needs TrainerConfig.lora: all parameters are trained here"
            raise ValueError(f"compute_log_prob(base=True) {rule}")
        self._require("compute_log_prob", PARAMS, prefetching=True)
        with without_adapters(self.model) if base else contextlib.nullcontext():
            return self.policy.score("compute_log_prob", batch)

    def compute_ref_log_prob(self, batch: SequenceBatch) -> Tokens:
        """Compute the reference's log-probability of every response token.

        Needs tag `reference` reloaded; with adapters, `params`.

        Args:
            batch: Sequences to score.

        Returns:
            Log-probabilities as from `compute_log_prob`, under the weights before the first update
            or of the last `refresh_reference`.

        Raises:
            StateError: The trainer has no reference, or the tag is offloaded.
            FloatingPointError: A log-probability is not finite.
        """
        if self.config.lora is not None and self.config.reference:
            return self.compute_log_prob(batch, base=True)
        reference = self._reference("compute_ref_log_prob", REFERENCE)
        return reference.score("compute_ref_log_prob", batch)

    def refresh_reference(self) -> None:
        """Copy the policy's parameters into the reference, rounded to the dtype of forward.

        Each rank copies its own shards. From then on, checkpoints hold the reference. Needs tags
        `params` and `reference` reloaded.

        Source: Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment" (2024), the
        hard update of TR-DPO; TRL's `sync_ref_model` can also mix old and new weights.

        Raises:
            StateError: The trainer has no reference, a frozen base is the reference, or a tag is
                offloaded.
        """
        if self.config.lora is not None:
            rule = "refresh_reference(): with adapters, the frozen base is the reference"
            raise StateError(f"{rule}; train without TrainerConfig.lora")
        reference = self._reference("refresh_reference", PARAMS, REFERENCE)
        with torch.no_grad():
            pairs = zip(reference.module.parameters(), self.model.parameters(), strict=True)
            for old, new in pairs:
                local_shard(old).copy_(local_shard(new))
        reference.step = self.step

    def compute_values(self, batch: SequenceBatch) -> Tokens:
        """Compute the critic's value of every response token (`Critic`).

        Needs tag `critic` reloaded.

        Args:
            batch: Sequences to score.

        Returns:
            fp32 values per sequence and response token.

        Raises:
            StateError: The trainer has no critic, or the tag is offloaded.
            FloatingPointError: A value is not finite.
        """
        return self._critic("compute_values", CRITIC).score("compute_values", batch)

    def update_critic(self, batch: SequenceBatch) -> dict[str, float]:
        """Run one AdamW step of the critic; see `Critic.update`.

        Needs tags `critic` and `critic_optim` reloaded.

        Args:
            batch: Sequences with `values` and `returns`.

        Returns:
            value_loss, value_clip_fraction, critic_grad_norm (before clipping),
            critic_learning_rate and, in float16, critic_loss_scale and critic_overflows.

        Raises:
            StateError: The trainer has no critic, or a tag is offloaded.
            ValueError: The batch lacks a field.
            FloatingPointError: A gradient is not finite; in float16, at none of 20 loss scales, or
                the loss is not finite either. Nothing has changed.
        """
        return self._critic("update_critic", CRITIC, CRITIC_OPTIM).update(batch)

    def update_actor(self, batch: SequenceBatch) -> dict[str, float]:
        """Run one AdamW step of the policy.

        The loss is `config.loss` (`PolicyLoss`) over the response tokens of the batch, plus
        `router_aux_loss_coef` times the load-balance loss of each micro batch, weighted by its
        share of these tokens. Needs tags `params` and `optim` reloaded.

        With `param_dtype="float16"` the loss is scaled (`LossScale`), and an update whose gradients
        overflow is computed again at half the scale, until they are finite.

        Args:
            batch: Sequences with `advantages` and either `old_logprobs` or `rollout_logprobs`, and
                with `ref_logprobs` if the loss has a KL term.

        Returns:
            loss, grad_norm (before clipping), clip_fraction (share of tokens whose ratio the loss
            clips, see `PolicyLoss`), its parts clip_fraction_low (ratio below 1 - clip_low) and
            clip_fraction_high (ratio above 1 + clip_high), approx_kl, entropy (nats),
            learning_rate and tokens. In float16 also loss_scale (which gave finite gradients) and
            overflows (how many times the update was computed again). With `rollout_logprobs` also
            the figures of `correct` with its default options and, with `ref_logprobs`,
            kl_to_reference. With `config.exact` too, unequal_tokens.

        Raises:
            UnequalTokens: With `config.exact`, a log-probability differs from the rollout's.
                Nothing has changed.
            StateError: A tag is offloaded, or an engine serves the parameters as aliased pages.
            ValueError: The batch lacks a field, has both kinds of log-probabilities, or one of the
                rollout's is not finite. Nothing has changed.
            FloatingPointError: A gradient is not finite; in float16, at none of 20 loss scales, or
                the loss is not finite either. Nothing has changed.
        """
        self._require("update_actor", PARAMS, OPTIM, prefetching=not self.config.cuda_graphs)
        self._require_unaliased("update_actor")
        figures = self.policy.update(batch, partial(self._compare, batch))
        self._runtime.finish()  # the step's queued work counts as part of this stage
        return figures

    def offload(self, *tags: str, wait: bool = True, into: str | None = None) -> None:
        """Free torch's cached blocks, then move tags to the host and free their memory.

        If a trainer scores with several models, a model that has not changed since it was last
        offloaded is not copied again.

        Args:
            *tags: Tags to offload; all if empty.
            wait: False returns while the copies are running. The memory of a tag is freed when its
                copy is complete, and the next call that needs a tag waits.
            into: Tag of this device's engine (`hand_over_to`) that wakes up next. The engine
                receives the memory that the tag needs, the driver the rest. Ignored if `wait` is
                False.

        Raises:
            ValueError: A tag is unknown.
            LeaseError: An engine serves the parameters as aliased pages.
        """
        self.empty_cache()
        self._offloader.offload(*tags, wait=wait, into=into, peer=self._peer)

    def reload(self, *tags: str, wait: Wait = True) -> None:
        """Reload tags, bit-identical and at the same addresses.

        Args:
            *tags: Tags to reload; all if empty.
            wait: False returns immediately, and the next call that needs a tag waits for it. If
                memory is short at that time, the tags stay offloaded; a reload that waits tries
                again. "memory" waits only until the tags have memory. Then the policy's forward
                waits for the parameters of its next unit, the optimizer step waits for the moments,
                and other calls wait for the whole of the tags they need.

        Raises:
            ValueError: A tag is unknown.
            OutOfMemory: The device lacks memory. Nothing has changed.
        """
        self._offloader.reload(*tags, wait=wait)

    def empty_cache(self) -> None:
        """Free gradients, unsharded layers and torch's cached blocks."""
        for model in self.models:
            model.free()
        self._runtime.empty_cache()

    def connect(
        self,
        targets: Sequence[UpdatableEngine | ShardedEngine],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Connect this rank to the rollout engines whose weights `sync_weights` replaces.

        Args:
            targets: Engines, or handles on engines, that this rank calls; may be empty.
            group: The trainer's ranks, followed by receiving ranks (`WeightSync.follow`); None:
                the trainer's ranks alone.

        Raises:
            ValueError: The weights do not fit; the text lists the differences. Nothing has been
                touched.
            SyncError: Another rank failed; the text names it.
        """
        self._sync.connect(targets, group, self.device)

    def sync_weights(
        self, version: int, *, shadow: bool = False, in_flight: InFlight = "refuse"
    ) -> SyncReceipt:
        """Write the parameters into the engines' pages, verify and serve them; see `WeightSync`.

        The new version is served on all ranks or on none. Adapters are merged into the base, and
        each weight is rounded once. Only adapted weights are written if all engines still serve the
        version of the previous sync. With `LoraConfig.served_as`, adapters are written into slots
        of their own, and the base into engines that do not have it.

        Args:
            version: Number of these weights; not lower than that of the last sync.
            shadow: Write into a second copy, while the engines serve the old version.
            in_flight: What the sync means for running requests: refuse it ("refuse"), let them
                start over under the new version ("recompute"), or go on over the keys and values
                that they have ("keep").

        Returns:
            The receipt, equal on all ranks but for the seconds.

        Raises:
            StateError: Tag `params` is offloaded, or no engine is connected.
            ValueError: The version is stale, or the parameters have moved to another device.
            SyncError: Another rank failed; the text names stage, rank and error.
        """
        self._require("sync_weights", PARAMS)
        return self._sync.sync(version, shadow=shadow, in_flight=in_flight)

    def alias_weights(self, version: int) -> SyncReceipt:
        """Share the trainer's pages with the engines, which then serve them; see `PageAlias.share`.

        Until the engines' weights sleep, calls that would change or offload the parameters raise.
        With adapters the parameters never change, so engines may serve them for good. The adapters
        are written into slots of the engines, as by `sync_weights`.

        Args:
            version: Number of these weights; not lower than that of the last call.

        Returns:
            The receipt. No bytes were written.

        Raises:
            StateError: Tag `params` is offloaded, or the trainer was created without `layout` or
                has not been connected.
            ValueError: The version is stale.
            SyncError: Another rank failed; the text names stage, rank and error.
        """
        self._require("alias_weights", PARAMS)
        return self._sync.alias(version)

    def shards(self) -> dict[str, Tensor]:
        """Return this rank's rows of every parameter, without adapters.

        Returns:
            Tensors by checkpoint name; tied parameters appear once.
        """
        return self._sync.shards()

    def save_checkpoint(
        self, directory: str, extra: dict[str, Any] | None = None, *, wait: bool = True
    ) -> None:
        """Save trained parameters or adapters, moments and steps, replacing an older checkpoint.

        A refreshed reference is saved, too, and then tag `reference` is needed. The directory is
        replaced as a whole or not at all.

        Args:
            directory: Directory of the checkpoint.
            extra: JSON data to store with it.
            wait: Whether the checkpoint is complete when the call returns. Otherwise it is copied
                to the host, a thread writes it, and `finish_checkpoint` completes it. A rank whose
                host has no room for the copy writes at once.

        Raises:
            StateError: A tag of the checkpoint is offloaded.
            OtherRankFailed: Another rank failed; the older checkpoint stays.
        """
        self._require("save_checkpoint", *self._files.tags())
        self._files.save(directory, extra or {}, wait)

    def finish_checkpoint(self, wait: bool = True) -> bool:
        """Complete the checkpoint of a `save_checkpoint` that did not wait.

        The next save and a load do so, too. `close` drops a checkpoint that is not complete.

        Args:
            wait: Whether to wait until all ranks have written their parts.

        Returns:
            Whether no checkpoint is being written any more.

        Raises:
            OSError: A file could not be written; the older checkpoint stays.
            OtherRankFailed: Another rank failed; the older checkpoint stays.
        """
        return self._files.finish(wait)

    def load_checkpoint(self, directory: str) -> dict[str, Any]:
        """Restore the state of `save_checkpoint` in place, bit-identical.

        With another number of ranks, moments in 8 bits may be rounded once more (`requantize`). If
        `schedule.updates` differs from the saved one, the learning rate falls from that of the last
        update to the final rate at the new end (`LearningRate.continuing`). If the saved reference
        was refreshed, or that of this trainer, tag `reference` is needed.

        Args:
            directory: Directory of the checkpoint.

        Returns:
            The `extra` that was saved.

        Raises:
            StateError: A needed tag is offloaded, or an engine serves the parameters as aliased
                pages.
            ValueError: The checkpoint belongs to another model or optimizer. Nothing has changed.
            OtherWeights: The saved run started from other weights than this trainer; reference and
                adapters depend on them. Nothing has changed.
            OtherRankFailed: Another rank failed to read its part; other parts may have been loaded.
        """
        tags = self._files.tags(directory)
        self._offloader.require("load_checkpoint", *tags, undefined=True)
        self._require_unaliased("load_checkpoint")
        extra = self._files.load(directory)
        frozen = () if self.config.lora is None else (PARAMS,)
        self._offloader.note(ADAPTERS, *(tag for tag in tags if tag not in frozen))
        return extra

    def save_pretrained(
        self,
        directory: str,
        *,
        dtype: Dtype | None = None,
        merge_adapters: bool = False,
        chat_template: str | None = None,
    ) -> None:
        """Save the policy as a Hugging Face folder, or its adapters in PEFT's form.

        The folder has weights under the names of the model's directory, config.json, and copies of
        tokenizer, chat template and generation config, which gets all tokens that end answers of
        the engine. transformers, vLLM and `Engine` load it. A
        trainer with adapters saves the adapters alone, for `PeftModel.from_pretrained`.

        The ranks gather one parameter at a time. Rank 0 writes, in files of about 2 GiB. An older
        export is replaced as a whole or not at all.

        Args:
            directory: Directory of the export, on a disk of rank 0.
            dtype: Dtype of the weights; None: the dtype of forward and rollout (`param_dtype`), or
                the dtype of the adapters. With `optimizer_offload` the parameters are exported,
                which are already rounded, not the masters.
            merge_adapters: Save the whole model with the adapters merged, with the bits that
                `sync_weights` writes.
            chat_template: Chat template in place of the model's own; an empty text is none.

        Raises:
            StateError: Tag `params` is offloaded.
            ValueError: `dtype` is unknown, `merge_adapters` does not fit the trainer, the model's
                directory has gone or changed, or `directory` holds other files than an export.
                Nothing has changed.
            OSError: The disk is full or read-only; the older folder stays.
            OtherRankFailed: Another rank failed; the older folder stays.
        """
        self._require("save_pretrained", PARAMS)
        self._offloader.await_content()
        how = {"merge_adapters": merge_adapters, "chat_template": chat_template}
        self._files.export(directory, dtype, **how)

    def close(self) -> None:
        """Unmap the rollouts' pages, and end the process group if the trainer opened it.

        Rollouts give the trainer's pages back, and serve nothing then. The saver stays open.
        """
        self._files.drop()
        self._offloader.close()
        self._sync.end()
        self._runtime.close()

    def _build_reference(self, shard_dims: Mapping[str, int] | None) -> Policy | None:
        if not self.config.reference or self.config.lora is not None:
            return None
        config = dataclasses.replace(self.config, optimizer_offload=False)
        # Sharded like the policy, so that each rank has what `refresh_reference` copies.
        runtime, saver = self._runtime, self.saver
        reference = Policy.build(config, runtime, saver, REFERENCE, shard_dims=shard_dims)
        self._offloader.add(REFERENCE, lambda: reference.step)
        self._offloader.offload(REFERENCE)  # before other models take memory
        return reference

    def _build_policy(self, **how: Any) -> Policy:
        config, offloader = self.config, self._offloader
        policy = Policy.build(config, self._runtime, self.saver, PARAMS, OPTIM, **how)
        if config.router_aux_loss_coef and not balanced_routers(policy.module):
            rule = "needs a mixture of experts with this loss, which this model is not"
            raise ValueError(f"TrainerConfig.router_aux_loss_coef {rule}; set it to 0")
        masters = dict[nn.Parameter, Tensor]()
        if isinstance(policy.optimizer, StreamedAdamW):
            masters = policy.optimizer.masters()
            fill_weights(policy.module, config, self._runtime, masters)
            policy.optimizer.publish()
        self._began_with = self._runtime.digest(policy.module, masters)
        if config.lora is not None:
            offloader.add(PARAMS, lambda: "frozen", companions=(ADAPTERS,))
        else:
            # Without other models the policy is offloaded once per step, after it has changed.
            alone = self.reference is None and config.critic is None
            offloader.add(PARAMS, None if alone else lambda: policy.step)
        offloader.add(OPTIM, empty=config.optimizer_offload)
        # A reload may still be copying. Forward waits for the shards of its next unit, and the
        # optimizer step waits for the moments.
        offloader.order = partial(shards_in_order, policy.module)
        await_shards(policy.module, offloader.await_content)
        policy.optimizer.register_step_pre_hook(lambda *_: offloader.await_content())
        return policy

    def _build_critic(self) -> Critic | None:
        if self.config.critic is None:
            return None
        config = self.config.of_critic()
        critic = Critic.build(config, self._runtime, self.saver, CRITIC, CRITIC_OPTIM)
        self._offloader.add(CRITIC, lambda: critic.step)
        self._offloader.add(CRITIC_OPTIM)
        return critic

    def _reference(self, method: str, *tags: str) -> Policy:
        if self.reference is None:
            rule = f"{method}() has no reference"
            raise StateError(f"{rule}; create the trainer with reference=True")
        self._require(method, *tags)
        return self.reference

    def _critic(self, method: str, *tags: str) -> Critic:
        if self.critic is None:
            rule = f"{method}() has no critic"
            raise StateError(f"{rule}; create the trainer with critic=CriticConfig()")
        self._require(method, *tags)
        return self.critic

    def _compare(self, batch: SequenceBatch, logprobs: Tokens) -> dict[str, float]:
        """Return the figures of an exact trainer's update, or raise UnequalTokens."""
        if not self.config.exact:
            return {}
        unequal = self._bits.count(self.config, self.step, batch, logprobs)
        return {"unequal_tokens": float(unequal)}

    def _require(self, method: str, *tags: str, prefetching: bool = False) -> None:
        """Require reloaded tags and a complete update; see `Offloader.require`."""
        self._offloader.require(method, *tags, prefetching=prefetching)
        if not all(model.whole for model in self.models):
            text = "an update was interrupted; parameters, masters and moments belong to two steps"
            raise StateError(f"{method}(): {text}; call load_checkpoint(), or restart")

    def _require_unaliased(self, method: str) -> None:
        """Require that no rollout serves the parameters, unless adapters alone are trained."""
        if self.config.lora is None and self.saver.leases(PARAMS):
            text = f"{method}() would change parameters that a rollout serves"
            raise StateError(f"{text}; put the rollout's weights to sleep first")
