"""The names of the tags that an engine has memory on."""

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPH = "cuda_graph"
WEIGHTS_SHADOW = "weights_shadow"  # of an update only: has memory while one is under way
TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
