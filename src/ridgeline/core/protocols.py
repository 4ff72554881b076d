"""What the engine expects of an executor, and the scheduler of a drafter."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ridgeline.core.cache_groups import KVGroup, StateGroup
from ridgeline.core.formats import NumberFormat
from ridgeline.core.ops import Op
from ridgeline.core.parallel_layout import Link, ParallelLayout
from ridgeline.core.plan import ModelRole, StepPlan
from ridgeline.core.result import StepResult, TokenLogprobs
from ridgeline.core.spec import ModelSpec
from ridgeline.core.speculation_figures import DraftChoices
from ridgeline.core.structured_outputs import StructuredOutputs


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How an executor stores KV: what a block is, and who can read its bytes.

    ``block_bytes[g]`` is the size of one block of group g, that of a state the last, if there are
    ``states``. ``digest`` names the layout (format,
    order, version, rank): blocks with another digest are not importable. It does not name the
    weights; whoever keeps blocks beyond the executor's life adds them. With several
    ``context_ranks`` each has as many blocks as the others, in the order of their numbers, and runs
    of `context_ranks.RUN_TOKENS` tokens of a sequence are one rank's after the other's.
    """

    block_tokens: int
    groups: tuple[KVGroup, ...]
    block_bytes: tuple[int, ...]
    digest: str
    states: StateGroup | None = None
    context_ranks: int = 1


class StepHandle(Protocol):
    """A submitted step."""

    def set_masks(self, masks: Mapping[tuple[int, int], npt.NDArray[np.uint32]]) -> None:
        """Allowed tokens of each masked segment, keyed by (pass, segment).

        A mask is uint32 ``[rows, ceil(vocabulary / 32)]``, bit i of word w for token 32·w + i; one
        row per sampled position. The step waits for the masks of all its masked segments.
        """

    def abort(self) -> None:
        """Ask the step to end early: a replay after the token that it is on.

        A step that waits for masks fails.
        """

    def done(self) -> bool: ...

    def result(self) -> StepResult:
        """Wait for the outcome.

        Raises:
            EngineError: the step failed; the executor's state is then undefined.
        """


class Executor(Protocol):
    """Runs plans. One test suite holds for all of them.

    What is known before one is made are its traits (`ridgeline.executors.traits`).
    """

    @property
    def name(self) -> str: ...

    @property
    def kernels(self) -> str:
        """What computes: by other kernels the KV of the same weights and tokens is another."""
        return ""

    @property
    def cpu_s(self) -> float:
        """Processor time, in seconds, of other processes that compute for it."""
        return 0.0

    @property
    def max_in_flight(self) -> int:
        """Plans that it takes before the first of them is done."""

    def spec(self, role: ModelRole = ModelRole.TARGET) -> ModelSpec: ...

    def weight_formats(self, role: ModelRole = ModelRole.TARGET) -> Mapping[str, NumberFormat]:
        """What quantized matrices are held in, by weight, those of the checkpoint included."""
        return {}

    def expert_tokens(self) -> Mapping[str, npt.NDArray[np.int64]]:
        """Tokens that the target's routers, by their weight, have sent to each of their experts so
        far, ``[experts]``; empty where that is not counted. May be called from any thread."""
        return {}

    def layout_for(self, role: ModelRole = ModelRole.TARGET) -> ParallelLayout:
        """How a model is spread over processes."""
        return ParallelLayout()

    def exchanges(self, role: ModelRole = ModelRole.TARGET) -> tuple[Op, ...]:
        """What those processes exchange in a pass of a model."""
        return ()

    @property
    def link(self) -> Link | None:
        """What an exchange takes; ``None`` where there are none."""
        return None

    def kv_budget_bytes(self, max_num_batched_tokens: int) -> int | None:
        """What a device has for KV beside weights and steps of that size; ``None``: it is the
        host's memory that counts."""
        return None

    def kv_layout(self, role: ModelRole = ModelRole.TARGET) -> KVLayout: ...

    def allocate_kv(self, num_blocks: Sequence[int], role: ModelRole = ModelRole.TARGET) -> None:
        """Create the pools with ``num_blocks[g]`` blocks for each group, that of states the last;
        once, before any plan.

        Raises:
            OutOfMemoryError: the pool does not fit.
        """

    def submit(self, plan: StepPlan) -> StepHandle:
        """Start a step, when less than ``max_in_flight`` are not done; they are run in order."""

    def export_blocks(
        self, group: int, blocks: Sequence[int], role: ModelRole = ModelRole.TARGET
    ) -> bytes:
        """The bytes of some blocks, one after the other, ``block_bytes[group]`` of each.

        They are opaque outside executors with the same layout digest. May be called from any
        thread; takes its turn after the steps that were submitted before.
        """

    def import_blocks(
        self, group: int, blocks: Sequence[int], data: bytes, role: ModelRole = ModelRole.TARGET
    ) -> None:
        """Write what `export_blocks` gave, of the same blocks or of several calls joined.

        Like it, it takes its turn, from any thread. Raises ``ValueError`` if the size does not fit.
        """

    def close(self) -> None:
        """Free everything. A closed executor takes no more plans."""


class StepTimePredictor(Protocol):
    """Predicts how long steps take, before they are made."""

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of a whole step."""

    def segment_seconds(self, num_tokens: int, context: int) -> float:
        """What a segment of ``num_tokens`` after ``context`` computed ones adds to a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Proposed next tokens of one sequence, each after the one before, or a tree of them.

    ``parents``, if not empty, are those of `Segment.parents`: entry i is the token, by its index
    less than i, that token i follows, or −1 for the last token known. Verification by rejection
    takes chains: of a tree it gets the first path.

    A drafter that is itself a model proposes nothing on the host: ``num_model_tokens`` asks for
    that many tokens from the draft model, in a pass of the same plan; of a tree if ``is_tree``.
    """

    token_ids: tuple[int, ...] = ()
    num_model_tokens: int = 0
    parents: tuple[int, ...] = ()
    is_tree: bool = False

    @property
    def num_steps(self) -> int:
        """Tokens on its longest path: as many may be accepted."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return max(depths, default=len(self.token_ids))

    def ranks(self) -> tuple[int, ...]:
        """How many tokens before each follow the same one."""
        if not self.parents:
            return (0,) * len(self.token_ids)
        seen: dict[int, int] = {}
        ranks = []
        for parent in self.parents:
            ranks.append(seen.get(parent, 0))
            seen[parent] = ranks[-1] + 1
        return tuple(ranks)

    def cut(self, num_tokens: int) -> "Draft":
        """Its first tokens."""
        if num_tokens >= len(self.token_ids):
            return self
        return replace(
            self, token_ids=self.token_ids[:num_tokens], parents=self.parents[:num_tokens]
        )

    def only(self, kept: Sequence[int]) -> "Draft":
        """Some of its tokens, in order, and with each of them those that it follows."""
        if len(kept) == len(self.token_ids):
            return self
        places = {-1: -1} | {node: place for place, node in enumerate(kept)}
        return replace(
            self,
            token_ids=tuple(self.token_ids[node] for node in kept),
            parents=tuple(places[self.parents[node]] for node in kept) if self.parents else (),
        )

    def first_path(self) -> "Draft":
        """The chain along the first token that follows each."""
        if not self.parents:
            return self
        path, node = [], -1
        while node in self.parents:
            node = self.parents.index(node)
            path.append(self.token_ids[node])
        return Draft(token_ids=tuple(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDraw:
    """What decides, beside the model, which token a sequence gets at a position: its noise (see
    `core.philox`), and the temperature, 0 for a greedy one."""

    seed: int = 0
    sample_index: int = 0
    temperature: float = 0.0


GREEDY_DRAW = TokenDraw()


class Drafter(Protocol):
    """Guesses the next tokens of sequences; one object serves all of them, told apart by slot.

    ``num_candidates``: how many likely tokens it wants to `see` in the place of each new one.
    ``wants_drawn``: whether it wants to `see_drawn` what follows drafts that were rejected, too.
    """

    num_candidates: int = 0
    wants_drawn: bool = False

    def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        namespace: str | None = None,
        *,
        tenant: str = "",
        draw: TokenDraw = GREEDY_DRAW,
    ) -> None:
        """A sequence of a tenant, with these known tokens, begins; ``draw`` is how it goes on.

        What it says may serve as drafts of others in its ``namespace``; ``None`` keeps it alone.
        """

    def expect(self, slot: int, token_ids: Sequence[int]) -> None:
        """The caller expects these tokens in the output; the last of its prompt come before them.

        Called after `start`; a drafter that makes nothing of it leaves it alone.
        """
        return

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """The sequence went on with these tokens (accepted ones, not proposals)."""

    def see(self, slot: int, candidates: Sequence[TokenLogprobs]) -> None:
        """What was likely in the places of the tokens that `extend` is about to tell."""
        return

    def see_drawn(self, slot: int, draft: Draft, drawn: Sequence[int]) -> None:
        """What the target drew after the last known token, and then after each token of the slot's
        last proposal, accepted or not; −1 stands for none.

        Called before `extend` tells of what was accepted.
        """
        return

    def propose(self, slot: int, max_tokens: int) -> Draft:
        """Guess up to ``max_tokens`` next tokens; an empty draft is always allowed."""

    def finish(self, slot: int) -> None:
        """Forget the sequence."""

    def delete_tenant(self, tenant: str) -> None:
        """Forget what a tenant's sequences said until now, but for their own drafts."""
        return

    def begin_step(self, lengths: Mapping[int, int]) -> None:
        """A step is about to be planned; the known tokens of each slot that may draft in it."""
        return

    def verified(self, slot: int, draft: Draft, accepted: Sequence[int]) -> None:
        """The slot's last proposal was verified, and these of its tokens, by index, accepted.

        Those that a grammar cut off count as verified; a draft model's are in the draft by number.
        """
        return

    def forced(self, slot: int, num_tokens: int) -> None:
        """A grammar forced so many tokens, which were verified like a draft."""
        return

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long, with or without drafts."""
        return

    def rest_steps(self) -> int:
        """For how many steps after the one that begins it need not be asked: it drafts nothing.

        It is still told of tokens.
        """
        return 0

    def choices(self) -> DraftChoices | None:
        """What a drafter has chosen that chooses how much is drafted."""
        return None


class Constraint(Protocol):
    """What the output of one sequence may be; follows its tokens."""

    def advance(self, token_ids: Sequence[int]) -> None:
        """The output went on with these tokens."""

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        """Next tokens that the grammar leaves no other text for; may be empty."""

    def valid(self, token_ids: Sequence[int], parents: Sequence[int] = ()) -> tuple[int, ...]:
        """Which of these next tokens, by index, the grammar accepts after those before them.

        ``parents`` as in `Draft`; without them each follows the one before.
        """

    def masks(self, drafts: Sequence[int], parents: Sequence[int] = ()) -> npt.NDArray[np.uint32]:
        """Allowed tokens now and after each of ``drafts``, ``[1 + len(drafts), words]``.

        Rows after a draft that is not allowed are never read. See `StepHandle.set_masks`.
        """

    @property
    def is_complete(self) -> bool:
        """Whether the output is whole and nothing can follow."""


Grammar = Callable[[], Constraint]  # makes constraints in their first state, at once


class ConstraintFactory(Protocol):
    """Compiles grammars. Safe to use from several threads."""

    def prepare(self, wanted: StructuredOutputs, tenant: str = "") -> Grammar:
        """Compile what a request of a tenant asks for, before it is queued; may take a second.

        Raises:
            InvalidRequestError: it is not a grammar, or too large a one.
        """

    def is_prepared(self, wanted: StructuredOutputs, tenant: str = "") -> bool:
        """Whether `prepare` takes no time."""

    def delete_tenant(self, tenant: str) -> None:
        """Forget what was compiled for a tenant."""
