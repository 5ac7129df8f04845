"""The handles on actors have what both protocols ask for, with the real objects' contracts."""

from __future__ import annotations

import inspect

import pytest

from rollout import Engine, Rollout
from trainer_bridge import Trainer
from trainer_bridge.cycle import TrainerProtocol
from trainer_bridge.remote.actor import RemoteRollout, RemoteTrainer

SIDES = [(Rollout, RemoteRollout, Engine), (TrainerProtocol, RemoteTrainer, Trainer)]
ASKED = [
    (name, handle, real)
    for protocol, handle, real in SIDES
    for name in dir(protocol)
    if not name.startswith("_")
]


@pytest.mark.parametrize(("name", "handle", "real"), ASKED)
def test_a_handle_has_the_methods_of_what_it_stands_for(
    name: str, handle: type, real: type
) -> None:
    mine, theirs = getattr(handle, name), getattr(real, name)
    assert mine.__doc__ or not theirs.__doc__
    if isinstance(theirs, property):
        assert isinstance(mine, property)
    else:
        ours, original = inspect.signature(mine), inspect.signature(theirs)
        assert ours.parameters.keys() == original.parameters.keys()
