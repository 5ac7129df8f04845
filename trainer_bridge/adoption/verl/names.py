"""Names by which the processes of verl find each other's parts of a sync."""

ROLLOUT = "memsaver_vllm"  # verl's vLLM
ENGINE_ROLLOUT = "memsaver"  # the native engine
UPDATE = "memsaver_update"  # method of vLLM's workers


def socket_name(pair: str, secret: str) -> str:
    """Return the name of the socket of a trainer rank and a process that connects to it.

    Args:
        pair: Unique among the replicas and ranks of a job on one machine.
        secret: Secret of the job, as two clusters may give their jobs the same id.
    """
    return f"verl-{pair}-{secret}"


def engine_pair(job: str, replica: int, rank: int) -> str:
    """Return the name of the pair of a trainer rank and a rank of the native engine."""
    return f"{ENGINE_ROLLOUT}-{job}-{replica}-{rank}"
