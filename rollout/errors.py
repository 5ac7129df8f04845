"""Errors that are not a user's mistake (those are ValueError)."""


class RankError(RuntimeError):
    """The other tensor-parallel ranks did not come to an exchange; the text names them, and the
    stage.
    """


class PeerLostError(RuntimeError):
    """A rank of the engine at the other end of a prefill/decode split is gone or silent; the text
    names it.
    """


class WeightUpdateError(RuntimeError):
    """A weight update failed, or was called out of order; `unavailable_reason()` says whether the
    engine can serve.
    """
