"""`StepPlan`: what one step of the engine does. It is executed, and it is priced.

A plan is frozen, holds integers only, and can be sent to another process (`core.wire`). It knows no
prefill and no decode: a pass computes positions ``[start, stop)`` of each of its requests. A large
range is what others call prefill, a range of one is decode, and a range whose last tokens are
drafted is verification.

What the executor keeps between plans, per *slot* (a small integer that stands for one running
sequence from its `Admission` to its release):

* the tokens known so far: those admitted, those that plans brought, those that it sampled;
* one block table per model role and KV group, changed only by `BlockTableUpdate`;
* the sampling settings.

A model with states (`core.spec.StateGroup`) has one more group of blocks after its KV groups; a
block of it holds one state. The only entry of a sequence's table is the block that its state runs
in: a segment that starts at 0 begins with zeros, another with what is there, and leaves the state
after its last token that is no draft. So a `BlockCopy` of a checkpoint over that block restores a
sequence, and ``Segment.state_saves`` make checkpoints. Of drafts the executor keeps what the state
would take in, and ``Segment.state_lag`` says how many of the last segment's it takes in before the
next one: nothing has to be taken back, and a state is read and written once a step.

Order within a step: releases, admissions, copies in order, passes in order. Blocks go to and come
from tiers between steps (docs/decisions/0007-tiers.md).
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from ridgeline.core.kv_compression import KVSelection, KVWindow
from ridgeline.core.kv_reuse import KVReuse
from ridgeline.core.pooling import Pooling
from ridgeline.core.rounding import ceil_div
from ridgeline.core.sampling_params import SamplingParams

GROWN = -2  # in `Segment.parents`: as the draft model's pass in the same plan grew its tree
_OUTPUT_BITS = 24  # of a token reference; those above count plans


def step_in_flight(output: int, plans_back: int = 1) -> int:
    """A token reference: output number ``output`` of the plan submitted ``plans_back`` before this.

    With it the next step can be prepared, and submitted, before those that run have ended; an
    executor that takes n plans at once (`Executor.max_in_flight`) knows the outputs of n − 1 before
    a plan. Outputs are numbered through all passes of a plan, segment by segment, as many for each
    as `num_outputs` says.
    """
    return -1 - (plans_back << _OUTPUT_BITS | output)


def earlier_pass(output: int) -> int:
    """A token reference: output number ``output`` of an earlier pass of the same plan (a draft)."""
    return -1 - output


def is_reference(token_id: int) -> bool:
    """Whether this is not a token id but stands for one."""
    return token_id < 0


def plans_back(token_id: int) -> int:
    """How many plans before its own a reference points to; 0 to an earlier pass of its own."""
    return (-1 - token_id) >> _OUTPUT_BITS


def is_earlier_pass(token_id: int) -> bool:
    """Whether this is a reference to an earlier pass of its own plan."""
    return is_reference(token_id) and plans_back(token_id) == 0


def referenced_output(token_id: int) -> int:
    """The output number that a reference stands for."""
    return (-1 - token_id) & ((1 << _OUTPUT_BITS) - 1)


class ModelRole(StrEnum):
    """Which of the executor's models a pass runs."""

    TARGET = "target"
    DRAFT = "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A sequence enters the executor.

    ``token_ids`` are all tokens known so far: the prompt and, after a preemption, the output. The
    first ``num_prompt_tokens`` of them count as prompt in penalties. ``sample_index`` tells the n
    samples of one request apart in the noise. ``eos_token_ids`` end the output (they are barred
    until ``params.min_tokens``). ``adapter`` is a LoRA adapter's slot, 0 for none. ``rejection``:
    its drafts, which are chains, are verified by rejection sampling (`decoding.rejection`).
    ``second_start`` is where the second text of a pair begins, whose tokens are of another type.
    """

    slot: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    sample_index: int = 0
    eos_token_ids: tuple[int, ...] = ()
    adapter: int = 0
    rejection: bool = False
    second_start: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTableUpdate:
    """Entries ``[first, first + len(blocks))`` of a block table become ``blocks``.

    Extends the table, or replaces entries (copy-on-write, blocks restored after a swap).
    """

    group: int
    first: int
    blocks: tuple[int, ...]


class StateSave(NamedTuple):
    """The sequence's state before the token at ``position`` is copied into ``block`` of the states'
    pool, once the tokens before it are computed."""

    position: int
    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What is wanted of a segment beside its KV.

    ``sample``: the token after the last position (and a verdict on each drafted token).
    ``masked``: sampling waits for a mask, set on the step's handle. ``prompt_logprobs``: the
    log-probability of the token that follows each position, where it is known. ``logits``: the raw
    logits of every position. ``pooled``: one vector of the final hidden states, so made.
    ``candidates``: so many likely tokens in the place of each that is yielded, for a drafter;
    ``drawn``: the token after each draft, accepted or not, for one, too.
    """

    sample: bool = False
    masked: bool = False
    prompt_logprobs: bool = False
    logits: bool = False
    pooled: Pooling | None = None
    candidates: int = 0
    drawn: bool = False

    @property
    def every_position(self) -> bool:
        """Whether the LM head runs on every position of the segment."""
        return self.prompt_logprobs or self.logits


class Segment(NamedTuple):
    """One sequence's part of a pass: KV positions ``[start, stop)`` are computed.

    ``token_ids`` are their tokens (or references), one per position. The last ``num_drafts`` are
    drafted. Without ``parents`` these form a chain. With ``parents`` they form a tree: entry i is
    the draft (by its index, less than i) that draft i follows, or −1 for the last token before the
    drafts; a drafted token then stands at the position of its depth and sees only its ancestors.
    Where the draft model of the same plan grows the tree (`Pass.num_nodes`), they are all `GROWN`.
    Verification leaves the KV of the accepted path at consecutive positions; what lies beyond is
    free to be written again.

    With a ``window`` a token sees no others than that says, in layers with full attention; entries
    of the block tables between sinks and window stand for nothing. With a ``selection`` the segment
    ends a prompt, and computes all tokens that choose; once a layer has attended, the chosen
    tokens are moved. No other sequence has the blocks that they are moved to.

    ``state_saves`` are at positions that the state takes in, of the segment or the steps that
    repeat it. ``state_lag`` tokens before ``start`` were the first drafts of the slot's last
    segment that was computed, in a chain.

    ``reuses`` lie before ``start``, and become the sequence's before anything of the pass is
    computed, once the tables are those of ``block_updates``.

    A segment is void if one of its references stands for a token that was not yielded: a draft was
    rejected, a replay was aborted, or the sequence ended. Nothing is computed for it and its result
    is empty. So a step can be submitted on the assumption that all drafts will be accepted.

    A step makes hundreds, so it is a tuple: a frozen dataclass takes three times as long to make.
    """

    slot: int
    start: int
    stop: int
    token_ids: tuple[int, ...]
    num_drafts: int = 0
    parents: tuple[int, ...] = ()
    block_updates: tuple[BlockTableUpdate, ...] = ()
    outputs: Outputs = Outputs()
    state_saves: tuple[StateSave, ...] = ()
    window: KVWindow | None = None
    selection: KVSelection | None = None
    reuses: tuple[KVReuse, ...] = ()
    state_lag: int = 0

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One forward pass of one model over the segments, as one batch.

    ``num_steps`` > 1 feeds each sampled token back and goes on without returning, so that each
    segment yields ``num_steps`` tokens (decode replay, or a drafter's chain). The blocks for them
    are in the tables already, and nothing but samples, without masks, is wanted out.

    With ``num_nodes`` > 0 each segment yields the so many tokens of a tree that may follow it, best
    first, or none. ``num_steps`` forward passes deepen the tree by one token each.
    """

    segments: tuple[Segment, ...]
    role: ModelRole = ModelRole.TARGET
    num_steps: int = 1
    num_nodes: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)

    def nodes_at(self, step: int) -> int:
        """The most nodes of a tree that forward pass ``step`` computes, those before it included.

        The passes after the first share out the nodes that may have children, all but one.
        """
        if not self.num_nodes:
            return 0
        width = ceil_div(self.num_nodes - 1, max(1, self.num_steps - 1))
        return min(step * width, self.num_nodes - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Block ``source`` of a KV group is copied over block ``target`` (copy-on-write)."""

    group: int
    source: int
    target: int
    role: ModelRole = ModelRole.TARGET


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step. See the module's docstring for the order in which its parts take effect."""

    step_id: int
    passes: tuple[Pass, ...]
    admissions: tuple[Admission, ...] = ()
    releases: tuple[int, ...] = ()
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(a_pass.num_tokens * a_pass.num_steps for a_pass in self.passes)


def tree_depth(num_nodes: int) -> int:
    """Forward passes that a tree of so many nodes is worth: the best ones are rarely deeper."""
    return min(num_nodes, num_nodes.bit_length() + 1)


def num_outputs(segment: Segment, a_pass: Pass) -> int:
    """How many tokens a segment of a pass may yield."""
    if not segment.outputs.sample:
        return 0
    return a_pass.num_nodes or a_pass.num_steps + segment.num_drafts


def check_plan(plan: StepPlan) -> None:
    """Assert what every plan satisfies; run on each step in tests."""
    num_before = 0
    for a_pass in plan.passes:
        for token in (token for segment in a_pass.segments for token in segment.token_ids):
            assert not is_earlier_pass(token) or referenced_output(token) < num_before
        num_before += sum(num_outputs(segment, a_pass) for segment in a_pass.segments)
        slots = [segment.slot for segment in a_pass.segments]
        assert len(slots) == len(set(slots)), "a slot occurs twice in one pass"
        assert a_pass.segments, "a pass has no segments"
        assert a_pass.num_steps >= 1
        assert not a_pass.num_nodes or a_pass.role is ModelRole.DRAFT
        is_repeated = a_pass.num_steps > 1 or a_pass.num_nodes > 0
        for segment in a_pass.segments:
            _check_segment(segment, replayed=is_repeated)


def _check_segment(segment: Segment, *, replayed: bool) -> None:
    assert 0 <= segment.start < segment.stop
    assert len(segment.token_ids) == segment.num_tokens
    assert 0 <= segment.num_drafts < segment.num_tokens, "a draft follows a token that is known"
    assert len(segment.parents) in (0, segment.num_drafts)
    grown = bool(segment.parents) and set(segment.parents) == {GROWN}
    assert grown or all(-1 <= parent < i for i, parent in enumerate(segment.parents))
    assert not segment.num_drafts or segment.outputs.sample
    assert all(each.first <= each.start < each.stop <= segment.start for each in segment.reuses)
    chosen = segment.selection
    assert chosen is None or (segment.start <= chosen.start and segment.stop == chosen.stop)
    assert not replayed or (segment.outputs == Outputs(sample=True) and not segment.num_drafts)
