"""The engine's end of a weight update, whose calls a trainer rank makes over a socket."""

import contextlib

from rollout import Engine, channel
from rollout.actor_base import ActorBase
from rollout.hosted import HostedRollout


class UpdateSide(ActorBase):
    """Process of an engine that serves weight updates; `held` has the weights."""

    held: Engine | HostedRollout

    def serve(self, name: str) -> None:
        """Connect to the trainer's socket, and answer calls until the trainer closes it."""
        with contextlib.suppress(ConnectionAbortedError):
            channel.serve(name, self)

    def outcome(self) -> tuple[int | None, str | None]:
        """Return the version of the weights; None and the reason while they are undefined."""
        if not hasattr(self, "held"):
            return None, "the trainer did not begin a weight update"
        version = self.held.served_version()
        return version, None if version is not None else self.held.unavailable_reason()
