"""The side of vLLM's workers in a weight update: a rollout over the worker's model.

A trainer rank calls its methods over a socket, because verl's `collective_rpc` discards answers.
"""

from typing import Any

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from rollout.hosted import HostedRollout, VllmWorker
from rollout.weights import WeightLayout
from trainer_bridge.adoption.verl.names import socket_name
from trainer_bridge.adoption.verl.update_side import UpdateSide


class WorkerSide(UpdateSide):
    """The worker's end of the channel; `held` is a rollout over its model, built on first use."""

    held: HostedRollout

    def __init__(self, worker: Any) -> None:
        self._worker = worker

    def weight_layout(self) -> WeightLayout:
        """Return where the weights lie; a ValueError names one that cannot be written in place."""
        if not hasattr(self, "held"):
            path = self._worker.model_runner.vllm_config.model_config.model
            self.held = HostedRollout(VllmWorker(self._worker), path)
        return self.held.weight_layout()


class InPlaceWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's workers, with weight updates in place."""

    _memsaver_side: WorkerSide | None = None

    def memsaver_update(self, secret: str) -> tuple[int | None, str | None]:
        """Serve one update by this worker's trainer rank, and return `WorkerSide.outcome`.

        A ValueError names what verl trains besides the model and would not be updated.
        """
        if self._use_mtp_drafter_weight_sync():
            raise ValueError(
                "in-place sync does not update MTP drafters; set "
                "actor_rollout_ref.model.mtp.enable_rollout=False, or use rollout.name=vllm"
            )
        if self._memsaver_side is None:
            self._memsaver_side = WorkerSide(self)
        self._memsaver_side.serve(socket_name(self._get_zmq_handle(), secret))
        return self._memsaver_side.outcome()
