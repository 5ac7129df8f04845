"""Lists the Triton kernels of a trainer's first step, to be compiled while its weights are read."""

import json
from functools import partial
from pathlib import Path

import torch

from memsaver.common.warm_up import Job
from trainer_bridge.config import TrainerConfig


def to_compile(config: TrainerConfig, device: torch.device, served: bool) -> list[Job]:
    """Returns what compiles them, in the order in which they are needed, without memory or a
    launch; none where there is no GPU. served: a rollout serves the parameters where they lie, so
    no sync copies them.
    """
    if device.type != "cuda":
        return []
    copied = [] if served else [config.torch_model_dtype]
    return [
        *(partial(_sync, config, source) for source in (*copied, None)),
        *(partial(_scores, config, gradient) for gradient in (False, True)),
    ]


def _sync(config: TrainerConfig, source: torch.dtype | None) -> None:
    """Whole vectors of shards, cast to what the model computes in, which rollouts serve; without a
    source their digest, which an engine's process finds in Triton's cache on the disk.
    """
    from memsaver.common.cuts import Kind
    from memsaver.common.segments_triton import compile_rows

    compile_rows(Kind(source, config.torch_param_dtype, aligned=True))


def _scores(config: TrainerConfig, gradient: bool) -> None:
    from trainer_bridge.ops.token_scores_triton import compile_scores

    fields = json.loads((Path(config.model_path) / "config.json").read_text())
    compile_scores(config.torch_param_dtype, fields["vocab_size"], gradient)
