"""What timing the tiles of products gives, beside the guesses."""

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.gpu.progress import Bench
from benchmarks.gpu.steps import StepBench, random_model
from ridgeline.executors.cuda.tuning_cache import Tuned

_CONTEXT = 32  # tokens; products are the same for all


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedProduct:
    """A product of a model's decode steps, by the name of its `LinearKey`."""

    steps: str
    product: str
    found: Tuned

    @property
    def gain(self) -> float:
        """How many times as fast as with the guess."""
        return self.found.guess_seconds / self.found.seconds

    def to_json(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "product": self.product,
            "gain": self.gain,
            **asdict(self.found),
        }


def bench_tuning(bench: Bench, shape: str, form: str) -> None:
    """Have the products of a model tuned, for the parts behind this one and for later starts."""
    steps = f"{shape} {form}"
    if bench.tuning is None or not bench.progress.allows(f"tuning of {steps}", bench.tuning.most_s):
        return
    settings = bench.settings
    own = StepBench(
        bench.device,
        bench.kernels(),
        shape,
        random_model(bench.device, settings.shapes[shape]),
        form,
        max_batch=max(batch for batch, _ in settings.decode),
        settings=settings,
        tuning=bench.tuning,
    )
    try:
        own.open(own.blocks_of(1, _CONTEXT))
        for key, found in own.executor.tuned_products().items():
            product = TunedProduct(steps=steps, product=key.name, found=found)
            bench.progress.result("tuned", product)
    finally:
        own.close()
