"""What speculative decoding would gain."""


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
