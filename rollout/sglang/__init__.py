"""SGLang as the generating engine: its memory on our tags, its weights written in place."""

from rollout.sglang.rollout import SglangRollout

__all__ = ["SglangRollout"]
