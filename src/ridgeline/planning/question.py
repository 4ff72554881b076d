"""What a plan answers: a model, a machine and a load."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ridgeline.core.config import EngineConfig
from ridgeline.planning.machine import Machine
from ridgeline.planning.workload import Arrival
from ridgeline.roofline import PricedModel
from ridgeline.roofline.slo import Slo

MAX_SEQS = 256  # at once
MIN_REQUESTS = 80


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model, a machine and a load.

    ``rate_rps`` ``None`` asks for saturation: as many requests at once as fit. ``trace`` takes the
    place of Poisson arrivals of ``prompt_tokens`` and ``output_tokens``, of which at least
    ``num_requests`` are simulated; ``None`` is `MIN_REQUESTS`, or fewer where these take very long.
    ``notes`` are sentences about the model that the plan repeats.
    """

    model: PricedModel
    machine: Machine
    prompt_tokens: int
    output_tokens: int
    rate_rps: float | None = None
    slo: Slo = field(default_factory=Slo)
    tensor: int | None = None
    trace: Sequence[Arrival] = ()
    num_requests: int | None = None
    seed: int = 0
    config: EngineConfig = field(default_factory=lambda: EngineConfig(max_num_seqs=MAX_SEQS))
    notes: Sequence[str] = ()

    @property
    def is_saturating(self) -> bool:
        return self.rate_rps is None and not self.trace

    @property
    def load(self) -> str:
        """Where requests come from: a trace, poisson arrivals, or all at once: saturation."""
        return "trace" if self.trace else "saturation" if self.rate_rps is None else "poisson"

    @property
    def typical(self) -> Arrival:
        """A request of the load; of a trace, one of mean lengths."""
        prompts = [each.prompt_tokens for each in self.trace] or [self.prompt_tokens]
        outputs = [each.output_tokens for each in self.trace] or [self.output_tokens]
        return Arrival(
            arrival_s=0.0,
            prompt_tokens=round(sum(prompts) / len(prompts)),
            output_tokens=round(sum(outputs) / len(outputs)),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(each.num_tokens for each in (*self.trace, self.typical))
