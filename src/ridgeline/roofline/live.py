"""The roofline of a running engine: every executed step, what it reached of the ceilings, and how
far the prediction was off.

`Observer.observe` only notes a step, in a few microseconds. Pricing it takes some 0.1 ms, so that
is done in passing while all of this stays below 0.5 % of the steps' own time, and else when a
report is asked for.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from ridgeline.core.expert_load import ExpertLoad
from ridgeline.core.formats import NumberFormat
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.result import StepResult
from ridgeline.roofline.account import StepAccount, account
from ridgeline.roofline.calibration import contradiction
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.metrics import percentile
from ridgeline.roofline.model import PricedModel
from ridgeline.roofline.predict import Bound, StepPredictor, step_phase
from ridgeline.roofline.price import Phase
from ridgeline.roofline.work import Work

_SHARE = 0.005  # of the steps' time that pricing may take in passing
_KEPT_ERRORS = 512
_ENOUGH_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """What one phase did. A mixed step's seconds are split by what the roof gives each phase.

    ``mfu`` and ``mbu`` are shares of the ceilings (1.0 is all). ``predicted_s`` is what was
    predicted for ``seconds``, and ``bound`` what most of it goes to (memory, compute, overhead or
    communication). ``median_error`` and ``p90_error`` are of |predicted − measured| ÷ measured over
    the latest steps of this phase alone, and ``bias`` is measured ÷ predicted by the calibration
    alone. All are ``None`` without a calibration.
    """

    seconds: float
    steps: float
    tokens: int
    useful_flops: float
    moved_bytes: float
    mfu: float | None
    mbu: float | None
    bound: str | None
    predicted_s: float | None
    median_error: float | None
    p90_error: float | None = None
    bias: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineReport:
    """The run so far. ``warnings`` say what cannot be, more than the ceilings allow, and where
    steps contradict the calibration.

    ``levels`` are bytes per second by memory level, main memory's last. Of ``num_steps`` the last
    ``num_pending`` are not priced yet, and in nothing else here but ``experts``: how tokens were
    spread over experts, where there are some and the executor counts them.
    """

    prefill: PhaseReport
    decode: PhaseReport
    num_steps: int
    num_pending: int
    drafted: int
    accepted: int
    overhead_s_per_step: float
    covered: float | None
    warnings: tuple[str, ...]
    conditions: Mapping[str, str | float | int | bool | None]
    levels: Mapping[str, float]
    experts: ExpertLoad | None = None


@dataclass(slots=True)
class _Totals:
    seconds: float = 0.0
    steps: float = 0.0
    tokens: int = 0
    useful_flops: float = 0.0
    moved_bytes: float = 0.0
    ceiling_bytes: float = 0.0  # what the memory could have moved in those seconds
    predicted_s: float = 0.0
    parts: dict[Bound, float] = field(default_factory=lambda: dict.fromkeys(Bound, 0.0))
    errors: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_ERRORS))


class Observer:
    """Satisfies the loop's ``StepObserver``. Not thread-safe: the engine's thread alone calls it.

    Args:
        models: what is priced, by role.
        predictor: with a calibration, steps are predicted too, and its correction learns.
        experts: how tokens were spread over experts so far.
        size: steps noted and not yet priced, at the most; more are dropped, and counted.
    """

    def __init__(
        self,
        models: Mapping[ModelRole, PricedModel],
        predictor: StepPredictor | None = None,
        *,
        experts: Callable[[], ExpertLoad | None] = lambda: None,
        size: int = 512,
    ) -> None:
        self._models = models
        self._predictor = predictor
        self._experts = experts
        self._pending: deque[tuple[StepPlan, StepResult, float]] = deque()
        self._size = size
        self._totals = {phase: _Totals() for phase in Phase}
        self._measured_s = self._spent_s = 0.0
        self._inside = deque[bool](maxlen=_KEPT_ERRORS)
        self._drafted = self._accepted = 0
        self._adapters: dict[int, int] = {}  # of slots that have one, before the steps pending
        self.num_steps = self.num_dropped = 0

    def observe(self, plan: StepPlan, result: StepResult, measured_s: float) -> None:
        """Note a step; its arrays are not kept."""
        start = time.perf_counter()
        if len(self._pending) >= self._size:
            self._admit(self._pending.popleft()[0])
            self.num_dropped += 1
        self._pending.append((plan, _light(result), measured_s))
        self.num_steps += _repeats(plan)
        self._measured_s += measured_s
        if self._spent_s <= _SHARE * self._measured_s:
            self._account(*self._pending.popleft())
        self._spent_s += time.perf_counter() - start

    def report(self, *, catch_up_s: float = float("inf")) -> RooflineReport:
        """Everything up to now, but for steps that could not be priced in ``catch_up_s`` seconds.

        An engine at work would stand still meanwhile.
        """
        deadline = time.perf_counter() + catch_up_s
        while self._pending and time.perf_counter() < deadline:
            self._account(*self._pending.popleft())
        phases = {phase: self._phase(phase, totals) for phase, totals in self._totals.items()}
        ceilings = self._ceilings
        return RooflineReport(
            prefill=phases[Phase.PREFILL],
            decode=phases[Phase.DECODE],
            num_steps=self.num_steps,
            num_pending=len(self._pending),
            drafted=self._drafted,
            accepted=self._accepted,
            overhead_s_per_step=self._spent_s / max(1, self.num_steps),
            covered=sum(self._inside) / len(self._inside) if self._inside else None,
            warnings=(
                *self._contradictions(),
                *(
                    f"{phase}: {name} is {value:.0%} of the ceiling, which cannot be; the ceilings "
                    "are out of date (ridgeline roofline --calibrate)."
                    for phase, report in phases.items()
                    for name, value in (("MFU", report.mfu), ("MBU", report.mbu))
                    if value is not None and value > 1.0
                ),
            ),
            conditions={} if ceilings is None else ceilings.conditions,
            experts=self._experts(),
            levels=(
                {}
                if ceilings is None
                else {each.name: each.bytes_per_s for each in ceilings.levels}
            ),
        )

    def _contradictions(self) -> Iterator[str]:
        """Phases whose steps are far from what the calibration alone predicts."""
        if self._predictor is None:
            return
        created = self._predictor.calibration.created[:10]
        for phase, totals in self._totals.items():
            factor = self._predictor.correction.factor(phase)
            if len(totals.errors) >= _ENOUGH_STEPS and contradiction([factor]):
                yield (
                    f"{phase}: steps take {factor:.2g} times what the calibration of {created} "
                    "predicts; the predictions shown are corrected by that (ridgeline roofline "
                    "--calibrate measures anew)."
                )

    @property
    def models(self) -> Mapping[ModelRole, PricedModel]:
        """What is priced."""
        return self._models

    @property
    def predictor(self) -> StepPredictor | None:
        """What predicts steps, if the machine was calibrated."""
        return self._predictor

    @property
    def _ceilings(self) -> Ceilings | None:
        return None if self._predictor is None else self._predictor.calibration.ceilings

    @property
    def _product_format(self) -> NumberFormat:
        return self._models[ModelRole.TARGET].main_product_format

    def _admit(self, plan: StepPlan) -> None:
        """Remember which adapters a plan's sequences have: later plans do not say it again."""
        for each in plan.admissions:
            if each.adapter:
                self._adapters[each.slot] = each.adapter
            else:
                self._adapters.pop(each.slot, None)

    def _account(self, plan: StepPlan, result: StepResult, measured_s: float) -> None:
        self._admit(plan)
        phase, predictor = step_phase(plan), self._predictor
        predicted, parts = None, dict[Bound, float]()
        if predictor is not None:
            # Before this step's outcome is learnt.
            parts = predictor.plan_parts(plan, self._adapters)
            raw = sum(parts.values())
            predicted = predictor.interval(raw * predictor.correction.factor(phase), phase)
            predictor.correction.observe(phase, raw, measured_s)
            self._inside.append(predicted.low_s <= measured_s <= predicted.high_s)
        done = account(self._models, plan, result, self._adapters)
        self._drafted += done.drafted
        self._accepted += done.accepted
        shares = self._shares(done)
        for each, share in shares.items():
            totals = self._totals[each]
            seconds = share * measured_s
            work = done.cost.by_phase[each]
            totals.seconds += seconds
            totals.steps += share * _repeats(plan)
            totals.tokens += done.cost.tokens.get(each, 0)
            totals.useful_flops += done.useful_flops[each]
            totals.moved_bytes += work.num_bytes
            if self._ceilings is not None:
                rate = self._ceilings.bytes_per_s(done.bytes_at_once)  # read again in the next
                totals.ceiling_bytes += seconds * rate
            if predicted is not None:
                totals.predicted_s += share * predicted.seconds
                for bound, part in parts.items():
                    totals.parts[bound] += share * part
                if len(shares) == 1:
                    totals.errors.append(abs(predicted.seconds / measured_s - 1.0))

    def _shares(self, done: StepAccount) -> dict[Phase, float]:
        """Each phase's part of a step's seconds: that of its roof seconds."""
        by_phase = done.cost.by_phase
        if len(by_phase) == 1:
            return dict.fromkeys(by_phase, 1.0)
        roofs = {phase: self._roof_s(work) for phase, work in by_phase.items()}
        whole = sum(roofs.values())
        return {phase: roof / whole for phase, roof in roofs.items()} if whole else {}

    def _roof_s(self, work: Work) -> float:
        ceilings = self._ceilings
        if ceilings is None:
            return work.num_bytes
        peak = ceilings.peak_flops(self._product_format)
        return max(work.flops / peak, work.num_bytes / ceilings.memory.bytes_per_s)

    def _phase(self, phase: Phase, totals: _Totals) -> PhaseReport:
        mfu = mbu = bound = None
        errors, predictor = sorted(totals.errors), self._predictor
        if self._ceilings is not None and totals.seconds:
            peak = self._ceilings.peak_flops(self._product_format)
            mfu = totals.useful_flops / (totals.seconds * peak)
            mbu = totals.moved_bytes / totals.ceiling_bytes
            bound = max(totals.parts, key=lambda each: totals.parts[each]).value
        return PhaseReport(
            seconds=totals.seconds,
            steps=totals.steps,
            tokens=totals.tokens,
            useful_flops=totals.useful_flops,
            moved_bytes=totals.moved_bytes,
            mfu=mfu,
            mbu=mbu,
            bound=bound,
            predicted_s=totals.predicted_s if self._predictor is not None else None,
            median_error=median(errors) if errors else None,
            p90_error=percentile(errors, 0.9) if errors else None,
            bias=predictor.correction.factor(phase) if errors and predictor else None,
        )


def _light(result: StepResult) -> StepResult:
    """Without logits and hidden states."""
    if all(o.logits is None and o.pooled is None for outcomes in result.passes for o in outcomes):
        return result
    passes = tuple(
        tuple(outcome._replace(logits=None, pooled=None) for outcome in outcomes)
        for outcomes in result.passes
    )
    return replace(result, passes=passes)


def _repeats(plan: StepPlan) -> int:
    """How often a step is run: a replay is many decode steps in one plan."""
    return max((each.num_steps for each in plan.passes), default=1)
