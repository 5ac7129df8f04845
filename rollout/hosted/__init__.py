"""vLLM and SGLang as rollouts, with memory on memsaver's tags and weights updated in place.

Both packages are imported only when an engine is built.
"""

from rollout.hosted.base import HostedEngine, HostedRollout
from rollout.hosted.rank_bytes import OUTSIDE, HostedBytes
from rollout.hosted.sglang import SglangRollout
from rollout.hosted.vllm import COLDEST, VllmRollout
from rollout.hosted.vllm_engine import VllmEngine, VllmWorker

__all__ = [
    "COLDEST",
    "OUTSIDE",
    "HostedBytes",
    "HostedEngine",
    "HostedRollout",
    "SglangRollout",
    "VllmEngine",
    "VllmRollout",
    "VllmWorker",
]
