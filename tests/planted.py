"""Deliberate bugs in all five packages, each of which the test suite must catch.

`python -m tests.planted` plants one bug after the other in a copy of the working tree, and runs the
tests that must fail. Words on the command line select bugs by name and file.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]


class Bug(NamedTuple):
    """A bug and the tests that must catch it.

    Attributes:
        name: The faulty behavior.
        file: The product's file.
        tests: A file in `tests/`, in which a test must fail.
        right: Text that occurs once in `file`.
        wrong: Text that replaces it.
    """

    name: str
    file: str
    tests: str
    right: str
    wrong: str


BUGS = [
    Bug(
        "a refused pause leaves the tag frozen",
        "memsaver/tag/transaction.py",
        "memsaver/test_fault_injection.py",
        "                undo.callback(arena.thaw)\n            self._drain(streams)",
        "            self._drain(streams)",
    ),
    Bug(
        "two processes resume at the same time",
        "memsaver/tag/transaction.py",
        "memsaver/test_fault_injection.py",
        "            with self._device_lock:\n                refills",
        "            if True:\n                refills",
    ),
    Bug(
        "a discarded tag keeps its version",
        "memsaver/tag/arena.py",
        "memsaver/content/test_clean.py",
        "        self.backup, self.version = backup, None\n",
        "        self.backup = backup\n",
    ),
    Bug(
        "a clean copy that ends past the tag's memory counts as its content",
        "memsaver/content/on_host.py",
        "memsaver/content/test_clean.py",
        "offset + nbytes > committed for",
        "offset > committed for",
    ),
    Bug(
        "extents stay charged when a peer's hand-over fails",
        "memsaver/memory/page_pool.py",
        "memsaver/test_fault_injection.py",
        "            undo.callback(shim.discharge, backend.phys, nbytes)\n",
        "",
    ),
    Bug(
        "a piece of exactly the right size is left out",
        "memsaver/memory/page_pool.py",
        "memsaver/test_resize.py",
        "if rest >= size:",
        "if rest > size:",
    ),
    Bug(
        "a forked child believes that it holds its parent's lock",
        "memsaver/system/device_lock.py",
        "memsaver/test_device_lock.py",
        "        self._depth = 0\n        self._close()\n",
        "        self._close()\n",
    ),
    Bug(
        "a tensor that begins inside a piece is released before its bytes have arrived",
        "memsaver/tag/prefetch.py",
        "memsaver/test_prefetch.py",
        "bisect_right(self._spans, (first,)) - 1",
        "bisect_right(self._spans, (first,))",
    ),
    Bug(
        "memory that was handed over stays charged to its giver",
        "memsaver/sharing/hand_over.py",
        "memsaver/test_hand_over.py",
        "    shim.discharge(backend.phys, sum(extent.nbytes for extent in extents))\n",
        "",
    ),
    Bug(
        "an extend that fails on the device leaves pages in the table that are free",
        "kvcache/blocks.py",
        "kvcache/test_blocks.py",
        "            self._pages[at] = before\n",
        "",
    ),
    Bug(
        "a forked sequence writes into a page that its fork shares",
        "kvcache/blocks.py",
        "kvcache/test_forest.py",
        "self._forked[[parent, child.row]] = True",
        "self._forked[child.row] = True",
    ),
    Bug(
        "the upper half of a split node loses its locks",
        "kvcache/radix/cache.py",
        "kvcache/radix/test_radix_stateful.py",
        "upper.lock_ref = node.hits, node.priority, node.lock_ref",
        "upper.lock_ref = node.hits, node.priority, 0",
    ),
    Bug(
        "pages computed under older weights are found",
        "kvcache/radix/cache.py",
        "kvcache/tiers/test_prefix.py",
        "if version < self.version:\n            return len(run)",
        "if version < 0:\n            return len(run)",
    ),
    Bug(
        "fp8 rows are scaled in the wanted dtype instead of fp32",
        "kvcache/ops/quant.py",
        "kvcache/test_ops.py",
        "(buffer[loc].view(stored).float() * scale).clamp",
        "(buffer[loc].view(stored).to(dtype) * scale.to(dtype)).clamp",
    ),
    Bug(
        "a writer fills a staging range one round too early",
        "kvcache/staging.py",
        "kvcache/staging/test_ring.py",
        "or before < watermark.round",
        "or before <= watermark.round",
    ),
    Bug(
        "readers and writers of replicated heads are paired wrongly",
        "kvcache/staging.py",
        "kvcache/staging/test_ring.py",
        "HeadSlice(src_rank, first - src_first, first - dst_first, count)",
        "HeadSlice(src_rank, first - dst_first, first - src_first, count)",
    ),
    Bug(
        "a sequence writes into a shared page after its need of pages was computed",
        "kvcache/blocks.py",
        "kvcache/test_forest.py",
        "[rows[writers[owners == 1]]] = False",
        "[rows[writers]] = False",
    ),
    Bug(
        "pages of older weights are written to the host as current ones",
        "kvcache/tiers/tiered_prefix.py",
        "kvcache/tiers/test_prefix.py",
        "for page, version, key in known if version == self.version]",
        "for page, version, key in known]",
    ),
    Bug(
        "a committed double buffer leaves the old weights' prefixes in the cache",
        "rollout/weights/update.py",
        "rollout/test_updates.py",
        "            self._shadow.exchange()\n            self._on_new_weights()\n",
        "            self._shadow.exchange()\n",
    ),
    Bug(
        "top-k admits one token too many",
        "rollout/ops/token_sampling.py",
        "rollout/test_sampler.py",
        "ordered.masked_fill(rank >= limit, 0.0)",
        "ordered.masked_fill(rank > limit, 0.0)",
    ),
    Bug(
        "decode begins splits at other positions than prefill",
        "rollout/ops/attention_kernels.py",
        "rollout/test_attention.py",
        "octave = tl.maximum(split // PARTS, 1) - 1",
        "octave = tl.maximum(split // PARTS, 2) - 2",
    ),
    Bug(
        "padding of a captured step begins before its prompts",
        "rollout/running/graph_inputs.py",
        "rollout/test_attention.py",
        "requests[1, most:] = count",
        "requests[1, most:] = 0",
    ),
    Bug(
        "a trainer leaves the norms to transformers",
        "trainer_bridge/models/fused.py",
        "trainer_bridge/exact/test_exact.py",
        "            module.forward = partial(_norm, module)",
        "            pass",
    ),
    Bug(
        "passes of a single rank reuse copies of weights of an earlier step",
        "trainer_bridge/fsdp_internals.py",
        "trainer_bridge/test_fsdp_internals.py",
        "            self.copies.free()",
        "            pass",
    ),
    Bug(
        "a single rank forgets the gradients of earlier micro batches",
        "trainer_bridge/fsdp_internals.py",
        "trainer_bridge/test_trainer.py",
        "            local_tensor(shard.grad).add_(grad)",
        "            shard.grad = self.to_sharded_dtensor(grad)",
    ),
    Bug(
        "the gradient of a rotation turns the same way",
        "trainer_bridge/ops/decoder_ops.py",
        "trainer_bridge/test_decoder_ops.py",
        "return *(rotated(grad, *tables, True, ctx.impl) for grad in grads), None, None, None",
        "return *(rotated(grad, *tables, False, ctx.impl) for grad in grads), None, None, None",
    ),
    Bug(
        "an exact trainer does not compare the library's products with their definition",
        "trainer_bridge/models/sharded_model.py",
        "trainer_bridge/exact/test_exact_products.py",
        "        define_products(model, runtime.device, config)\n",
        "",
    ),
    Bug(
        "experts with equal scores are ordered by descending id",
        "rollout/ops/routing.py",
        "rollout/test_experts.py",
        "return scores.sort(dim=-1, descending=True, stable=True)",
        "return scores.size(-1) - 1 - scores.flip(-1).sort(dim=-1, descending=True, stable=True)",
    ),
    Bug(
        "an exact trainer of a tensor-parallel engine adds up whole products",
        "trainer_bridge/exact/model.py",
        "trainer_bridge/exact/test_exact_ranks.py",
        "    return exact_ranks if layer.endswith(ROW_PARALLEL) else 1",
        "    return 1",
    ),
    Bug(
        "exact=auto does not look at the keys that exclude exact runs",
        "recipes/setup/model_decisions.py",
        "recipes/test_exact_auto.py",
        "    if setting := excludes_exact(recipe):\n",
        "    if False:\n",
    ),
    Bug(
        "a resumed run decides exact=auto anew",
        "recipes/setup/model_decisions.py",
        "recipes/test_exact_auto.py",
        "    if before is not None:\n",
        "    if False:\n",
    ),
    Bug(
        "an exact trainer leaves the routers to transformers",
        "trainer_bridge/exact/model.py",
        "trainer_bridge/exact/test_exact.py",
        "        router.forward = partial(_route, mlp, router)",
        "        pass",
    ),
    Bug(
        "an update ignores log-probabilities that differ from the rollout's",
        "trainer_bridge/exact/record.py",
        "trainer_bridge/exact/test_exact.py",
        '        if config.exact != "warn":',
        "        if False:",
    ),
    Bug(
        "the position is left out of the random numbers",
        "rollout/ops/token_sampling.py",
        "rollout/test_sampler.py",
        "for column in range(1, counters.shape[1]):",
        "for column in range(1, counters.shape[1] - 1):",
    ),
    Bug(
        "a request reads keys and values of another adapter",
        "rollout/scheduling/prefix.py",
        "rollout/test_adapters.py",
        "        return self.cache.match_prefix(tokens, extra_key=namespace)",
        "        return self.cache.match_prefix(tokens)",
    ),
    Bug(
        "keys and values of an adapter are cached as those of the base",
        "rollout/scheduling/prefix.py",
        "rollout/test_adapters.py",
        "version=held.version, extra_key=own) // size",
        "version=held.version) // size",
    ),
    Bug(
        "a new version of an adapter is written over one that requests need",
        "rollout/engine/served_adapters.py",
        "rollout/test_adapters.py",
        "        busy = {adapter.slot for adapter in needed if adapter is not None}",
        "        busy = set[int]()",
    ),
    Bug(
        "an aborted sample keeps its swapped pages on the host",
        "rollout/scheduling/scheduler.py",
        "rollout/test_swap.py",
        "            self.blocks.forget(sample.swapped)\n",
        "",
    ),
    Bug(
        "a tensor-parallel rank looks tokens up in the other ranks' rows",
        "rollout/parallel.py",
        "rollout/test_tensor_parallel.py",
        "at = token_ids - self.rank * len(rows)",
        "at = token_ids - (self.size - 1 - self.rank) * len(rows)",
    ),
    Bug(
        "a fork shares cached pages without locking them",
        "rollout/scheduling/prefix.py",
        "rollout/split/test_split.py",
        "            self.cache.inc_lock_ref(self._held[child].node)\n",
        "",
    ),
    Bug(
        "a sample's random numbers depend on its row in the batch",
        "rollout/scheduling/sample_rows.py",
        "rollout/test_engine.py",
        "np.stack([self._seed[rows], self._index[rows], place], axis=1)",
        "np.stack([self._seed[rows], rows, place], axis=1)",
    ),
    Bug(
        "ranks beyond the KV heads hold copies in turn, not side by side",
        "rollout/weights/params.py",
        "rollout/test_sharding.py",
        "index * units // count, index * units // count + 1",
        "index % units, index % units + 1",
    ),
    Bug(
        "the lower bound also clips above",
        "trainer_bridge/learning/policy_loss.py",
        "trainer_bridge/learning/test_policy_loss.py",
        "held = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)",
        "held = ratio.clamp(1 - loss.clip_high, 1 + loss.clip_low)",
    ),
    Bug(
        "a sync that fails does not poison the rollout",
        "trainer_bridge/cycle.py",
        "trainer_bridge/test_cycle.py",
        'POISONING = ("sync_weights",)',
        "POISONING = ()",
    ),
    Bug(
        "other ranks continue when a single rank fails",
        "trainer_bridge/sync/agree.py",
        "trainer_bridge/test_agree.py",
        "        if failed:\n            raise SyncError(stage",
        "        if len(failed) > 1:\n            raise SyncError(stage",
    ),
    Bug(
        "an engine with aliased pages continues after another engine failed",
        "trainer_bridge/sync/alias.py",
        "trainer_bridge/test_inprocess.py",
        "            abort_all(asked, error)\n",
        "",
    ),
    Bug(
        "the learning rate is that of the update before",
        "trainer_bridge/learning/optimizer.py",
        "trainer_bridge/learning/test_learning_rate.py",
        "max(0, updates - self.start) /",
        "max(0, updates - 1 - self.start) /",
    ),
    Bug(
        "two ranks learn from the same sequences",
        "trainer_bridge/learning/batch.py",
        "trainer_bridge/learning/test_batch.py",
        "    own_rows = order[rank::world]\n",
        "    own_rows = order[rank // 2 :: world]\n",
    ),
    Bug(
        "each micro batch's loss is divided by its own tokens",
        "trainer_bridge/learning/policy_loss.py",
        "trainer_bridge/models/test_packing.py",
        "return 1 / batch.num_tokens",
        "return 1 / max(1, len(micro.target))",
    ),
    Bug(
        "a mean over answers counts those of the micro batch only",
        "trainer_bridge/learning/policy_loss.py",
        "trainer_bridge/learning/test_policy_loss.py",
        "factors = 1 / (batch.num_answers * ",
        "factors = 1 / (len(micro.rows) * ",
    ),
    Bug(
        "importance weights have no effect",
        "trainer_bridge/learning/policy.py",
        "trainer_bridge/test_trainer.py",
        "        if batch.weights is not None:\n",
        "        if False:\n",
    ),
    Bug(
        "a mask of importance weights has no lower bound",
        "trainer_bridge/learning/correction.py",
        "trainer_bridge/learning/test_correction.py",
        "above | (raw < config.low) if masks else above",
        "above",
    ),
    Bug(
        "the loss rewards a low entropy",
        "trainer_bridge/learning/policy.py",
        "trainer_bridge/learning/test_policy_loss.py",
        "terms - loss.entropy_coef * entropy",
        "terms + loss.entropy_coef * entropy",
    ),
    Bug(
        "the warm-up begins with an update of rate 0",
        "trainer_bridge/learning/optimizer.py",
        "trainer_bridge/learning/test_learning_rate.py",
        "self.learning_rate * (updates + 1) / (warmup + 1)",
        "self.learning_rate * updates / warmup",
    ),
    Bug(
        "norms and biases decay",
        "trainer_bridge/learning/optimizer.py",
        "trainer_bridge/learning/test_critic.py",
        "([p for p in params if p.ndim < 2], 0.0)",
        "([p for p in params if p.ndim < 2], weight_decay)",
    ),
    Bug(
        "a checkpoint leaves out the refreshed reference",
        "trainer_bridge/trainer.py",
        "trainer_bridge/models/test_checkpoint.py",
        "        reference.step = self.step\n",
        "",
    ),
    Bug(
        "codes of a block that gets elements of two blocks keep their bits",
        "trainer_bridge/models/files/moments_8bit.py",
        "trainer_bridge/learning/test_adamw_8bit.py",
        "keep = high == low",
        "keep = high >= low",
    ),
    Bug(
        "a resumed critic continues from the policy's number of updates",
        "trainer_bridge/learning/trainer_model.py",
        "trainer_bridge/models/test_checkpoint.py",
        'self.step = values.get(f"{prefix}step", 0)',
        'self.step = values.get("step", 0)',
    ),
    Bug(
        "a request of verl whose caller left is generated to its end",
        "rollout/loop/owner.py",
        "trainer_bridge/adoption/test_named_requests.py",
        "        if future.cancelled():\n            function(future)\n",
        "        assert future.done()\n",
    ),
    Bug(
        "a sample that starts over gets the token of a step that was launched before",
        "rollout/engine/token_steps.py",
        "rollout/test_overlap.py",
        "known = self._rows.generation[launched.rows] == launched.generations\n",
        "known = self._rows.generation[launched.rows] >= 0\n",
    ),
    Bug(
        "results of later steps are kept where earlier ones were lost",
        "rollout/engine/token_steps.py",
        "rollout/test_overlap.py",
        "                self.under_way.clear()  # later tokens follow those that were lost\n",
        "                pass\n",
    ),
    Bug(
        "a swapped sample continues from the last token of its row's earlier owner",
        "rollout/scheduling/sample_rows.py",
        "rollout/test_overlap.py",
        "        self.on_device[row], self.searching[row] = False, ",
        "        self.searching[row] = ",
    ),
    Bug(
        "the prefix cache keeps the last token, whose keys and values are not computed",
        "rollout/scheduling/samples.py",
        "rollout/test_overlap.py",
        "self.tokens(0, self.seen - 1 if",
        "self.tokens(0, self.seen if",
    ),
    Bug(
        "an engine sleeps over a step under way",
        "rollout/engine/engine.py",
        "rollout/test_overlap.py",
        "        self.drain()\n        if unfinished",
        "        if unfinished",
    ),
    Bug(
        "an engine keeps requests whose steps failed twice",
        "rollout/engine/token_steps.py",
        "rollout/test_stepping.py",
        '        self._scheduler.abort(guilty, "error")\n',
        "",
    ),
    Bug(
        "an update that scores itself learns nothing, because its ratio is constant",
        "trainer_bridge/learning/policy.py",
        "trainer_bridge/learning/test_policy_loss.py",
        "old = logprobs.detach()",
        "old = logprobs",
    ),
    Bug(
        "deviations are the population's, not the sample's",
        "recipes/loops/numbers.py",
        "recipes/loops/test_advantages.py",
        "max(1, len(differences) - 1)",
        "len(differences)",
    ),
    Bug(
        "answers without a reward are learnt from",
        "recipes/loops/sampling.py",
        "recipes/loops/test_figures.py",
        "in enumerate(scores) if score.reward is not None]",
        "in enumerate(scores)]",
    ),
    Bug(
        "the sides of the clipped ratio are exchanged",
        "trainer_bridge/learning/policy_loss.py",
        "trainer_bridge/learning/test_policy_loss.py",
        "clipped & (advantages < 0), clipped & (advantages > 0)",
        "clipped & (advantages > 0), clipped & (advantages < 0)",
    ),
    Bug(
        "prompts of a step's later generations come again in the next step",
        "recipes/loops/loop.py",
        "recipes/loops/test_rounds.py",
        'row.get("groups_sampled", self.setup.recipe.prompts_per_step)',
        "self.setup.recipe.prompts_per_step",
    ),
    Bug(
        "a reference is refreshed a step late",
        "recipes/loops/loop.py",
        "recipes/test_run_losses.py",
        "            if step % every == 0:\n",
        "            if (step - 1) % every == 0:\n",
    ),
    Bug(
        "an evaluation runs a step late",
        "recipes/loops/loop.py",
        "recipes/test_run.py",
        "if every and (step - 1) % every == 0 and",
        "if every and step % every == 0 and",
    ),
    Bug(
        "`latest` names a checkpoint that is still being written",
        "recipes/logs/checkpoints.py",
        "recipes/test_run_folder.py",
        "            _write(self._folder(step), write)\n",
        '            replace_text(self._latest, f"step_{step}\\n")\n'
        "            _write(self._folder(step), write)\n",
    ),
    Bug(
        "a repeated step shuffles differently",
        "recipes/loops/updates.py",
        "recipes/loops/test_updates.py",
        "/mini_batches/{step}/{epoch}",
        "/mini_batches/{epoch}",
    ),
    Bug(
        "a resumed run has the evaluation after its checkpoint twice",
        "recipes/loops/loop.py",
        "recipes/test_continued_runs.py",
        'return bool(self.evaluations) and self.evaluations[-1]["step"] == self.updates',
        "return False",
    ),
    Bug(
        "a stage's peak omits torch's own peak",
        "recipes/logs/peaks.py",
        "recipes/test_monitor.py",
        "held + usage.torch_peak_bytes",
        "held + usage.torch_bytes",
    ),
    Bug(
        "an engine belongs to a trainer rank of another machine",
        "trainer_bridge/remote/placement.py",
        "trainer_bridge/test_coordinator.py",
        "node * self.devices + index % self.devices",
        "index % self.devices",
    ),
    Bug(
        "replicas on another machine get each message once more",
        "trainer_bridge/sync/relay.py",
        "trainer_bridge/transport/test_receivers.py",
        "alike += [tuple(group)] if mapped else",
        "alike +=",
    ),
    Bug(
        "a receiving rank writes into its own engine only",
        "trainer_bridge/sync/relay.py",
        "trainer_bridge/transport/test_receivers.py",
        "            for number in message.targets:\n                table.start",
        "            for number in message.targets[:1]:\n                table.start",
    ),
    Bug(
        "containers with networks of their own count as one machine",
        "memsaver/system/devices.py",
        "memsaver/system/test_devices.py",
        "{boot} {network}",
        "{boot}",
    ),
    Bug(
        "a second machine's ranks are placed on the first one",
        "trainer_bridge/remote/group.py",
        "trainer_bridge/test_ray.py",
        "selector = [others] * len(bundles) if nodes else None",
        "selector = None",
    ),
    Bug(
        "the trainer's GPU is planned with an engine that is elsewhere",
        "recipes/planner/memory_plan.py",
        "plans/test_plan.py",
        "beside = self._engine if recipe.cluster.colocate else NO_ENGINE",
        "beside = self._engine",
    ),
    Bug(
        "a parked request's keys and values are cached under new weights",
        "rollout/scheduling/tiers.py",
        "rollout/test_tiered_workload.py",
        "        self._held[handle] = replace(self._held[handle], version=swapped.version)\n",
        "",
    ),
    Bug(
        "an update that recomputes leaves parked requests their old keys and values",
        "rollout/engine/engine.py",
        "rollout/test_swap.py",
        "            self.scheduler.forget_parked()\n",
        "",
    ),
    Bug(
        "a preempted request queues behind those of its priority",
        "rollout/scheduling/scheduler.py",
        "rollout/test_stepping.py",
        "s.params.priority >= own)",
        "s.params.priority > own)",
    ),
    Bug(
        "penalties do not see the last token",
        "rollout/engine/token_steps.py",
        "rollout/test_adjusted_sampling.py",
        "launched.branches or self._rows.looking_back[launched.rows].any()",
        "launched.branches",
    ),
    Bug(
        "a stop string is told where it comes in two parts",
        "rollout/server/text.py",
        "rollout/server/test_answer_text.py",
        "max((_begun(text, stop) for stop in self._stop), default=0)",
        "0",
    ),
    Bug(
        "scores of a prompt are added again when it is computed again",
        "rollout/scheduling/samples.py",
        "rollout/test_adjusted_sampling.py",
        "self.rows += rows[len(self.rows) - first :]",
        "self.rows += rows",
    ),
    Bug(
        "a prompt that is scored begins with pages of the prefix cache",
        "rollout/scheduling/samples.py",
        "rollout/test_adjusted_sampling.py",
        "            return -1 - (self.request << 8) - self.scores.attempt % 256\n",
        "            pass\n",
    ),
    Bug(
        "a sync waits for the answers that are sampled ahead",
        "recipes/arguments.py",
        "recipes/test_ray_runs.py",
        '"in_flight": "keep" if recipe.loop.max_staleness else "refuse"',
        '"in_flight": "refuse"',
    ),
    Bug(
        "a running sequence of older weights is cached as one of the present ones",
        "rollout/scheduling/prefix.py",
        "rollout/test_updates_in_flight.py",
        "held.version != self.cache.version or self.cache",
        "self.cache",
    ),
    Bug(
        "states of older weights are cached as present ones",
        "kvcache/radix/mamba_cache.py",
        "kvcache/radix/test_radix_stateful.py",
        "if version < self.version:\n            return MambaInsert(len(key), False)",
        "if version < 0:\n            return MambaInsert(len(key), False)",
    ),
    Bug(
        "a sample of older weights is swapped out under the names of present pages",
        "rollout/scheduling/tiers.py",
        "rollout/test_updates_in_flight.py",
        "present = held.version == self.tiers.version",
        "present = True",
    ),
    Bug(
        "host pages of parked samples are lost with their names",
        "kvcache/tiers/tiered_prefix.py",
        "rollout/test_swap.py",
        "        self.host.allocator.share(pages)\n        self._private",
        "        self._private",
    ),
    Bug(
        "tokens of tools are learned",
        "rollout/chats/session_record.py",
        "recipes/loops/test_conversation.py",
        "[version] * len(ids), False)",
        "[version] * len(ids), True)",
    ),
    Bug(
        "a fork of a conversation weighs as much as a conversation",
        "trainer_bridge/learning/policy_loss.py",
        "trainer_bridge/learning/test_policy_loss.py",
        "factors = 1 / (batch.num_answers * ",
        "factors = 1 / (len(batch) * ",
    ),
    Bug(
        "an agent that thinks again continues the answer that it dropped",
        "rollout/chats/session_record.py",
        "rollout/test_session_record.py",
        'message.get("content") or "", calls]',
        "calls]",
    ),
    Bug(
        "an agent's answers are rendered again",
        "rollout/chats/session_record.py",
        "recipes/environments/test_agent_libraries.py",
        "range(len(messages) - 1, 0, -1)",
        "range(0)",
    ),
    Bug(
        "the end token of an answer is written twice",
        "rollout/chats/turn_bridge.py",
        "recipes/environments/test_chat_turns.py",
        "- 1] + 1 :]",
        "- 1] :]",
    ),
    Bug(
        "corrections compare the tokens of tools",
        "recipes/loops/corrections.py",
        "recipes/loops/test_corrections.py",
        "rollout, logprobs = samples.learned(samples.logprobs), samples.learned(logprobs)",
        "rollout = samples.logprobs",
    ),
]


def misfit(bug: Bug) -> str:
    """Return why a bug cannot be planted in the working tree, or not be caught, "" if it can."""
    path = ROOT / bug.file
    count = path.read_text().count(bug.right) if path.is_file() else 0
    if count != 1:
        return f"{bug.right!r} stands {count} times in {bug.file}; correct it in tests/planted.py"
    there = (ROOT / "tests" / bug.tests).is_file()
    return "" if there else f"there is no tests/{bug.tests}; name the tests in tests/planted.py"


def copied(folder: Path) -> Path:
    """Copy the files that git tracks or would add."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


def caught_by(bug: Bug, tree: Path) -> str:
    """Write the bug into a tree; return the first test that fails, "" if none does."""
    path = tree / bug.file
    path.write_text(path.read_text().replace(bug.right, bug.wrong))
    # --assert=plain: a message would read the content of tensors, which a bug may have unmapped.
    options = ["-vx", "--tb=no", "--assert=plain", "--disable-warnings", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", *options, f"tests/{bug.tests}"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    # A negative code: the failing test has ended the process.
    if done.returncode == pytest.ExitCode.TESTS_FAILED or done.returncode < 0:
        begun = re.findall(r"(?m)^tests/\S+::.+?(?= *FAILED| *ERROR| *$)", done.stdout)
        return str(begun[-1])
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:])
    return ""


def main(words: list[str]) -> None:
    escaped = 0
    for bug in BUGS:
        if words and not any(word in f"{bug.name} {bug.file}" for word in words):
            continue
        started, caught = time.monotonic(), ""
        if not (why := misfit(bug)):
            with tempfile.TemporaryDirectory() as folder:
                caught = caught_by(bug, copied(Path(folder)))
        escaped += not caught
        seconds, result = time.monotonic() - started, caught or f"ESCAPED {why}"
        print(f"{seconds:4.0f} s  {bug.name}: {result}", flush=True)
    sys.exit(1 if escaped else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
