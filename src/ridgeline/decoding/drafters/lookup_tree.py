"""Several continuations of a text, from the places where its end occurred, as one tree."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ridgeline.core.protocols import Draft, TokenDraw
from ridgeline.decoding.drafters.hash_chains import HashChains, Recurrence
from ridgeline.decoding.trees import Children, DraftTree, drawn_scores, ranked


class Continuation(NamedTuple):
    """What followed a text's last ``length`` tokens somewhere: the i-th token, or ``None``."""

    length: int
    token: Callable[[int], int | None]


def continuations(
    text: HashChains, matches: Iterable[Recurrence], *, end: int | None = None
) -> list[Continuation]:
    """Those after the ``matches`` in a text, up to a token ``end``; without it the text goes on to
    repeat itself after its own last token."""

    def of(match: Recurrence) -> Continuation:
        position, length = match.position, len(text)

        def token(index: int) -> int | None:
            if end is None:
                return text.tokens[position + index % (length - position)]
            place = position + index
            return text.tokens[place] if place < length and text.tokens[place] != end else None

        return Continuation(match.length, token)

    return [of(match) for match in matches]


def lookup_tree(
    found: Sequence[Continuation], *, position: int, num_nodes: int, draw: TokenDraw
) -> Draft:
    """The tokens from ``position`` on, best first.

    A continuation counts half as much for each token that it has less in common than the longest,
    and what was never seen as the inverse of how many that has: a long context is seldom wrong.
    Tokens are ranked as they are drawn, by log of the count / T + noise.
    """
    tree, at = DraftTree(num_nodes), {-1: list(found)}
    longest = max((each.length for each in found), default=0)
    new = [-1] if found else []
    while new:
        node = new[0]
        depth, followed = len(tree.path(node)), at.pop(node)
        weights: dict[int, float] = {}
        followers: dict[int, list[Continuation]] = {}
        for each in followed:
            token = each.token(depth)
            if token is not None:
                weights[token] = weights.get(token, 0.0) + 2.0 ** (each.length - longest)
                followers.setdefault(token, []).append(each)
        unseen = 1.0 / (longest + depth)
        children = _children(weights, unseen, position + depth, draw)
        for child, token in zip(tree.add(node, children), children.token_ids, strict=True):
            at[child] = followers[token]
        new = tree.leaves(1)
    tokens, parents = tree.best()
    return Draft(token_ids=tokens, parents=parents)


def _children(weights: dict[int, float], unseen: float, position: int, draw: TokenDraw) -> Children:
    if not weights:
        return Children([], [])
    tokens, total = list(weights), unseen + sum(weights.values())
    scores = np.log(np.array(list(weights.values())) / total)
    if len(tokens) > 1:
        scores = drawn_scores(draw, np.array(tokens), scores, position)
    return ranked(tokens, scores, len(tokens), rest=unseen / total)
