"""Figures of a server, as Prometheus collects them."""

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from rollout.server.answers import Asked

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TIMES = "Time from a request to the end of its answer"


class ServerFigures:
    """Counts of requests and tokens since the start, and times of requests."""

    def __init__(self) -> None:
        own = self._registry = CollectorRegistry()
        self._requests = Counter("memsaver_requests", "Requests that have ended", registry=own)
        self._prompts = Counter("memsaver_prompt_tokens", "Tokens of their prompts", registry=own)
        self._answers = Counter("memsaver_answer_tokens", "Tokens of their answers", registry=own)
        self._times = Histogram("memsaver_request_seconds", _TIMES, buckets=_SECONDS, registry=own)

    def ended(self, asked: Asked) -> None:
        """Count a request that has ended."""
        usage = asked.usage()
        self._requests.inc()
        self._prompts.inc(usage["prompt_tokens"])
        self._answers.inc(usage["completion_tokens"])
        self._times.observe(time.monotonic() - asked.since)

    def text(self) -> tuple[bytes, str]:
        """Return the figures, and their content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST
