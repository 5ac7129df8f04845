"""Private names of torch: the installed release has all that are listed."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from tests.helpers.trainer_bridge.models import make_batch, write_model
from tests.helpers.trainer_bridge.private_torch import ONLY, PRIVATE, PROCESS_GROUPS, SEEN
from trainer_bridge import Trainer


def test_installed_torch_has_every_private_name_that_is_listed(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """Update once before, because FSDP makes some attributes in its first pass."""
    trainer = make_trainer(write_model(tmp_path))
    trainer.update_actor(make_batch(2))
    state = fully_shard.state(trainer.model)
    context, group = attrgetter("_state_ctx", "_fsdp_param_group")(state)
    owners = {
        "FSDPModule": trainer.model,
        "FSDPState": state,
        "FSDPStateContext": context,
        "FSDPParamGroup": group,
        "FSDPCommContext": group.comm_ctx,
        "FSDPParam": group.fsdp_params[0],
        "DTensor": next(trainer.model.parameters()),
        "Module": trainer.model,
    }

    def exists(name: str) -> bool:
        owner, _, attribute = name.rpartition(".")
        try:
            found = owners[owner] if owner in owners else pkgutil.resolve_name(owner)
            return hasattr(found, attribute)
        except (AttributeError, ImportError):
            return False

    last = [version for version in SEEN if torch.__version__ >= version][-1]
    missing = [
        f"{name} is missing in torch {torch.__version__}; it serves {purpose}"
        for purpose, names in (PRIVATE | PROCESS_GROUPS).items()
        for name in names
        if last in ONLY.get(name, SEEN) and not exists(name)
    ]
    assert not missing, "\n".join(missing)


def test_single_rank_uses_shards_in_place_and_frees_copies(
    make_trainer: Callable[..., Trainer], tmp_path: Path
) -> None:
    """Look at a weight in each pass: it is the shard, or a copy of now with memory in the pass."""
    path = write_model(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        trainer, seen = make_trainer(path, param_dtype=str(dtype)[6:]), list[torch.Tensor]()
        layer = trainer.model.get_decoder().layers[0].mlp.gate_proj
        shard = layer.weight.to_local()

        def look(module: Any, *_: Any, seen: list[Any] = seen, shard: Any = shard) -> None:
            assert torch.equal(module.weight, shard.to(module.weight.dtype))
            seen.append(module.weight)

        layer.register_forward_hook(look)
        for _ in range(2):
            trainer.update_actor(make_batch(6))
        assert {weight.dtype for weight in seen} == {dtype} and len(seen) > 2
        in_place = all(weight.data_ptr() == shard.data_ptr() for weight in seen)
        assert in_place == (dtype == torch.float32)
        left = {weight.untyped_storage().nbytes() for weight in seen}
        assert (left == {0}) != in_place, "copies have no memory after a pass"
        assert layer.weight.to_local().data_ptr() == shard.data_ptr()
