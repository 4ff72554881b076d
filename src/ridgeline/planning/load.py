"""One replica under its part of a load: which requests are simulated, and what becomes of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.protocols import StepTimePredictor
from ridgeline.planning.question import MIN_REQUESTS, Question
from ridgeline.planning.replica import Replica
from ridgeline.planning.simulation import simulate
from ridgeline.planning.traffic import Traffic
from ridgeline.planning.workload import Arrival, paced, poisson

_RESIDENCES = 6  # times that a request stays, for which requests arrive
# Below this a machine seems to fall behind: the first third arrives before any has left.
_FEWEST_RESIDENCES = 3
_MORE = 1.25  # times the requests that were simulated: with so many, they are again
_FEWEST = 12  # requests whose rates mean anything
_SEQUENCE = 0.1  # of the time of a simulated step, which each of its sequences takes
# Of one sequence, at some 0.1 ms each, in one simulation: a plan with a rate makes about four, one
# of saturation a single one. Loads are shortened to the first as far as they mean something.
WANTED_STEPS = 50_000
MOST_STEPS = 100_000
MOST_SATURATED_STEPS = 150_000


class TooLongError(InvalidRequestError):
    """A load would take minutes to simulate; another, or another machine, perhaps not."""


class Skipped:
    """What a search leaves out since it would take too long to simulate."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._first: TooLongError | None = None

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """Go on behind the block where it takes too long, and remember ``name``."""
        try:
            yield
        except TooLongError as error:
            self._names.append(name)
            self._first = self._first or error

    @property
    def notes(self) -> list[str]:
        """A sentence, if anything was left out."""
        if not self._names:
            return []
        return [f"Left out, as simulating it would take minutes: {', '.join(self._names)}."]

    def raise_if_any(self) -> None:
        """Where nothing else was found, that is no answer."""
        if self._first is not None:
            raise self._first


def run_traffic(question: Question, replica: Replica, predictor: StepTimePredictor) -> Traffic:
    """One replica under its part of the load; of Poisson arrivals, its steady state.

    A load whose simulation would take very long is shortened (`Traffic.num_left_out`).

    Raises:
        TooLongError: the fewest requests that mean something would take too long.
    """
    if question.trace:
        return run(question, replica, question.trace[:: replica.count], predictor)
    if question.rate_rps is None:
        return _run_saturated(question, replica, predictor)
    alone = run_alone(question, replica, predictor)
    traffic = _run_poisson(question, replica, alone.mean_end_to_end_s, predictor)
    residence_s = traffic.mean_end_to_end_s  # they stay longer under load
    wanted = _num_simulated(question, replica, residence_s)
    if wanted > _MORE * len(traffic.answers):
        traffic = _run_poisson(question, replica, residence_s, predictor)
    steady = _steady_requests(question, replica, residence_s)
    left_out = steady - len(traffic.answers) if wanted < steady else 0
    return replace(traffic, num_left_out=max(0, left_out))


def run_alone(question: Question, replica: Replica, predictor: StepTimePredictor) -> Traffic:
    """A single typical request on an idle replica.

    Raises:
        TooLongError: its simulation would take too long.
    """
    if not question.trace and _steps_of_request(question, 1.0) > MOST_SATURATED_STEPS:
        raise _too_long("A single request of these lengths")
    return run(question, replica, [question.typical], predictor)


def run(
    question: Question, replica: Replica, arrivals: Sequence[Arrival], predictor: StepTimePredictor
) -> Traffic:
    """Simulate arrivals on one replica.

    Sequences of a trace differ, and are admitted as long as there are blocks.
    """
    at_once = question.config.max_num_seqs if question.trace else num_at_once(question, replica)
    config = replace(question.config, max_num_seqs=at_once, max_model_len=question.longest)
    traffic = simulate(
        replica.model,
        question.machine.calibration,
        arrivals,
        config,
        kv_pool_bytes=replica.kv_pool_bytes,
        predictor=predictor,
    )
    is_poisson = question.load == "poisson" and len(arrivals) > 1
    return traffic.steady() if is_poisson else traffic


def num_at_once(question: Question, replica: Replica) -> int:
    """Requests of the load that a replica runs at once, at the most: each has a token of a step."""
    config = question.config
    return min(replica.fit.max_batch, config.max_num_seqs, config.max_num_batched_tokens)


def _run_saturated(question: Question, replica: Replica, predictor: StepTimePredictor) -> Traffic:
    """Twice as many requests at once as run at once, or only so many."""
    at_once = num_at_once(question, replica)
    wave_steps = at_once * _steps_of_request(question, at_once)
    if wave_steps > MOST_SATURATED_STEPS:
        raise _too_long(f"{at_once} requests of these lengths at once")
    waves = 2 if 2 * wave_steps <= MOST_SATURATED_STEPS else 1
    traffic = run(question, replica, [question.typical] * (waves * at_once), predictor)
    return replace(traffic, num_left_out=(2 - waves) * at_once)


def _run_poisson(
    question: Question, replica: Replica, residence_s: float, predictor: StepTimePredictor
) -> Traffic:
    """One replica's part of Poisson arrivals, where requests stay for so many seconds."""
    assert question.rate_rps is not None
    rate_rps = question.rate_rps / replica.count
    num_requests = _num_simulated(question, replica, residence_s)
    arrivals = poisson(
        rate_rps=rate_rps,
        num_requests=num_requests,
        prompt_tokens=question.prompt_tokens,
        output_tokens=question.output_tokens,
        seed=question.seed,
    )
    return run(question, replica, paced(arrivals, rate_rps), predictor)


def _num_simulated(question: Question, replica: Replica, residence_s: float) -> int:
    """Requests that show the steady state, or fewer where these take too many steps; at least those
    that were asked for."""
    in_progress = _in_progress(question, replica, residence_s)
    each = _steps_of_request(question, max(1.0, in_progress))
    least = max(question.num_requests or _FEWEST, ceil(_FEWEST_RESIDENCES * in_progress))
    if question.num_requests is None and least * each > MOST_STEPS:
        raise _too_long(
            f"A load of {least} requests of these lengths",
            f", or --requests {MIN_REQUESTS} for at least so many, whatever they take",
        )
    affordable = max(least, int(WANTED_STEPS / each))
    return min(_steady_requests(question, replica, residence_s), affordable)


def _steady_requests(question: Question, replica: Replica, residence_s: float) -> int:
    """Requests that show the steady state of one replica's part of a rate."""
    in_progress = _in_progress(question, replica, residence_s)
    return max(question.num_requests or MIN_REQUESTS, ceil(_RESIDENCES * in_progress))


def _in_progress(question: Question, replica: Replica, residence_s: float) -> float:
    assert question.rate_rps is not None
    by_rate = question.rate_rps / replica.count * residence_s
    return min(by_rate, num_at_once(question, replica))


def _steps_of_request(question: Question, at_once: float) -> float:
    """Steps of one sequence that take as long to simulate as a request does among so many."""
    budget = question.config.max_num_batched_tokens
    prompt, output = question.prompt_tokens, question.output_tokens
    own = ceil(prompt / budget) + output
    return max(own / at_once, (prompt + output) / budget) + _SEQUENCE * own


def _too_long(what: str, otherwise: str = "") -> TooLongError:
    return TooLongError(
        f"{what} would take minutes to simulate, token by token: give a shorter --output, a larger "
        f"--max-num-batched-tokens, a smaller --max-num-seqs{otherwise}."
    )
