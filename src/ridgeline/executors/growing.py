"""A draft model's tree of one sequence as forward passes deepen it (see `Pass.num_nodes`)."""

from ridgeline.core.arrays import Array
from ridgeline.core.plan import Outputs, Pass, Segment
from ridgeline.core.result import SegmentResult
from ridgeline.decoding.trees import DraftTree, likely_tokens
from ridgeline.executors.outputs import SegmentContext

_SAMPLE = Outputs(sample=True)


class GrowingTree:
    """``segment`` is what the next forward pass computes for it; ``None`` if there is no more.

    Each pass computes the last known token and all nodes that have children anew: a few more rows
    of a small model, for which no KV of a tree has to be kept in order.
    """

    def __init__(self, segment: Segment, a_pass: Pass) -> None:
        self.segment: Segment | None = segment
        self._pass = a_pass
        self._root = segment
        self._tree = DraftTree(a_pass.num_nodes)
        self._inner: list[int] = []  # nodes with children, in the order of their rows
        self._new: list[int] = [-1]  # of these, those whose children the next pass tells
        self._num_steps = 0

    def take(self, item: SegmentContext, logits_NV: Array) -> None:
        """What the pass over ``segment`` gave: rows of the last known token and of each node."""
        state, admission = item.state, item.state.admission
        known = item.known[: self._root.stop]
        for row, node in enumerate(self._new, start=len(logits_NV) - len(self._new)):
            children = likely_tokens(
                logits_NV[row],
                admission.params,
                state.history([*known, *self._tree.path(node)]),
                seed=admission.seed,
                sample_index=admission.sample_index,
                count=self._pass.num_nodes,
            )
            self._tree.add(node, children)
        self._num_steps += 1
        self.segment = self._next()

    def result(self) -> SegmentResult:
        """All nodes that were asked for, or nothing."""
        tokens, parents = self._tree.best()
        if len(tokens) < self._pass.num_nodes:
            return SegmentResult()
        return SegmentResult(token_ids=tokens, parents=parents)

    def _next(self) -> Segment | None:
        step, most = self._num_steps, self._pass.nodes_at(self._num_steps)
        if step == self._pass.num_steps:
            return None
        self._new = self._tree.leaves(most - len(self._inner))
        if not self._new:
            return None
        self._inner += self._new
        tokens, parents = self._tree.part(self._inner)
        stop = self._root.stop
        return Segment(
            slot=self._root.slot,
            start=stop - 1,
            stop=stop + len(tokens),
            token_ids=(self._root.token_ids[-1], *tokens),
            num_drafts=len(tokens),
            parents=parents,
            outputs=_SAMPLE,
        )
