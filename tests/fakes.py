"""An executor without a model, whose next token depends on every token that it reads through the
block tables: a wrong block, a lost copy or a missed position changes the output."""

import struct
import zlib
from collections import deque
from collections.abc import Sequence

from ridgeline.core.cache_groups import KVGroup
from ridgeline.core.plan import (
    GROWN,
    ModelRole,
    Pass,
    Segment,
    StepPlan,
    check_plan,
    is_reference,
    num_outputs,
    plans_back,
    referenced_output,
)
from ridgeline.core.protocols import KVLayout
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.spec import ModelSpec
from ridgeline.models import describe

VOCAB = 1000
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 4,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def next_token(token_ids: Sequence[int], seed: int = 0, sample_index: int = 0) -> int:
    """What `FakeExecutor` samples after these tokens."""
    text = ",".join(map(str, (*token_ids, seed, sample_index)))
    return zlib.crc32(text.encode()) % VOCAB


def draft_token(token_ids: Sequence[int], seed: int = 0, sample_index: int = 0) -> int:
    """What its draft model proposes: two times in three what the target says."""
    token = next_token(token_ids, seed, sample_index)
    return token if token % 3 else (token + 1) % VOCAB


class _Handle:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def set_masks(self, masks: object) -> None:
        assert not masks, "the fake executor has no masks"

    def abort(self) -> None: ...

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class FakeExecutor:
    name = "fake"

    def __init__(
        self,
        *,
        block_tokens: int = 4,
        windows: Sequence[int | None] = (None,),
        max_in_flight: int = 2,
        has_states: bool = False,
    ) -> None:
        self.has_states = has_states
        self._states: dict[int, tuple[int, ...]] = {}  # block -> the tokens that made the state
        self.block_tokens = block_tokens
        self.max_in_flight = max_in_flight
        self.windows = windows
        self._groups = tuple(
            KVGroup(layers=(0,), num_kv_heads=1, k_width=4, v_width=4, window=window)
            for window in windows
        )
        self._kv: dict[tuple[ModelRole, int, int, int], int] = {}  # (…, group, block, offset)
        self._slots: dict[int, dict] = {}
        # Of the latest plans, that of the plan that runs first; None: not yielded.
        self._outputs: deque[list[int | None]] = deque(maxlen=max_in_flight)
        self.plans: list[StepPlan] = []
        self.may_be_void = False
        self.shorten = lambda num_steps: num_steps  # how far a replay gets

    def spec(self, role: ModelRole = ModelRole.TARGET) -> ModelSpec:
        return describe(CONFIG).spec

    def kv_layout(self, role: ModelRole = ModelRole.TARGET) -> KVLayout:
        sizes = (4 * self.block_tokens,) * len(self._groups)
        return KVLayout(
            block_tokens=self.block_tokens, groups=self._groups, block_bytes=sizes, digest="fake"
        )

    def allocate_kv(self, num_blocks, role: ModelRole = ModelRole.TARGET) -> None: ...

    def export_blocks(self, group, blocks, role: ModelRole = ModelRole.TARGET) -> bytes:
        places = [(block, offset) for block in blocks for offset in range(self.block_tokens)]
        tokens = [self._kv[role, group, block, offset] for block, offset in places]
        return struct.pack(f"<{len(tokens)}I", *tokens)

    def import_blocks(self, group, blocks, data, role: ModelRole = ModelRole.TARGET) -> None:
        tokens = iter(struct.unpack(f"<{len(blocks) * self.block_tokens}I", data))
        for block in blocks:
            for offset in range(self.block_tokens):
                self._kv[role, group, block, offset] = next(tokens)

    def close(self) -> None: ...

    def submit(self, plan: StepPlan) -> _Handle:
        check_plan(plan)
        self.plans.append(plan)
        for slot in plan.releases:
            del self._slots[slot]
        for admission in plan.admissions:
            assert admission.slot not in self._slots, "a slot is admitted twice"
            num_groups = len(self._groups) + self.has_states
            tables = {role: [[] for _ in range(num_groups)] for role in ModelRole}
            self._slots[admission.slot] = {"admission": admission, "tables": tables}
        for copy in plan.copies:
            if copy.group == len(self._groups):
                self._states[copy.target] = self._states[copy.source]
                continue
            for offset in range(self.block_tokens):
                key = (copy.role, copy.group, copy.source, offset)
                if key in self._kv:
                    self._kv[copy.role, copy.group, copy.target, offset] = self._kv[key]
        outputs: list[int | None] = []
        self._outputs.appendleft(outputs)
        passes = tuple(self._run_pass(a_pass, outputs) for a_pass in plan.passes)
        return _Handle(StepResult(step_id=plan.step_id, passes=passes))

    def _run_pass(self, a_pass: Pass, outputs: list[int | None]) -> tuple[SegmentResult, ...]:
        segments = []
        for segment in a_pass.segments:
            tokens = tuple(self._resolve(token) for token in segment.token_ids)
            is_void = None in tokens
            assert not is_void or self.may_be_void, "a segment is void"
            segments.append(None if is_void else segment._replace(token_ids=tokens))
        flat = [row for segment in segments if segment for row in self._write(segment, a_pass)]
        assert len(flat) == len(set(flat)), "two sequences write to one place"
        results = tuple(
            self._read(segment, a_pass) if segment else SegmentResult() for segment in segments
        )
        for segment, result in zip(a_pass.segments, results, strict=True):
            missing = num_outputs(segment, a_pass) - len(result.token_ids)
            outputs += [*result.token_ids, *[None] * missing]
            if a_pass.num_nodes:
                self._slots[segment.slot]["grown"] = result.parents
        return results

    def _resolve(self, token: int) -> int | None:
        if not is_reference(token):
            return token
        return self._outputs[plans_back(token)][referenced_output(token)]

    def _write(self, segment: Segment, a_pass: Pass) -> list[tuple[ModelRole, int, int, int]]:
        tables = self._slots[segment.slot]["tables"][a_pass.role]
        for update in segment.block_updates:
            table = tables[update.group]
            assert update.first <= len(table)
            table[update.first : update.first + len(update.blocks)] = update.blocks
        for reuse in segment.reuses:
            self._reuse(tables, reuse)
        rows = []
        for position, token in enumerate(segment.token_ids, start=segment.start):
            rows += self._store(a_pass.role, tables, position, token)
        if self.has_states and a_pass.role is ModelRole.TARGET:
            self._take_in(segment, tables)
        return rows

    def _take_in(self, segment: Segment, tables) -> None:
        """Let the state take in what lags and is known; drafts are kept for the next segment."""
        known, kept = segment.num_tokens - segment.num_drafts, self._slots[segment.slot]
        lag = kept.get("drafted", ())[: segment.state_lag]
        assert len(lag) == segment.state_lag, "more lags than was drafted"
        for position, token in enumerate(
            (*lag, *segment.token_ids[:known]), start=segment.start - len(lag)
        ):
            self._pass_state(segment, tables, position, token)
        if segment.num_drafts:
            kept["drafted"] = segment.token_ids[known:]

    def _reuse(self, tables, reuse) -> None:
        role = ModelRole.TARGET
        for group, source in enumerate(reuse.blocks):
            for position in range(reuse.start, reuse.stop):
                block, offset = divmod(position - reuse.first, self.block_tokens)
                into, at = divmod(position, self.block_tokens)
                token = self._kv[role, group, source[block], offset]
                self._kv[role, group, tables[group][into], at] = token

    def _pass_state(self, segment: Segment, tables, position: int, token: int) -> None:
        """Let the sequence's state take in a token, which has to be the one that follows."""
        ((block,),) = tables[len(self._groups) :]
        state = self._states[block] if position else ()
        assert len(state) == position, "a state is of other tokens"
        for save in segment.state_saves:
            if save.position == position:
                self._states[save.block] = state
        self._states[block] = (*state, token)

    def _store(self, role, tables, position, token) -> list[tuple[ModelRole, int, int, int]]:
        rows = []
        for group, table in enumerate(tables[: len(self._groups)]):
            block, offset = divmod(position, self.block_tokens)
            rows.append((role, group, table[block], offset))
            self._kv[rows[-1]] = token
        return rows

    def _read(self, segment: Segment, a_pass: Pass) -> SegmentResult:
        if not segment.outputs.sample:
            return SegmentResult()
        state = self._slots[segment.slot]
        admission, tables = state["admission"], state["tables"][a_pass.role]
        drafts = segment.token_ids[segment.num_tokens - segment.num_drafts :]
        parents = segment.parents or range(-1, len(drafts) - 1)
        if GROWN in parents:
            parents = state["grown"]
        known, tokens, accepted = segment.stop - segment.num_drafts, [], []
        is_draft = a_pass.role is ModelRole.DRAFT
        is_replay = is_draft or a_pass.num_steps > 1
        num_steps = min(a_pass.num_steps, self.shorten(a_pass.num_steps))
        draw = draft_token if is_draft else next_token
        if a_pass.num_nodes:
            return self._tree(segment, a_pass, admission, tables)
        while True:
            length = known + len(tokens)
            if tokens and is_replay:
                self._store(a_pass.role, tables, length - 1, tokens[-1])
                if self.has_states and not is_draft:
                    self._pass_state(segment, tables, length - 1, tokens[-1])
            if accepted:  # the KV of the accepted path moves to consecutive positions
                self._move(a_pass.role, tables, known + accepted[-1], length - 1)
            seen = self._seen(a_pass.role, tables, segment.start, length)
            if self.has_states and not is_draft:
                stays = tuple(seen[: known if segment.num_drafts else length])
                assert self._states[tables[-1][0]] == stays, "state and KV disagree"
            tokens.append(draw(seen, admission.seed, admission.sample_index))
            if is_replay:
                if len(tokens) == num_steps:
                    return SegmentResult(token_ids=tuple(tokens))
                continue
            last = accepted[-1] if accepted else -1
            child = next(
                (n for n, p in enumerate(parents) if p == last and drafts[n] == tokens[-1]), None
            )
            if child is None:
                return SegmentResult(token_ids=tuple(tokens), accepted=tuple(accepted))
            accepted.append(child)

    def _tree(self, segment, a_pass, admission, tables) -> SegmentResult:
        """Two tokens in each place of the first path, the likely one last; the KV that it leaves in
        the places of nodes is none's."""
        seen = self._seen(a_pass.role, tables, segment.start, segment.stop)
        tokens, parents, node = [], [], -1
        while len(tokens) < a_pass.num_nodes:
            likely = draft_token(seen, admission.seed, admission.sample_index)
            pair = [(likely + 1) % VOCAB, likely][-(a_pass.num_nodes - len(tokens)) :]
            tokens += pair
            parents += [node] * len(pair)
            node, seen = len(tokens) - 1, [*seen, likely]
        for position in range(segment.stop, segment.stop + a_pass.num_nodes - 1):
            self._store(a_pass.role, tables, position, -1)
        if self.may_be_void and self.shorten(2) == 1:
            return SegmentResult()
        return SegmentResult(token_ids=tuple(tokens), parents=tuple(parents))

    def _move(self, role, tables, source: int, target: int) -> None:
        for group, table in enumerate(tables[: len(self._groups)]):
            (block, offset), (into, at) = (
                divmod(position, self.block_tokens) for position in (source, target)
            )
            self._kv[role, group, table[into], at] = self._kv[role, group, table[block], offset]

    def _seen(self, role, tables, start: int, stop: int) -> list[int]:
        read = []
        for group, table in enumerate(tables[: len(self._groups)]):
            window = self.windows[group]
            low = 0 if window is None else max(0, start - window + 1)
            places = (divmod(position, self.block_tokens) for position in range(low, stop))
            read.append([self._kv[role, group, table[block], offset] for block, offset in places])
        longest = max(read, key=len)
        for tokens in read:
            assert tokens == longest[len(longest) - len(tokens) :], "KV groups disagree"
        return longest if None in self.windows else longest[-max(self.windows) :]
