"""vLLM as the generating engine: its memory on our tags, its weights written in place."""

from rollout.vllm.rollout import VllmRollout

__all__ = ["VllmRollout"]
