"""What a check is, and how one runs: on its own, whatever the others did."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

CUDA_TORCH = "install a torch that is built for CUDA: https://pytorch.org/get-started"
NAME_ONE = "name a GPU that nvidia-smi lists and CUDA_VISIBLE_DEVICES lets through"

Status = Literal["ok", "warn", "fail", "skip"]


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table. ``remedy``: what to do, never empty where status is warn or fail."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.remedy or self.status in ("ok", "skip"), f"{self.name}: {self.status} without a remedy"


class Finding(NamedTuple):
    """A check without its name."""

    status: Status
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Target:
    """The GPU to try, or why there is none.

    ``remedy``: what to do where the user named a device that cannot be tried. ``cpu_only``: no GPU is to be tried.
    """

    gpu: torch.device | None
    why_not: str = ""
    remedy: str = ""
    cpu_only: bool = False


@dataclass(frozen=True)
class Probe:
    """One check to be made. ``remedy`` is for the error that nobody foresaw; ``needs_gpu`` skips it without one."""

    name: str
    look: Callable[[Target], Finding]
    remedy: str
    needs_gpu: bool = False


def choose_target(device: str | torch.device | None) -> Target:
    """Never raises: what is wrong with ``device`` is told by the check of the GPUs."""
    try:
        return _choose(device)
    except Exception as error:
        return Target(None, one_line(error), "look at nvidia-smi; torch cannot tell which GPUs there are")


def _choose(device: str | torch.device | None) -> Target:
    kind, _, number = str(device or "cuda").partition(":")
    if kind == "cpu":
        return Target(None, "asked for the CPU only", cpu_only=True)
    if kind != "cuda" or (number and not number.isdecimal()):
        return Target(None, f"{device} is no device that memsaver knows", "name cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        return Target(None, _why_no_gpu(), "" if device is None else CUDA_TORCH if not torch.version.cuda else NAME_ONE)
    index = int(number) if number else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        return Target(None, f"there is no {device}; {torch.cuda.device_count()} visible", NAME_ONE)
    return Target(torch.device("cuda", index))


def _why_no_gpu() -> str:
    if not torch.version.cuda:
        return f"torch {torch.__version__} is built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "torch sees no GPU" + ("" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})")


def run_probe(probe: Probe, target: Target) -> Check:
    if probe.needs_gpu and target.gpu is None:
        return Check(probe.name, "skip", f"no GPU: {target.why_not}")
    try:
        return Check(probe.name, *probe.look(target))
    except Exception as error:
        return Check(probe.name, "fail", f"{type(error).__name__}: {one_line(error)}", probe.remedy)


def one_line(error: BaseException) -> str:
    """The text of an exception on one line, or its type where it has no text."""
    return " ".join(str(error).split()) or type(error).__name__
