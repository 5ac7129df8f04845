"""The names of an engine's tags."""

WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPH = "cuda_graph"
ADAPTER_SLOTS = "adapter_slots"  # sleeps and wakes up with the weights, and keeps its content
WEIGHTS_SHADOW = "weights_shadow"  # has memory only while a shadow update is open
TAGS = (WEIGHTS, KV_CACHE, CUDA_GRAPH)
