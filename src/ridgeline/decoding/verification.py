"""Verification of drafted tokens, chain or tree.

The target's own token is drawn at every node with the noise of that position; a draft is accepted
iff it is equal. So speculation changes no output, greedy or sampled.

A tree is given by ``parents``: entry i is the index of the draft that draft i follows, less than i,
or −1 for the last known token.
"""

from collections.abc import Callable, Sequence


def chain(num_drafts: int) -> tuple[int, ...]:
    """The parents of a chain: each draft follows the one before."""
    return tuple(range(-1, num_drafts - 1))


def depths(parents: Sequence[int]) -> tuple[int, ...]:
    """Depth of each draft: 1 for those that follow the last known token."""
    result: list[int] = []
    for parent in parents:
        result.append(1 if parent < 0 else result[parent] + 1)
    return tuple(result)


def ancestors(parents: Sequence[int], node: int) -> tuple[int, ...]:
    """The path of draft indices from the root to ``node``, itself included; () for −1."""
    path = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return tuple(reversed(path))


def verify(
    drafts: Sequence[int], parents: Sequence[int], draw: Callable[[int], int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Walk down the tree along the tokens that the target draws.

    ``draw(node)`` gives the target's token after draft ``node`` (−1: after the last known token);
    it is called once per visited node. Returns the tokens, accepted drafts and then one more, and
    the indices of the accepted drafts.
    """
    tokens: list[int] = []
    accepted: list[int] = []
    node = -1
    while True:
        token = draw(node)
        tokens.append(token)
        children = (i for i, parent in enumerate(parents) if parent == node and drafts[i] == token)
        node = next(children, -1)
        if node < 0:
            return tuple(tokens), tuple(accepted)
        accepted.append(node)
