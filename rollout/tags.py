"""The tags of an engine's memory."""

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPH = "cuda_graph"
TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
