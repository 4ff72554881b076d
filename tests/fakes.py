"""An executor without a model, whose next token depends on every token that it reads through the
block tables: a wrong block, a lost copy or a missed position changes the output."""

import zlib
from collections.abc import Sequence

from ridgeline.core.plan import ModelRole, StepPlan, check_plan
from ridgeline.core.protocols import KVLayout
from ridgeline.core.result import SegmentResult, StepResult
from ridgeline.core.spec import KVGroup, ModelSpec
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


class _Handle:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def set_masks(self, masks: object) -> None:
        raise AssertionError("the fake executor has no masks")

    def abort(self) -> None: ...

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class FakeExecutor:
    name = "fake"

    def __init__(self, *, block_tokens: int = 4, windows: Sequence[int | None] = (None,)) -> None:
        self.block_tokens = block_tokens
        self.windows = windows
        self._groups = tuple(
            KVGroup(layers=(0,), num_kv_heads=1, k_width=4, v_width=4, window=window)
            for window in windows
        )
        self._kv: dict[tuple[int, int, int], int] = {}  # (group, block, offset) -> token
        self._slots: dict[int, dict] = {}
        self.plans: list[StepPlan] = []

    def spec(self, role: ModelRole = ModelRole.TARGET) -> ModelSpec:
        return describe(CONFIG).spec

    def kv_layout(self, role: ModelRole = ModelRole.TARGET) -> KVLayout:
        sizes = (self.block_tokens,) * len(self._groups)
        return KVLayout(
            block_tokens=self.block_tokens, groups=self._groups, block_bytes=sizes, digest="fake"
        )

    def allocate_kv(self, num_blocks, role: ModelRole = ModelRole.TARGET) -> None: ...

    def export_blocks(self, group, blocks, role: ModelRole = ModelRole.TARGET) -> bytes:
        raise AssertionError("not used")

    def import_blocks(self, group, blocks, data, role: ModelRole = ModelRole.TARGET) -> None:
        raise AssertionError("not used")

    def close(self) -> None: ...

    def submit(self, plan: StepPlan) -> _Handle:
        check_plan(plan)
        self.plans.append(plan)
        for slot in plan.releases:
            del self._slots[slot]
        for admission in plan.admissions:
            assert admission.slot not in self._slots, "a slot is admitted twice"
            tables = [[] for _ in self._groups]
            self._slots[admission.slot] = {"admission": admission, "tables": tables}
        for copy in plan.copies:
            for offset in range(self.block_tokens):
                key = (copy.group, copy.source, offset)
                if key in self._kv:
                    self._kv[copy.group, copy.target, offset] = self._kv[key]
        (a_pass,) = plan.passes
        writes = [self._write(segment) for segment in a_pass.segments]
        flat = [row for rows in writes for row in rows]
        assert len(flat) == len(set(flat)), "two sequences write to one place"
        results = tuple(self._read(segment) for segment in a_pass.segments)
        return _Handle(StepResult(step_id=plan.step_id, passes=(results,)))

    def _write(self, segment) -> list[tuple[int, int, int]]:
        tables = self._slots[segment.slot]["tables"]
        for update in segment.block_updates:
            table = tables[update.group]
            assert update.first <= len(table)
            table[update.first : update.first + len(update.blocks)] = update.blocks
        rows = []
        for position, token in zip(
            range(segment.start, segment.stop), segment.token_ids, strict=True
        ):
            for group, table in enumerate(tables):
                block, offset = divmod(position, self.block_tokens)
                rows.append((group, table[block], offset))
                self._kv[rows[-1]] = token
        return rows

    def _read(self, segment) -> SegmentResult:
        if not segment.outputs.sample:
            return SegmentResult()
        state = self._slots[segment.slot]
        read = []
        for group, table in enumerate(state["tables"]):
            window = self.windows[group]
            low = 0 if window is None else max(0, segment.start - window + 1)
            places = (divmod(position, self.block_tokens) for position in range(low, segment.stop))
            read.append([self._kv[group, table[block], offset] for block, offset in places])
        longest = max(read, key=len)
        for tokens in read:
            assert tokens == longest[len(longest) - len(tokens) :], "KV groups disagree"
        seen = longest if None in self.windows else longest[-max(self.windows) :]
        admission = state["admission"]
        return SegmentResult(token_ids=(next_token(seen, admission.seed, admission.sample_index),))
