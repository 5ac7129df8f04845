"""Private names of torch that trainer_bridge uses, and what depends on each."""

SEEN = ("2.11", "2.13", "2.15")
"""Versions of torch in which the names were looked up."""
PRIVATE = {
    "all functions of fsdp_internals.py": (
        "FSDPModule._get_fsdp_state", "FSDPState._fsdp_param_group", "FSDPParamGroup.fsdp_params",
    ),
    "padding of shards on their own tags": (
        "FSDPState._lazy_init", "FSDPParam._module_info", "FSDPParam.reset_sharded_param",
    ),
    "fp32 gradients of offloaded masters": ("FSDPParamGroup._orig_dtype",),
    "freeing what a pass gathered": (
        "FSDPParamGroup.wait_for_unshard", "FSDPParamGroup._to_sharded",
        "FSDPParam._unsharded_param", "FSDPParam.unsharded_accumulated_grad",
    ),
    "passes of a single rank": (
        "torch.distributed.fsdp._fully_shard._fsdp_param.FSDPParam",
        "FSDPParam.all_gather_inputs", "FSDPParam.all_gather_outputs", "FSDPParam.param_dtype",
        "FSDPParam.init_all_gather_outputs", "FSDPParam.init_unsharded_param",
        "FSDPParam.free_unsharded_param", "FSDPParam.sharded_param",
        "FSDPParam.to_sharded_dtensor", "FSDPParamGroup.post_backward",
    ),
    "sums of gradients in forward's dtype": ("FSDPParamGroup._fsdp_params_with_wider_grad_dtype",),
    "a pass after one that failed": (
        "FSDPState._state_ctx", "FSDPState._modules_to_run_forward",
        "FSDPState._root_post_backward_final_callback", "FSDPStateContext.iter_forward_root",
        "FSDPStateContext.manual_backward_finalization_active",
    ),
    "a forward that starts while shards are reloaded": (
        "FSDPParamGroup.modules", "FSDPParamGroup.device", "FSDPParamGroup.comm_ctx",
        "FSDPCommContext.all_gather_copy_in_stream", "FSDPParam._sharded_param_data",
    ),
    "reading shards without the cost of to_local": ("DTensor._local_tensor",),
    "shards on the host": ("DTensor._spec",),
    "boxes of shards": ("torch.distributed.tensor.placement_types._StridedShard",),
    # Other files of trainer_bridge read these.
    "attention over packed sequences": ("torch.ops.aten._flash_attention_forward",),
    "gradients of exact models": (
        "torch.ops.aten._flash_attention_backward", "torch._C._set_deterministic_algorithms",
    ),
    "the probe of what a module computes": (
        "torch.utils._python_dispatch._disable_current_modes",
    ),
    "the probe of exact models": ("torch.utils._python_dispatch.TorchDispatchMode",),
    "updates of streamed masters": ("torch._foreach_copy_", "torch._fused_adamw_"),
    "clipping of gradients": ("torch._foreach_mul_",),
    "scores without dropout": ("torch.nn.modules.dropout._DropoutNd",),
    "fp32 routers and the sync of replaced tensors": (
        "Module._parameters", "Module._modules", "Module._buffers",
    ),
}  # fmt: skip
"""What depends on private names of torch: owner and name, or a path."""
PROCESS_GROUPS = {
    "groups of processes with different default groups": (
        "torch.distributed.ProcessGroup._register_backend",
        "torch.distributed.ProcessGroup._set_default_backend",
        "torch.distributed.ProcessGroup._set_group_name",
        "torch.distributed.distributed_c10d._world.pg_group_ranks",
        "torch.distributed.distributed_c10d._world.pg_backend_config",
        "torch._C._distributed_c10d.Backend.Options._timeout",
        "torch.distributed.ProcessGroup._get_backend",
    ),
}
"""The same for rollout/process_group.py."""
ONLY = {
    "FSDPParamGroup._orig_dtype": ("2.11", "2.13"),  # then of the shards' grad_dtype
    "FSDPParam.unsharded_accumulated_grad": ("2.11", "2.13"),  # then the unsharded one's gradient
    "FSDPParamGroup._fsdp_params_with_wider_grad_dtype": ("2.15",),
    "FSDPStateContext.manual_backward_finalization_active": ("2.15",),
}
"""Names that exist in some of the versions `SEEN`, and in which."""
