"""Queueing theory, as a check of simulations."""

from math import ceil, inf


def mg1_wait_s(arrivals_per_s: float, mean_s: float, second_moment_s2: float) -> float:
    """Mean wait in an M/G/1 queue: λE[s²] / (2(1−ρ)) (Pollaczek and Khinchine); ∞ for ρ ≥ 1.

    At ρ = 0.8, constant service times of a second wait half as long as exponential ones:

    >>> round(mg1_wait_s(0.8, 1.0, 1.0), 9), round(mg1_wait_s(0.8, 1.0, 2.0), 9)
    (2.0, 4.0)
    """
    load = arrivals_per_s * mean_s
    return arrivals_per_s * second_moment_s2 / (2 * (1 - load)) if load < 1 else inf


def instances(requests_per_s: float, capacity_per_s: float) -> int:
    """⌈λ/μ⌉, with μ what one instance serves within the SLO."""
    return ceil(requests_per_s / capacity_per_s - 1e-9)


def prefill_decode_ratio(
    requests_per_s: float, prefill_per_s: float, decode_per_s: float
) -> tuple[int, int]:
    """Instances of each role: n_p : n_d = ⌈λ/μ_p⌉ : ⌈λ/μ_d⌉.

    Long inputs, TTFT first; and short ones, TPOT first:

    >>> prefill_decode_ratio(8, 2, 6), prefill_decode_ratio(8, 8, 4)
    ((4, 2), (1, 2))
    """
    return instances(requests_per_s, prefill_per_s), instances(requests_per_s, decode_per_s)


def speculation_gain(
    accepted: tuple[float, ...], *, step_s: float, verify_s: float, draft_s: float
) -> tuple[float, float]:
    """(tokens a step, speed-up) of k drafts whose i-th is accepted with probability ``accepted[i]``
    if all before it are: 1 + Σ Π α over t(verify) + k·t(draft).

    With α the same everywhere this is (1−α^{k+1})/(1−α) (Leviathan et al. 2023, arXiv 2211.17192):

    >>> tokens, gain = speculation_gain((0.8,) * 4, step_s=1.0, verify_s=1.0, draft_s=0.1)
    >>> f"{tokens:.4f} {(1 - 0.8**5) / (1 - 0.8):.4f} {gain:.2f}"
    '3.3616 3.3616 2.40'
    """
    tokens, path = 1.0, 1.0
    for probability in accepted:
        path *= probability
        tokens += path
    return tokens, tokens * step_s / (verify_s + len(accepted) * draft_s)
