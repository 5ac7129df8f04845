"""Policy losses of verl and TRL and verl's importance corrections, taken from their sources.

The packages are not imported, because they need others that are not installed. Only plain
functions of tensors are used.
"""

from __future__ import annotations
import __future__

import ast
import math
from collections import defaultdict
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.helpers.rollout.package_names import Wheel
from trainer_bridge import PolicyLoss

VERL, TRL = Wheel("verl"), Wheel("trl")
_MODES = {
    "token": "token-mean",
    "sequence": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}
_KINDS = {"ppo": "vanilla", "gspo": "gspo", "cispo": "cispo"}
_TYPES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}


def functions(
    wheel: Wheel, file: str, names: list[str] | None, known: dict[str, Any]
) -> dict[str, Any]:
    """Compile functions of a file, or methods of its classes, with only `known` names around.

    None takes the constants and all functions of the file.
    """
    assert wheel.folder is not None
    path = wheel.folder / file
    tree, kept = ast.parse(path.read_text(), str(path)), list[ast.stmt]()
    for node in tree.body if names is None else ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (names is None or node.name in names):
            node.decorator_list = []
            kept.append(node)
        elif names is None and isinstance(node, (ast.Assign, ast.AnnAssign)):
            kept.append(node)
    module = ast.Module(body=kept, type_ignores=[])
    flags = __future__.annotations.compiler_flag  # annotations name types of packages
    exec(compile(module, str(path), "exec", flags=flags), known)
    return known


def _sums_of_verl() -> SimpleNamespace:
    names = ["masked_sum", "masked_mean"]
    return SimpleNamespace(**functions(VERL, "utils/torch_functional.py", names, {"torch": torch}))


@cache
def verl_corrections() -> dict[str, Any]:
    """Return the names of verl's module of importance corrections."""
    known = {"torch": torch, "math": math, "verl_F": _sums_of_verl(), "__name__": "verl"}
    return functions(VERL, "trainer/ppo/rollout_corr_helper.py", None, known)


@cache
def _of_verl() -> dict[str, Any]:
    names = [f"compute_policy_loss_{kind}" for kind in _KINDS.values()]
    names += ["agg_loss", "kl_penalty", "kl_penalty_forward"]
    known = {"torch": torch, "verl_F": _sums_of_verl()}
    known |= {"ActorConfig": _Settings, "AlgoConfig": int}
    return functions(VERL, "trainer/ppo/core_algos.py", names, known)


@cache
def _of_trl() -> dict[str, Any]:
    known = {"torch": torch, "nanmin": torch.min, "nanmax": torch.max}
    return functions(TRL, "trainer/grpo_trainer.py", ["_compute_loss"], known)


class _Settings(SimpleNamespace):
    """The fields of verl's ActorConfig that its losses read."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


def verl_loss(
    loss: PolicyLoss,
    logp: Tensor,
    old: Tensor,
    ref: Tensor,
    advantages: Tensor,
    mask: Tensor,
    entropy: Tensor,
) -> Tensor:
    """Compute the loss of an update with verl's functions, from arrays [S, T].

    verl's PPO always has a dual clip, and its GSPO never.
    """
    theirs = _of_verl()
    whole = {"global_batch_size": len(mask), "loss_scale_factor": loss.max_tokens}
    settings = _Settings(
        clip_ratio=0.0,
        clip_ratio_low=loss.clip_low,
        clip_ratio_high=loss.clip_high,
        clip_ratio_c=loss.dual_clip or 1e30,
        global_batch_info=whole,
    )
    mode = _MODES[loss.aggregation]
    policy_loss = theirs[f"compute_policy_loss_{_KINDS[loss.kind]}"]
    total, _ = policy_loss(old, logp, advantages, mask, mode, settings)
    kl = theirs["kl_penalty"](logp, ref, loss.kl_estimator)
    for coefficient, terms in ((loss.kl_coef, kl), (-loss.entropy_coef, entropy)):
        total = total + coefficient * theirs["agg_loss"](terms, mask, mode, **whole)
    return total


class _OneProcess:
    """The parts of an accelerate.Accelerator that TRL's loss uses, for one process."""

    num_processes = 1

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, reduction: str) -> Tensor:
        return tensor


def trl_loss(
    loss: PolicyLoss,
    logp: Tensor,
    old: Tensor,
    ref: Tensor,
    advantages: Tensor,
    mask: Tensor,
    entropy: Tensor,
) -> Tensor:
    """Compute the loss of an update with TRL's GRPOTrainer, from arrays [S, T].

    Its advantages are one number per answer, its KL estimate is k3, its CISPO has no lower limit
    and only the aggregation "token", and its GSPO is the sequence form. A penalty or bonus of 0 is
    left out. The entropy is averaged over tokens with every aggregation.
    """
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="sequence" if loss.kind == "gspo" else "token",
        beta=loss.kl_coef,
        args=SimpleNamespace(
            use_bias_correction_kl=False, delta=loss.dual_clip, steps_per_generation=1
        ),
        loss_type="cispo" if loss.kind == "cispo" else _TYPES[loss.aggregation],
        epsilon_low=loss.clip_low,
        epsilon_high=loss.clip_high + (loss.kind == "cispo"),
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=_OneProcess(),
        max_completion_length=loss.max_tokens,
        _entropy_bonus_enabled=loss.entropy_coef != 0,
        use_adaptive_entropy=False,
        entropy_coef=loss.entropy_coef,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    trainer.accelerator.sync_gradients = True
    ids = torch.zeros(mask.shape, dtype=torch.int64)
    return _of_trl()["_compute_loss"](
        trainer,
        None,
        {
            "prompt_ids": ids,
            "prompt_mask": ids,
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": advantages[:, 0],
            "old_per_token_logps": old,
            "ref_per_token_logps": ref,
            "num_items_in_batch": mask.sum(),
        },
    )
