"""Private names of torch: the installed release has all that are listed."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

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
