"""vLLM and SGLang as rollouts, with memory on memsaver's tags and weights updated in place.

Both packages are imported only when an engine is built.
"""

from rollout.hosted.base import HostedEngine, HostedRollout
from rollout.hosted.sglang import SglangRollout
from rollout.hosted.vllm import COLDEST, VllmRollout
from rollout.hosted.vllm_engine import VllmEngine, VllmWorker

__all__ = [
    "COLDEST",
    "HostedEngine",
    "HostedRollout",
    "SglangRollout",
    "VllmEngine",
    "VllmRollout",
    "VllmWorker",
]
