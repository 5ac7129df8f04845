"""In-place weight sync for verl with colocated vLLM (`rollout.name=memsaver_vllm`).

verl imports the modules in its own processes: `sharded_engine` and `in_place_rollout` in those of
the trainer, `replica` in its driver and in the actor of vLLM's server, `worker_extension` in vLLM's
workers. `memsaver.compat.verl_plugin` registers them.
"""
