"""`Optimizer`: predict everything, race what may win, prove the winner against the default."""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise
from math import log
from statistics import mean, median

from ridgeline.core.errors import EngineError, MachineError, RidgelineError, SettingsError
from ridgeline.optimize.belief import MARGIN, Belief
from ridgeline.optimize.judging import Judge
from ridgeline.optimize.kept import Journal, KeptVisit
from ridgeline.optimize.load import at_once, first_seconds, pattern_arrivals
from ridgeline.optimize.measuring import Measurer
from ridgeline.optimize.objective import Objective, Outcome, value
from ridgeline.optimize.proof import (
    FEWEST_TURNS,
    MOST_TURNS,
    Ratio,
    paired_ratio,
    ratios_over,
)
from ridgeline.optimize.screening import CandidatePredictor, Screened, screen
from ridgeline.optimize.space import DEFAULT, FORMATS, Candidate
from ridgeline.optimize.task import Change, Found, Task
from ridgeline.planning import Arrival
from ridgeline.roofline.calibration import corrected

_SCREENING, _RACE = 0.2, 0.6  # of the budget, by when they end
_SLICE, _SHORTEST_S, _LONGEST_S = 0.012, 1.2, 30.0  # of the budget, that one visit's load lasts
_FEWEST, _MOST = 16, 2000  # requests of a visit
_PILOT = 48  # requests, at once
_LEADERS = 24  # that may be measured
_SPECULATED = 5  # leaders, the default among them, that are tried with speculation as well
_COMPARED = ("race", "proof", "steps")  # the stages whose turns hold the default, too
_RISK = 0.05  # of a choice that misses more than 5 %, at which the race ends
_ENOUGH_PAIRS = 2
# What nothing predicts: speculation pays where little else runs, and there is a load here.
_UNPREDICTED, _UNPREDICTED_MEAN = 0.25, -0.1
_WIDEST = 0.4  # of the effect of a format: an error that all formats share cancels
_LEAST_GAIN = 1.01  # below it a change is not worth a line in a file
_MEMORY_COST = 0.9  # of the goodput that less memory may seem to take, at the lower end

Progress = Callable[[float, float, str], object]


class Optimizer:
    """One run; `find` may be called once.

    Args:
        task: what is asked.
        predictor: predicts.
        measurer: measures.
        journal: keeps what was measured.
        judge: measures quality; ``None`` where that is not asked for.
        clock: seconds, of which the budget is.
        progress: called with (seconds spent, budget, what is done now).
    """

    def __init__(
        self,
        task: Task,
        predictor: CandidatePredictor,
        measurer: Measurer,
        journal: Journal,
        *,
        judge: Judge | None = None,
        clock: Callable[[], float] = time.monotonic,
        progress: Progress = lambda _spent, _budget, _label: None,
    ) -> None:
        self._task, self._predictor, self._measurer = task, predictor, measurer
        self._journal, self._judge, self._progress = journal, judge, progress
        self._kept = journal.kept
        self._clock = clock
        self._began_s = clock() - self._kept.spent_s
        self._qualities = dict(self._kept.qualities)
        self._rejected: dict[Candidate, str] = {}
        self._arrivals: tuple[Arrival, ...] = ()
        self._predicted: dict[Candidate, float] = {}
        self._seeds = count()  # no visit has texts of another: its engine would have their prefixes

    def find(self) -> Found:
        """Predict, measure, prove and explain. The journal is the caller's to forget, once what was
        found is safe.

        Raises:
            RidgelineError: the default does not run under this load.
        """
        self._arrivals = self._pilot()
        screened = self._screen()
        belief = self._race(screened)
        ratios, same = self._prove(belief, screened)
        belief = self._belief(belief.candidates)
        winner = self._winner(belief, ratios, same)
        choice = belief.candidates.index(winner)
        risk = belief.risk(self._allowed(belief.candidates), choice)
        belief, steps = self._explain(belief, winner)
        return Found(
            task=self._task,
            arrivals=self._arrivals,
            rate_rps=self._task.rate_rps or self._kept.rate_rps,
            level=self._kept.level or 1.0,
            screened=screened,
            estimates={each: belief.estimate(each) for each in belief.candidates},
            ratios=ratios,
            same=same,
            winner=winner,
            steps=steps,
            qualities=self._qualities,
            rejected=self._rejected,
            visits=tuple(self._kept.visits),
            risk=risk,
            spent_s=self._spent_s,
        )

    @property
    def _spent_s(self) -> float:
        return self._clock() - self._began_s

    def _tell(self, what: str) -> None:
        left_s = max(0.0, self._task.budget_s - self._spent_s)
        self._progress(
            min(self._spent_s, self._task.budget_s), self._task.budget_s, f"{what} · {left_s:.0f} s"
        )

    def _visit(
        self, stage: str, turn: int, candidate: Candidate, arrivals: Sequence[Arrival]
    ) -> None:
        self._tell(f"{stage} {turn + 1}: {candidate.label}")
        visit = self._measurer.visit(candidate, arrivals, seed=next(self._seeds))
        self._kept.visits.append(
            KeptVisit(stage=stage, turn=turn, candidate=candidate, visit=visit)
        )

    def _save(self) -> None:
        self._kept.spent_s = self._spent_s
        self._kept.qualities = list(self._qualities.items())
        self._journal.save()

    def _value(self, outcomes: Sequence[Outcome]) -> float:
        return value(self._task.objective, outcomes, self._task.slo)

    def _pilot(self) -> tuple[Arrival, ...]:
        """Everything at once on the default: what it can do, and how far off predictions of it are;
        then the load of every visit."""
        task, kept = self._task, self._kept
        slice_s = min(_LONGEST_S, max(_SHORTEST_S, _SLICE * task.budget_s))
        trace = first_seconds(task.trace, slice_s, least=_FEWEST) if task.trace else ()
        pilot = at_once(trace[:_PILOT]) if trace else self._pattern(_PILOT, None)
        if kept.rate_rps is None or kept.level is None:
            for turn in range(2):
                self._visit("pilot", turn, DEFAULT, pilot)
            # Others on the machine only ever add.
            walls = [_wall_s(each.visit.outcomes) for each in kept.visits_of("pilot")]
            kept.rate_rps = len(pilot) / min(walls)
            kept.level = min(walls) / _wall_s(self._predictor.outcomes(DEFAULT, pilot))
            self._save()
        self._predictor.calibration = corrected(self._predictor.calibration, kept.level)
        if trace:
            return trace
        assert task.pattern is not None
        if task.pattern.is_offline:
            return self._pattern(_bounded(kept.rate_rps * slice_s), None)
        rate_rps = task.rate_rps or kept.rate_rps
        return self._pattern(_bounded(rate_rps * slice_s), rate_rps)

    def _pattern(self, num_requests: int, rate_rps: float | None) -> tuple[Arrival, ...]:
        assert self._task.pattern is not None
        return pattern_arrivals(
            self._task.pattern,
            rate_rps=rate_rps,
            num_requests=num_requests,
            context=self._predictor.context,
            is_rising=rate_rps is not None and self._task.rate_rps is None,
        )

    def _screen(self) -> Screened:
        task = self._task
        screened = screen(
            self._predictor,
            list(task.space.points()),
            self._arrivals,
            objective=task.objective,
            slo=task.slo,
            seconds=max(1.0, _SCREENING * task.budget_s - self._spent_s),
            most=_LEADERS,
            clock=self._clock,
            progress=lambda done, total: self._tell(f"predicting {done} of {total}"),
        )
        self._predicted |= {each.candidate: each.value for each in screened.leaders}
        return screened

    def _race(self, screened: Screened) -> Belief:
        """Turns of two candidates and the default, until the choice is safe or the time is over."""
        task = self._task
        leaders = [each.candidate for each in screened.leaders]
        others = [new for each in leaders[:_SPECULATED] for new in task.space.unpredicted(each)]
        met = [each.candidate for each in self._kept.visits if each.stage in _COMPARED]
        belief = self._belief([*leaders, *others, *met])
        done = [each.turn for each in self._kept.visits_of("race")]
        for turn in count(1 + max(done, default=-1)):
            chosen = [belief.candidates[index] for index in self._next(belief)]
            late = self._spent_s > _RACE * task.budget_s - self._visit_s(1 + len(chosen))
            if not chosen or late:
                break
            if not all(self._is_good_enough(each) for each in chosen):
                continue
            order = [DEFAULT, *chosen]
            if self._turn("race", turn, order if turn % 2 else order[::-1]):
                belief.observe(self._log_ratios("race", turn))
        return belief

    def _belief(self, candidates: Sequence[Candidate]) -> Belief:
        """With all turns so far."""
        candidates = list(dict.fromkeys(candidates))
        base = log(self._predict(DEFAULT))
        unpredicted = {axis.name for axis in self._task.space.axes if not axis.predicted}
        means = [
            log(self._predict(each))
            - base
            + _UNPREDICTED_MEAN * sum(name in unpredicted for name, _ in each.changes)
            for each in candidates
        ]
        belief = Belief(candidates, means, self._doubts())
        for ratios in self._turns():
            known = {each: ratio for each, ratio in ratios.items() if each in candidates}
            belief.observe(known)
        return belief

    def _doubts(self) -> dict[str, float]:
        """How far off the predicted effect of a setting may be."""
        calibration, form = self._predictor.calibration, self._predictor.model(DEFAULT).main_format
        formats = min(_WIDEST, calibration.spread("decode", form).deviation)
        unpredicted = [axis.name for axis in self._task.space.axes if not axis.predicted]
        return dict.fromkeys(FORMATS, formats) | dict.fromkeys(unpredicted, _UNPREDICTED)

    def _predict(self, candidate: Candidate) -> float:
        if candidate not in self._predicted:
            twin = candidate.without("speculation")
            if twin not in self._predicted:
                outcomes = self._predictor.outcomes(twin, self._arrivals)
                self._predicted[twin] = self._value(outcomes)
            self._predicted[candidate] = self._predicted[twin]
        return self._predicted[candidate]

    def _turns(self) -> Iterator[dict[Candidate, float]]:
        """Of every turn with the default, the candidates that were measured in it."""
        for stage in _COMPARED:
            for turn in {each.turn: None for each in self._kept.visits_of(stage)}:
                yield self._log_ratios(stage, turn)

    def _log_ratios(self, stage: str, turn: int) -> dict[Candidate, float]:
        """Of each candidate of a turn over the default, the means of their visits."""
        means = {each: mean(logs) for each, logs in self._logs(stage, turn).items()}
        base = means.pop(DEFAULT)
        return {each: found - base for each, found in means.items()}

    def _logs(self, stage: str, turn: int) -> dict[Candidate, list[float]]:
        """The logarithms of the visits of a turn."""
        found: dict[Candidate, list[float]] = {}
        for each in self._kept.visits_of(stage):
            if each.turn == turn:
                found.setdefault(each.candidate, []).append(log(self._value(each.visit.outcomes)))
        return found

    def _turn(self, stage: str, turn: int, order: Sequence[Candidate]) -> bool:
        """Visit some candidates in order; one that does not run is out, and so is the turn."""
        before = len(self._kept.visits)
        for candidate in order:
            try:
                self._visit(stage, turn, candidate, self._arrivals)
            except (MachineError, SettingsError, EngineError) as error:
                del self._kept.visits[before:]
                if candidate == DEFAULT:
                    raise
                self._rejected[candidate] = f"does not run: {error}"
                return False
        self._save()
        return True

    def _allowed(self, candidates: Sequence[Candidate]) -> list[bool]:
        return [each not in self._rejected for each in candidates]

    def _next(self, belief: Belief) -> list[int]:
        """Who is measured next: who may be the best, and the choice or who is next to that one;
        nobody where the choice is safe."""
        allowed = self._allowed(belief.candidates)
        if not any(allowed[1:]):
            return []
        if self._task.objective is Objective.MEMORY:
            return self._next_smaller(belief, allowed)
        best = belief.best(allowed)
        enough = best == 0 or self._num_pairs(belief, best) >= _ENOUGH_PAIRS
        if belief.risk(allowed) < _RISK:
            return [] if enough else [best]
        first, *others = belief.next(allowed, 2)
        return [first, best] if best not in (0, first) else [first, *others]

    def _next_smaller(self, belief: Belief, allowed: Sequence[bool]) -> list[int]:
        """The smallest that may still keep the goodput and was not measured enough."""
        for index in self._by_memory(belief):
            estimate = belief.estimate(belief.candidates[index])
            may_hold = estimate.mean + 1.28 * estimate.deviation > -MARGIN
            if index and allowed[index] and may_hold:
                return [index] if estimate.num_pairs < _ENOUGH_PAIRS else []
        return []

    def _by_memory(self, belief: Belief) -> list[int]:
        candidates = belief.candidates
        sizes = [self._predictor.memory_bytes(each) for each in candidates]
        return sorted(range(len(candidates)), key=lambda index: (sizes[index], index))

    def _num_pairs(self, belief: Belief, index: int) -> int:
        return belief.estimate(belief.candidates[index]).num_pairs

    def _visit_s(self, visits: int) -> float:
        """About what so many visits take, with what starts engines."""
        stages = [each for each in self._kept.visits if each.stage != "pilot"]
        walls = [_wall_s(each.visit.outcomes) for each in stages]
        return visits * 1.3 * (median(walls) if walls else 0.0)

    def _is_good_enough(self, candidate: Candidate) -> bool:
        """Judge the candidate's formats, once; all candidates of one that is not are out."""
        limits, formats = self._task.quality, Candidate(candidate.formats)
        if self._judge is None or not limits.is_set or formats == DEFAULT:
            return True
        if formats not in self._qualities:
            self._tell(f"quality: {formats.label}")
            try:
                self._qualities[formats] = self._judge.quality(formats)
            except RidgelineError as error:
                self._rejected[candidate] = f"quality cannot be measured: {error}"
                return False
            self._save()
        missed = limits.missed(self._qualities[formats])
        if missed is None:
            return True
        for each in self._predicted:
            if each.formats == candidate.formats:
                self._rejected[each] = missed
        self._rejected[candidate] = missed
        return False

    def _challengers(self, belief: Belief) -> list[Candidate]:
        """The choice, and another that may be as good."""
        allowed = self._allowed(belief.candidates)
        if self._task.objective is Objective.MEMORY:
            holds = [
                index
                for index in self._by_memory(belief)
                if allowed[index] and belief.estimate(belief.candidates[index]).mean > -MARGIN
            ]
            return [belief.candidates[index] for index in holds[:1] if index]
        best = belief.best(allowed)
        if best == 0:
            return []
        known = [each for each, may in zip(belief.candidates, allowed, strict=True) if may]
        first = belief.simplest(belief.candidates[best], known)
        allowed[0] = allowed[belief.candidates.index(first)] = False
        if not any(allowed):
            return [first]
        second = belief.candidates[belief.best(allowed)]
        one, other = belief.estimate(first), belief.estimate(second)
        is_close = other.mean > max(0.0, one.mean - MARGIN) and other.num_pairs
        return [first, second] if is_close else [first]

    def _prove(
        self, belief: Belief, screened: Screened
    ) -> tuple[dict[Candidate, Ratio], Ratio | None]:
        """The challengers between two visits of the default, turn by turn."""
        done = self._kept.visits_of("proof")
        met = [each.candidate for each in done if each.candidate != DEFAULT]
        challengers = list(dict.fromkeys(met)) or self._challengers(belief)
        challengers = [each for each in challengers if self._is_good_enough(each)]
        if not challengers:
            return {}, None
        order = [DEFAULT, *challengers, DEFAULT]
        first = 1 + max((each.turn for each in done), default=-1)
        for turn in range(first, MOST_TURNS):
            left_s = self._task.budget_s - self._spent_s
            if turn >= FEWEST_TURNS and left_s < self._visit_s(len(order)):
                break
            if not self._turn("proof", turn, order if turn % 2 else order[::-1]):
                return {}, None
        turns = sorted({each.turn for each in self._kept.visits_of("proof")})
        logs = [self._logs("proof", turn) for turn in turns]
        same = [second - first for first, second in (each[DEFAULT] for each in logs)]
        return ratios_over(DEFAULT, logs), paired_ratio(same)

    def _winner(
        self, belief: Belief, ratios: dict[Candidate, Ratio], same: Ratio | None
    ) -> Candidate:
        """Of those that are proven to be better, beyond what the default seems to be than itself,
        the one that is best by everything that was measured."""
        if same is None:
            return DEFAULT
        noise = max(same.low, 1 / same.high, 1.0)  # 1 but where the default differs from itself
        if self._task.objective is Objective.MEMORY:
            default_bytes = self._predictor.memory_bytes(DEFAULT)
            for each, ratio in ratios.items():
                smaller = self._predictor.memory_bytes(each) * _LEAST_GAIN < default_bytes
                if smaller and ratio.low > _MEMORY_COST:
                    return each
            return DEFAULT
        proven = [
            each
            for each, ratio in ratios.items()
            if ratio.low > noise and ratio.value > _LEAST_GAIN
        ]
        if not proven:
            return DEFAULT
        best = max(proven, key=lambda each: belief.estimate(each).mean)
        return belief.simplest(best, proven)

    def _explain(self, belief: Belief, winner: Candidate) -> tuple[Belief, list[Change]]:
        """What each change adds, those of the largest predicted effect first; the ways between are
        measured where there is time left."""
        alone = {change: self._predict(Candidate((change,))) for change in winner.changes}
        changes = sorted(winner.changes, key=lambda change: -alone[change])
        kept = {change: place for place, change in enumerate(winner.changes)}
        path = [
            Candidate(tuple(sorted(changes[:number], key=kept.__getitem__)))
            for number in range(len(changes) + 1)
        ]
        between = [each for each in path[1:-1] if self._is_good_enough(each)]
        first = len(self._kept.visits_of("steps"))
        for turn, each in enumerate(between, start=first):
            if self._task.budget_s - self._spent_s < self._visit_s(2):
                break
            self._turn("steps", turn, (DEFAULT, each))
        belief = self._belief([*belief.candidates, *path])
        return belief, [
            self._step(belief, before, after, winner) for before, after in pairwise(path)
        ]

    def _step(
        self, belief: Belief, before: Candidate, after: Candidate, winner: Candidate
    ) -> Change:
        ((name, new),) = set(after.changes) - set(before.changes)
        one, other = belief.estimate(before), belief.estimate(after)
        return Change(
            name=name,
            value=new,
            predicted=log(self._predict(after) / self._predict(before)),
            believed=other.mean - one.mean,
            deviation=(one.deviation**2 + other.deviation**2) ** 0.5,
            is_measured=bool((before == DEFAULT or one.num_pairs) and other.num_pairs),
            predicted_alone_last=log(self._predict(winner) / self._predict(winner.without(name))),
        )


def _wall_s(outcomes: Sequence[Outcome]) -> float:
    return max(each.done_s for each in outcomes) - min(each.arrival_s for each in outcomes)


def _bounded(num_requests: float) -> int:
    return round(min(_MOST, max(_FEWEST, num_requests)))
