"""One replica under its part of a load: which requests are simulated, and what becomes of them."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from ridgeline.core.protocols import StepPrice
from ridgeline.planning.question import Question
from ridgeline.planning.replica import Replica
from ridgeline.planning.simulation import simulate
from ridgeline.planning.traffic import Traffic
from ridgeline.planning.workload import Arrival, paced, poisson

_RESIDENCES = 6  # times that a request stays, for which requests arrive
_MORE = 1.25  # times the requests that were simulated: with so many, they are again


def run_traffic(question: Question, replica: Replica, price: StepPrice) -> Traffic:
    """One replica under its part of the load; of Poisson arrivals, its steady state."""
    if question.rate_rps is None or question.trace:
        return run(question, replica, _part(question, replica), price)
    alone = run_alone(question, replica, price)
    first = _arrivals(question, replica, alone.mean_end_to_end_s)
    traffic = run(question, replica, first, price)
    again = _arrivals(question, replica, traffic.mean_end_to_end_s)  # they stay longer under load
    return traffic if len(again) <= _MORE * len(first) else run(question, replica, again, price)


def run_alone(question: Question, replica: Replica, price: StepPrice) -> Traffic:
    """A single typical request on an idle replica."""
    return run(question, replica, [question.typical], price)


def run(
    question: Question, replica: Replica, arrivals: Sequence[Arrival], price: StepPrice
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
        price=price,
    )
    is_poisson = question.load == "poisson" and len(arrivals) > 1
    return traffic.steady() if is_poisson else traffic


def num_at_once(question: Question, replica: Replica) -> int:
    """Requests of the load that a replica runs at once, at the most."""
    return min(replica.fit.max_batch, question.config.max_num_seqs)


def _arrivals(question: Question, replica: Replica, residence_s: float) -> Sequence[Arrival]:
    """One replica's part of Poisson arrivals, where requests stay for so many seconds."""
    assert question.rate_rps is not None
    rate_rps = question.rate_rps / replica.count
    in_progress = min(rate_rps * residence_s, num_at_once(question, replica))
    arrivals = poisson(
        rate_rps=rate_rps,
        num_requests=max(question.num_requests, ceil(_RESIDENCES * in_progress)),
        prompt_tokens=question.prompt_tokens,
        output_tokens=question.output_tokens,
        seed=question.seed,
    )
    return paced(arrivals, rate_rps)


def _part(question: Question, replica: Replica) -> Sequence[Arrival]:
    """One replica's part of a trace, or what saturates it."""
    if question.trace:
        return question.trace[:: replica.count]
    return [question.typical] * (2 * num_at_once(question, replica))
