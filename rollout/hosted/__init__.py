"""Other projects' engines as rollouts: their memory on our tags, their weights written in place.

vLLM and SGLang are imported when an engine is made.
"""

from rollout.hosted.base import HostedEngine, HostedRollout
from rollout.hosted.sglang import SglangRollout
from rollout.hosted.vllm import COLDEST, VllmRollout
from rollout.hosted.vllm_engine import VllmEngine

__all__ = ["COLDEST", "HostedEngine", "HostedRollout", "SglangRollout", "VllmEngine", "VllmRollout"]
