"""Requests between `submit` and their last output."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from rollout.requests import Output, SamplingParams
from rollout.serving.samples import Sample
from rollout.serving.scheduler import Intake, Scheduler


class OpenRequests:
    """The samples of all requests whose ends are not told yet, by the request's number."""

    def __init__(self, intake: Intake, scheduler: Scheduler) -> None:
        self._intake, self._scheduler = intake, scheduler
        self._samples: dict[int, list[Sample]] = {}
        self._left: dict[int, int] = {}  # number of samples whose ends are not told

    @property
    def ids(self) -> list[int]:
        """Return the numbers of the requests, in order."""
        return list(self._samples)

    def submit(self, prompt: Sequence[int], params: SamplingParams, stream: bool) -> list[Sample]:
        """Queue a checked request; return its samples."""
        samples = self._intake.submit(prompt, params)
        for sample in samples:
            sample.stream = stream and sample.beams is None
        self.follow(samples, params.n)
        return samples

    def follow(self, samples: list[Sample], told: int) -> None:
        """Tell the ends of samples of a request that are queued; `told` of them will be told."""
        self._samples[samples[0].request], self._left[samples[0].request] = samples, told

    def abort(self, ids: Iterable[int]) -> None:
        """End requests with their present answers, which `take` tells; unknown ids are ignored."""
        self._scheduler.abort(chain.from_iterable(self._samples.get(id, ()) for id in ids))

    def drop(self, ids: Iterable[int]) -> None:
        """End requests of which nothing will be told."""
        ids = list(ids)
        try:
            self.abort(ids)
        finally:
            for id in ids:
                self._forget(id)

    def take(self, why: Callable[[Sample], Exception]) -> list[Output]:
        """Return what is new since the last call.

        A request ends as a whole where one of its samples ends with "error". `why` returns the
        error of a sample that has none.
        """
        told, ended = self._scheduler.take_news()
        if broken := {sample.request for sample in ended if sample.finish_reason == "error"}:
            self.abort(broken)
            ended += self._scheduler.take_news()[1]
        running = (sample for sample in dict.fromkeys(told) if sample.finish_reason is None)
        outputs = [sample.news() for sample in running]
        for sample in ended:
            if sample.request in self._samples and sample.index < sample.params.n:
                failed = sample.finish_reason == "error"
                outputs.append(sample.news((sample.error or why(sample)) if failed else None))
                self._left[sample.request] -= 1
                if not self._left[sample.request]:
                    self._forget(sample.request)
        return outputs

    def _forget(self, id: int) -> None:
        self._samples.pop(id, None)
        self._left.pop(id, None)
