"""vLLM as the generating engine: its memory on our tags, its weights written in place."""

from rollout.vllm.engine import VllmEngine
from rollout.vllm.rollout import COLDEST, VllmRollout

__all__ = ["COLDEST", "VllmEngine", "VllmRollout"]
