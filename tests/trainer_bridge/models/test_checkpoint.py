"""Checkpoints, with critic and adapters: bit-identical, loaded in place, replaced as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import pickle
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from memsaver import StateError
from memsaver.errors import HostMemoryError
from tests.helpers.ranks import results, start_ranks
from tests.helpers.trainer_bridge.models import make_batch, value_batch, write_model
from tests.helpers.trainer_bridge.states import assert_same_bits, bits
from trainer_bridge import CriticConfig, LoraConfig, Schedule, Trainer
from trainer_bridge.errors import OtherRankFailed
from trainer_bridge.models.files import checkpoint, initial

Make = Callable[..., Trainer]
CRITIC = {"critic": CriticConfig(learning_rate=5e-3)}
COURSE = Schedule(kind="cosine", warmup_updates=2, updates=5, final_rate=0.1)
LORA = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "o_proj", "down_proj"))


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Copy everything that a trainer trains."""
    critic = {} if trainer.critic is None else bits(trainer.critic)
    return bits(trainer) | {f"critic {name}": value for name, value in critic.items()}


def learn(trainer: Trainer, steps: range) -> list[dict[str, float]]:
    """Update the policy once and the critic twice per step."""
    metrics = []
    for seed in steps:
        batch = value_batch(4, seed)
        metrics += [trainer.update_actor(batch)]
        metrics += [trainer.update_critic(batch) for _ in range(2) if trainer.critic is not None]
    return metrics


@pytest.mark.parametrize("changes", [{"schedule": COURSE}, CRITIC, {"lora": LORA}])
def test_resumed_run_continues_bit_identical(
    changes: dict[str, Any], model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    first, second = make_trainer(model_path, **changes), make_trainer(model_path, **changes)
    learn(first, range(2))
    first.save_checkpoint(str(tmp_path / "step"), {"prompts": [1, 2]})
    addresses = {name: shard.data_ptr() for name, shard in second.shards().items()}
    assert second.load_checkpoint(str(tmp_path / "step")) == {"prompts": [1, 2]}
    assert second.step == 2 and (second.critic is None or second.critic.step == 4)
    assert_same_bits(state(second), state(first))
    assert addresses == {name: shard.data_ptr() for name, shard in second.shards().items()}
    assert learn(first, range(2, 4)) == learn(second, range(2, 4))
    assert_same_bits(state(second), state(first))
    if "lora" in changes:
        stored = sum(file.stat().st_size for file in (tmp_path / "step").glob("*.safetensors"))
        trained = sum(value.nbytes for value in bits(first).values())
        assert (
            trained < stored < trained + sum(shard.nbytes for shard in first.shards().values())
        ), "with the base"


def test_checkpoint_holds_a_refreshed_reference_and_no_other(
    model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    """Resume before and after a refresh, in a new trainer and in one that has gone further."""
    options = {"reference": True, "param_dtype": "bfloat16"}
    plain, batch = make_trainer(model_path, param_dtype="bfloat16"), make_batch(4)
    first, second = make_trainer(model_path, **options), make_trainer(model_path, **options)

    def size(name: str) -> int:
        return sum(file.stat().st_size for file in (tmp_path / name).glob("*.safetensors"))

    def frozen(trainer: Trainer) -> dict[str, Tensor]:
        assert trainer.reference is not None
        return {
            name: param.detach().to_local().clone()  # type: ignore[operator]
            for name, param in trainer.reference.module.named_parameters()
        }

    for trainer, name in ((plain, "plain"), (first, "before")):
        learn(trainer, range(1))
        trainer.save_checkpoint(str(tmp_path / name))
    assert size("before") == size("plain")
    first.reload("reference")
    weights = frozen(first)
    first.refresh_reference()
    refreshed = frozen(first)
    learn(first, range(1, 2))
    first.save_checkpoint(str(tmp_path / "after"))
    more = size("after") - size("before") - sum(value.nbytes for value in refreshed.values())
    assert 0 <= more < 8192, "more than the names of the reference's tensors"

    with pytest.raises(StateError, match=r"load_checkpoint\(\) needs tag 'reference', which is"):
        second.load_checkpoint(str(tmp_path / "after"))
    second.load_checkpoint(str(tmp_path / "before"))  # does not need the tag
    second.reload("reference")
    second.load_checkpoint(str(tmp_path / "after"))
    assert_same_bits(frozen(second), refreshed)
    assert_same_bits(state(second), state(first))
    for trainer in (first, second):
        trainer.offload("reference")
    with pytest.raises(StateError, match=r"save_checkpoint\(\) needs tag 'reference', which is"):
        second.save_checkpoint(str(tmp_path / "after"))
    second.reload("reference")
    assert_same_bits(frozen(second), refreshed)
    second.load_checkpoint(str(tmp_path / "before"))
    assert_same_bits(frozen(second), weights)
    assert second.compute_ref_log_prob(batch) != second.compute_log_prob(batch)
    second.save_checkpoint(str(tmp_path / "again"))
    assert size("again") == size("before")
    with pytest.raises(ValueError, match=r"optimizer, nothing was loaded: unknown reference\."):
        plain.load_checkpoint(str(tmp_path / "after"))


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize("changes", [CRITIC, {"lora": LORA}, {"param_dtype": "bfloat16"}])
def test_checkpoint_written_beside_updates_has_the_bytes_of_one_that_was_waited_for(
    changes: dict[str, Any], device: str, model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    """Save three times from one staging memory, each time while the weights change."""
    trainer = make_trainer(model_path, device=device, **changes)
    other = make_trainer(model_path, device=device, **changes)
    for number in range(3):
        whole, behind = tmp_path / f"whole {number}", tmp_path / f"behind {number}"
        trainer.save_checkpoint(str(whole), {"number": number})
        trainer.save_checkpoint(str(behind), {"number": number}, wait=False)
        assert not behind.exists()
        learn(trainer, range(number, number + 1))
        if number < 2:  # else the load finishes it
            assert trainer.finish_checkpoint() and trainer.finish_checkpoint()
        else:
            trainer.load_checkpoint(str(whole))
        assert files_of(behind) == files_of(whole)
        assert other.load_checkpoint(str(behind)) == {"number": number}
    assert_same_bits(state(other), state(trainer))
    trainer.save_checkpoint(str(tmp_path / "lost"), wait=False)
    with pytest.warns(UserWarning, match="has dropped a checkpoint; call finish_checkpoint"):
        trainer.close()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("lost")]


def test_slow_disk_delays_no_call_but_the_one_that_waits_for_it(
    model_path: str, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, disk, sync = make_trainer(model_path), threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (disk.wait(60), sync(file)))
    trainer.save_checkpoint(str(tmp_path / "step"), wait=False)
    learn(trainer, range(1))
    assert not trainer.finish_checkpoint(wait=False) and not (tmp_path / "step").exists()
    disk.set()
    assert trainer.finish_checkpoint() and (tmp_path / "step").exists()


def test_host_without_room_for_the_copy_writes_at_once(
    model_path: str, make_trainer: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise HostMemoryError("no room", 1, 1, {})

    trainer = make_trainer(model_path)
    monkeypatch.setattr("trainer_bridge.models.runtime.host_memory", full)
    trainer.save_checkpoint(str(tmp_path / "step"), {"n": 1}, wait=False)
    expected = state(trainer)
    learn(trainer, range(1))
    assert trainer.finish_checkpoint(wait=False)
    assert trainer.load_checkpoint(str(tmp_path / "step")) == {"n": 1}
    assert_same_bits(state(trainer), expected)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "no space left on device")]
)
def test_error_while_writing_is_raised_unwrapped(
    error: BaseException,
    wait: bool,
    model_path: str,
    make_trainer: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Expect the original error and the old checkpoint, at the latest when it is finished."""
    trainer = make_trainer(model_path)
    trainer.save_checkpoint(str(tmp_path / "step"), {"n": 1})

    def fails(*arguments: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(type(error)):
            trainer.save_checkpoint(str(tmp_path / "step"), wait=wait)
            trainer.finish_checkpoint()
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert trainer.load_checkpoint(str(tmp_path / "step")) == {"n": 1}
    trainer.save_checkpoint(str(tmp_path / "step"))
    assert trainer.load_checkpoint(str(tmp_path / "step")) == {}


LOUDER = dataclasses.replace(LORA, alpha=9.0)
SMALLER = {"num_hidden_layers": 1, "intermediate_size": 40}
MISFIT = (
    r"another model or optimizer, nothing was loaded.*"
    r"layers\.0\.mlp\.down_proj\.weight has shape \(32, 48\), the model \(32, 40\)"
)


BEGAN = (
    r"other weights \(digest \w{16}; \w{16} now\); restore the original weights; "
    r"nothing was loaded$"
)


@pytest.mark.parametrize(
    ("saved", "model", "changes", "message"),
    [
        ({}, SMALLER, {}, MISFIT),
        (
            CRITIC,
            {},
            {},
            r"belongs to another model or optimizer, nothing was loaded: unknown critic\.",
        ),
        ({"lora": LORA}, {"seed": 1}, {"lora": LORA}, BEGAN),
        (CRITIC, {"seed": 1}, CRITIC, BEGAN),
        (
            {"lora": LORA},
            {},
            {"lora": LOUDER},
            r"trains adapters .*'alpha': 8\.0.*, this trainer .*'alpha': 9\.0.*; nothing was",
        ),
        (
            {"lora": LORA},
            {},
            {},
            r"trains adapters .*, this trainer None \(None: all parameters\); nothing was loaded",
        ),
    ],
)
def test_checkpoint_of_another_model_is_refused_and_changes_nothing(
    saved: dict[str, Any],
    model: dict[str, Any],
    changes: dict[str, Any],
    message: str,
    model_path: str,
    make_trainer: Make,
    tmp_path: Path,
) -> None:
    make_trainer(model_path, **saved).save_checkpoint(str(tmp_path / "step"))
    other = make_trainer(write_model(tmp_path / "other", **model), **changes)
    before = bits(other)
    with pytest.raises(ValueError, match=message):
        other.load_checkpoint(str(tmp_path / "step"))
    assert_same_bits(bits(other), before)


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("values", [True, False])
def test_load_never_unpickles_files_of_the_directory(
    values: bool, model_path: str, make_trainer: Make, tmp_path: Path
) -> None:
    trainer, place, marker = make_trainer(model_path), tmp_path / "step", tmp_path / "ran"
    trainer.save_checkpoint(str(place))
    for name in (".metadata", "__0_0.distcp", *([] if values else ["values.json"])):
        (place / name).write_bytes(pickle.dumps(Bomb(marker)))
    with contextlib.nullcontext() if values else pytest.raises(ValueError):
        trainer.load_checkpoint(str(place))
    assert not marker.exists()


def test_replaced_checkpoint_is_old_or_new_one_if_writer_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, calls = tmp_path / "last", ("rename", "fsync", "rmdir", "unlink")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(checkpoint, "all_gather_plain", lambda value: [value])

    def write(number: int) -> None:
        with checkpoint.whole_directory(str(place), ["values.json"], "a checkpoint") as partial:
            (Path(partial) / "values.json").write_text(json.dumps({"n": number}))

    def read() -> int:
        return int(checkpoint.load(str(place), {})["n"])

    write(0)
    for call, at in itertools.product(calls, (1, 2)):
        steps, right = itertools.count(1), getattr(os, call)

        def dying(*args: Any, **names: Any) -> Any:
            if next(steps) == at:  # noqa: B023
                raise KeyboardInterrupt
            return right(*args, **names)  # noqa: B023

        before = read()
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(os, call, dying)
            write(before + 1)
        assert read() in (before, before + 1)
    write(1000)
    assert read() == 1000
    assert [path.name for path in tmp_path.iterdir()] == ["last"]


def fail_in_turn(rank: int, place: str) -> list[str]:
    """Fail on rank 0, then on rank 1, at once and behind; return the errors of this rank."""
    memory = partial(torch.empty, dtype=torch.uint8)
    device: Any = SimpleNamespace(host_memory=memory, finish=bool)
    sync, errors = os.fsync, []
    tensors = {"w": DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Shard(0)])}

    def fails(file: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    for staging, failing in itertools.product((None, checkpoint.Staging(device)), (0, 1)):
        os.fsync = fails if rank == failing else sync
        try:
            checkpoint.BegunCheckpoint(place, tensors, {}, staging).finish()
        except (OSError, OtherRankFailed) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors


def test_save_that_fails_on_one_rank_fails_on_all_and_leaves_no_files(tmp_path: Path) -> None:
    """Expect no wait for the group's timeout, which is longer than the test's."""
    place = tmp_path / "folder" / "step"
    place.parent.mkdir()
    texts = results(start_ranks(fail_in_turn, 2, tmp_path / "meet", str(place), seconds=600.0))
    own = "OSError: [Errno 28] no space left on device"
    other = [f"OtherRankFailed: rank {rank} failed: {own}" for rank in range(2)]
    assert texts == [2 * [own, other[1]], 2 * [other[0], own]]
    assert not list(place.parent.iterdir())


@pytest.mark.parametrize("shape", [(7,), (6, 5), (4, 6, 5)])
def test_digest_does_not_depend_on_the_sharded_dimension(shape: tuple[int, ...]) -> None:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1))

    def of_part(part: Tensor, start: list[int]) -> int:
        return initial.part_digest(part, start, shape, 1000, part.device) % 2**64

    expected = of_part(whole, [0] * len(shape))
    for dim in range(len(shape)):
        starts = [[at if axis == dim else 0 for axis in range(len(shape))] for at in (0, 2)]
        parts = whole.split([2, shape[dim] - 2], dim)
        assert sum(map(of_part, map(Tensor.contiguous, parts), starts)) % 2**64 == expected
    assert of_part(whole.flip(0), [0] * len(shape)) != expected
