"""The scheduler against a virtual clock: linear seconds of steps, tokens are all 7."""

from collections import deque
from dataclasses import dataclass, field, replace

from ridgeline.core.errors import OverloadedError
from ridgeline.core.request import Request
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.scheduler import LinearPredictor, Scheduler, SchedulerConfig

# About a 1B model on a small machine: 10 ms a pass, 0.5 ms a token.
PREDICTOR = LinearPredictor(pass_s=0.010, token_s=0.0005, pair_s=1e-8)
TOKEN, NOTHING = SegmentResult(token_ids=(7,)), SegmentResult()


@dataclass
class Record:
    request: Request
    times: list[float] = field(default_factory=list)  # of its tokens
    finished_s: float | None = None

    @property
    def met_its_deadline(self) -> bool:
        return self.finished_s is not None and self.finished_s <= self.request.deadline_s


class Simulation:
    def __init__(self, *, predictor=PREDICTOR, believed=None, **settings):
        self.now_s = 0.0
        self.predictor = predictor
        defaults = {
            "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 20_000,
            "num_blocks": (100_000,), "windows": (None,), "block_tokens": 16,
        }  # fmt: skip
        self.scheduler = Scheduler(
            SchedulerConfig(**{**defaults, **settings}),
            predictor=believed or predictor,
            clock=lambda: self.now_s,
        )
        self.records: dict[int, Record] = {}
        self.refused: list[tuple[Request, float]] = []
        self.steps: list[float] = []

    def run(self, arrivals, *, until_s=float("inf")):
        """Let requests arrive at their times, until all are done."""
        pending = deque(sorted(arrivals, key=lambda each: each.arrival_s))
        while self.now_s < until_s and (pending or self.scheduler.has_work):
            while pending and pending[0].arrival_s <= self.now_s:
                self._add(pending.popleft())
            plan = self.scheduler.schedule()
            if plan is None:
                times = [pending[0].arrival_s] if pending else []
                if self.scheduler.has_work:
                    times.append(self.now_s + self.scheduler.wait_s)
                self.now_s = max(self.now_s, min(times))
                continue
            self.steps.append(self.predictor.seconds(plan))
            self.now_s += self.steps[-1]
            outcomes = tuple(
                TOKEN if segment.outputs.sample else NOTHING for segment in plan.passes[0].segments
            )
            result = StepResult(step_id=plan.step_id, passes=(outcomes,))
            for update in self.scheduler.update(plan, result):
                record = self.records[update.sequence.request.request_id]
                record.times += [self.now_s] * len(update.new_token_ids)
                if update.sequence.is_finished and update.new_token_ids:
                    record.finished_s = self.now_s
        return list(self.records.values())

    def _add(self, request):
        try:
            self.scheduler.add(request)
        except OverloadedError as error:
            self.refused.append((request, error.retry_after_s))
        else:
            self.records[request.request_id] = Record(request)


def make_request(number, arrival_s, *, prompt=64, output=16, **settings) -> Request:
    request = Request(
        request_id=number,
        prompt_token_ids=(number % 1000,) * prompt,
        params=SamplingParams(max_tokens=output, temperature=0.0),
        seed=0,
        arrival_s=arrival_s,
    )
    return replace(request, **settings)
