"""Trees of drafts, grown best first under a budget of nodes.

The noise of a token depends on its position alone, so all nodes of one depth share it, and the
target draws one token there, whatever the tree. What is likely to be that token is therefore ranked
as it is drawn: by log q / T + g, with the target's own noise g (drafter-invariant sampling, Daliri
et al. 2024, arXiv 2408.07978). Nodes are taken in order of the probability of their path (OPT-Tree,
Wang et al. 2024, arXiv 2406.17276).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ridgeline.core.arrays import Array
from ridgeline.core.philox import words_of
from ridgeline.core.protocols import TokenDraw
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.decoding.noise import gumbel
from ridgeline.decoding.sampling import History, constrain

# Noise is drawn for so many tokens, and for those so near to the best; others are seldom drawn.
_LIKELY, _NEAR = 256, 12.0

Floats = npt.NDArray[np.float64]


def drawn_scores(
    draw: TokenDraw, token_ids: npt.NDArray[np.int64], log_q: Floats, position: int
) -> Floats:
    """log q / T + g of some tokens; log q of a greedy sequence's."""
    if draw.temperature <= 0.0:
        return log_q
    words = words_of(token_ids, seed=draw.seed, sample_index=draw.sample_index, position=position)
    return log_q / draw.temperature + gumbel(words)


class Children(NamedTuple):
    """Tokens that may follow a node, the most likely first, with the logarithms of how likely."""

    token_ids: list[int]
    log_shares: list[float]


def ranked(token_ids: Sequence[int], scores: Floats, count: int, rest: float = 0.0) -> Children:
    """The ``count`` best tokens by their ``scores``; ``rest`` is what others weigh beside them."""
    order = np.argsort(-scores, kind="stable")
    best = scores[order[0]]
    total = best + np.log(np.exp(scores - best).sum() + rest * np.exp(-best))
    kept = order[:count].tolist()
    return Children([token_ids[i] for i in kept], [float(scores[i] - total) for i in kept])


def likely_tokens(
    logits_V: Array,
    params: SamplingParams,
    history: History,
    *,
    seed: int,
    sample_index: int,
    count: int,
) -> Children:
    """What a model takes for the token that is drawn at position ``len(history.token_ids)``.

    Truncation (top-k, top-p, min-p) is left out: it moves probability, but not the noise. Empty if
    no token is possible.
    """
    logits = logits_V
    if params.has_penalties or params.logit_bias or params.min_tokens:
        logits = constrain(logits_V, params, history)
    best = logits.max()
    if not np.isfinite(best):
        return Children([], [])
    temperature = 0.0 if params.is_greedy else params.temperature
    some = np.flatnonzero(logits >= best - _NEAR * (temperature or 1.0))
    if len(some) > _LIKELY:
        some = np.sort(some[np.argpartition(-logits[some], _LIKELY)[:_LIKELY]])
    draw = TokenDraw(seed=seed, sample_index=sample_index, temperature=temperature)
    log_q = (logits[some] - best).astype(np.float64)
    scores = drawn_scores(draw, some, log_q, len(history.token_ids))
    return ranked(some.tolist(), scores, count)


class DraftTree:
    """Nodes with the probability of their path, of which the ``num_nodes`` best are wanted."""

    def __init__(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._paths: list[float] = []  # logarithms of probabilities; a child's is no higher
        self._is_leaf: list[bool] = []  # until its children are added, be there any or none

    def add(self, parent: int, children: Children) -> range:
        """What may follow node ``parent``, −1 for the last known token; returns the new nodes."""
        first = len(self._tokens)
        before = 0.0 if parent < 0 else self._paths[parent]
        if parent >= 0:
            self._is_leaf[parent] = False
        for token, share in zip(*children, strict=True):
            self._tokens.append(token)
            self._parents.append(parent)
            self._paths.append(before + min(share, 0.0))
            self._is_leaf.append(True)
        return range(first, len(self._tokens))

    def leaves(self, count: int) -> list[int]:
        """The ``count`` best of those among the best nodes whose children were not added."""
        return [node for node in self._best() if self._is_leaf[node]][:count]

    def path(self, node: int) -> list[int]:
        """The tokens from the first draft to a node, itself included."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return tokens[::-1]

    def part(self, nodes: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens and parents of some nodes; each of them comes after the one that it follows."""
        places = {-1: -1} | {node: place for place, node in enumerate(nodes)}
        tokens = tuple(self._tokens[node] for node in nodes)
        return tokens, tuple(places[self._parents[node]] for node in nodes)

    def best(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens and parents of the best nodes, best first."""
        return self.part(self._best())

    def _best(self) -> list[int]:
        nodes = sorted(range(len(self._tokens)), key=lambda node: (-self._paths[node], node))
        return nodes[: self._num_nodes]
