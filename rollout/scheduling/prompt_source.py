"""Where keys and values of prompts come from, and what else happens to a prompt."""

from collections.abc import Sequence

from rollout.scheduling.samples import Sample, Step


class PromptSource:
    """Source of the keys and values of prompts; this base class leaves them to the engine itself.

    An engine has one source, and calls its methods.

    Attributes:
        refusal: Why the engine cannot generate; None if the source is available.
        overlap: Whether the results of a step may be read after the next step is launched.
    """

    refusal: str | None = None
    overlap = True

    def accept(self, samples: Sequence[Sample]) -> None:
        """Mark the samples of a new request whose prompt comes from elsewhere as `remote`."""

    def receive(self) -> None:
        """Hand prompts that have come to the scheduler; called before each step."""

    def ask(self, step: Step) -> None:
        """Request the prompts that a step has admitted, `step.arriving`."""

    def computed(self, sample: Sample) -> None:
        """Note that the engine has computed the prompt of a sample, which has its pages."""

    def lost(self) -> None:
        """Note that the contents of all pages are lost."""
