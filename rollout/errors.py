"""Errors of the rollout other than mistakes of the caller, which raise ValueError."""


class RankError(RuntimeError):
    """Tensor-parallel ranks are missing from an exchange; the message names them and the stage."""


class PeerLostError(RuntimeError):
    """A rank at the other end of a prefill/decode split is gone or silent; the message names it."""


class WeightUpdateError(RuntimeError):
    """A weight update failed, or its methods were called out of order.

    `unavailable_reason()` says whether the engine can still generate.
    """
