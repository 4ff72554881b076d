"""Attention over paged KV against the reference op."""

import pytest
import torch
from tests.kernels.triton.device import DEVICE, assert_near, random

from ridgeline.core.rounding import ceil_div
from ridgeline.decoding import ancestors, depths
from ridgeline.kernels.reference import attend, visible
from ridgeline.kernels.triton import (
    MAX_TREE_DRAFTS,
    AttentionBatch,
    TreeMask,
    Workspace,
    attend_decode,
    attend_prefill,
    attention,
    layer_bytes,
    layer_tensors,
)


def int32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Case:
    """Sequences of (query tokens, KV length), with KV in shuffled blocks."""

    def __init__(
        self,
        sequences,
        *,
        dtype,
        kv_dtype=None,
        heads=4,
        kv_heads=2,
        width=16,
        latent=None,
        page=16,
    ):
        self.sequences, self.dtype, self.page = sequences, dtype, page
        self.heads, self.kv_heads, self.latent = heads, kv_heads, latent
        kv_dtype = kv_dtype or dtype
        blocks = [ceil_div(length, page) for _, length in sequences]
        shape = {
            "num_kv_heads": kv_heads,
            "block_tokens": page,
            "k_width": width,
            "v_width": 0 if latent else width,
        }
        generator = torch.Generator().manual_seed(7)
        order = torch.randperm(sum(blocks) + 3, generator=generator)[: sum(blocks)]
        size = layer_bytes(kv_dtype, **shape)
        # Two layers, of which the second is used; what is not written is not a number.
        pool = torch.full((sum(blocks) + 3, 2, size), 0xFF, dtype=torch.uint8, device=DEVICE)
        self.kv = layer_tensors(pool[:, 1], kv_dtype, latent_dim=latent, **shape)
        # More tables than sequences, in an order of their own; what nobody has leads nowhere.
        self.rows = torch.randperm(len(blocks) + 2, generator=generator)[: len(blocks)]
        tables = torch.full((len(blocks) + 2, max(blocks)), 1 << 20, dtype=torch.int32)
        self.keys, self.values = [], []
        first = 0
        for index, ((_, length), count) in enumerate(zip(sequences, blocks, strict=True)):
            table = tables[self.rows[index]]
            table[:count] = order[first : first + count]
            first += count
            self._fill(table, length, index)
        self.tables = tables.to(DEVICE)
        self.starts = [0]
        for tokens, _ in sequences:
            self.starts.append(self.starts[-1] + tokens)
        self.q = random(self.starts[-1], heads, width, seed=1).to(dtype)

    def _fill(self, table, length, seed):
        kv, page = self.kv, self.page
        slots = torch.arange(length)
        blocks, offsets = table[slots // page].long().to(DEVICE), (slots % page).to(DEVICE)
        parts = [("k", kv.k, kv.k_scales)]
        if not self.latent:
            parts.append(("v", kv.v, kv.v_scales))
        exact = {}
        for name, tensor, scales in parts:
            values = random(length, self.kv_heads, tensor.shape[-1], seed=10 * seed + len(name))
            values = values + (name == "v")
            if scales is None:
                stored = values.to(tensor.dtype)
                tensor[blocks, :, offsets] = stored
                exact[name] = stored
                continue
            largest = 127 if tensor.dtype == torch.int8 else 448
            scale = values.abs().amax(-1) / largest
            codes = (values / scale[..., None]).clamp(-largest, largest)
            codes = (codes.round() if tensor.dtype == torch.int8 else codes).to(tensor.dtype)
            tensor.view(torch.uint8)[blocks, :, offsets] = codes.view(torch.uint8)
            scales[blocks, :, offsets] = scale
            exact[name] = codes.float() * scale[..., None]
        self.keys.append(exact["k"])
        self.values.append(exact["k"][..., : self.latent] if self.latent else exact["v"])

    def batch(self, tree=None):
        return AttentionBatch(
            query_starts_S1=int32(self.starts),
            kv_lengths_S=int32([length for _, length in self.sequences]),
            block_tables_RP=self.tables,
            table_rows_S=self.rows.to(DEVICE),
            num_query_tokens=self.starts[-1],
            tree=tree,
        )

    def expected(self, *, scale, window=None, cap=None, sinks=None, trees=None):
        outputs = []
        for index, (tokens, length) in enumerate(self.sequences):
            positions = torch.arange(length)
            drafted = None
            parents = (trees or {}).get(index)
            if parents:
                first = length - len(parents)
                positions[first:] = torch.tensor(depths(parents)) + first - 1
                drafted = torch.zeros(tokens, len(parents), dtype=torch.bool)
                for node in range(len(parents)):
                    drafted[tokens - len(parents) + node, list(ancestors(parents, node))] = True
            seen = visible(
                query_positions_S=positions[length - tokens :],
                key_positions_C=positions,
                drafted_SD=drafted,
                window=window,
            )
            q = self.q[self.starts[index] : self.starts[index + 1]]
            outputs.append(
                attend(
                    q.float(),
                    self.keys[index].float(),
                    self.values[index].float(),
                    seen.to(DEVICE),
                    scale=scale,
                    cap=cap,
                    sinks_H=sinks,
                )
            )
        return torch.cat(outputs)

    def out(self):
        width = self.latent or self.kv.v.shape[-1]
        return torch.full(
            (self.starts[-1], self.heads, width), float("nan"), dtype=self.dtype, device=DEVICE
        )

    def decode(self, tree=None, sinks=None, **options):
        out, workspace = self.out(), Workspace(DEVICE, num_floats=1 << 20)
        self.stored = workspace.floats.fill_(float("nan"))
        attend_decode(
            self.q,
            self.kv,
            out,
            self.batch(tree),
            max_query_tokens=max(tokens for tokens, _ in self.sequences),
            workspace=workspace,
            sinks_H=sinks,
            **options,
        )
        assert not workspace.counters.any()
        return out

    def parts_stored(self, block_floats):
        """How many parts of sequences the last decode has stored, of ``block_floats`` each."""
        whole = len(self.stored) // block_floats * block_floats
        return int((~self.stored[:whole].view(-1, block_floats)[:, 0].isnan()).sum())

    def prefill(self, tree=None, sinks=None, **options):
        out = self.out()
        attend_prefill(self.q, self.kv, out, self.batch(tree), sinks_H=sinks, **options)
        return out


DECODES = [(1, 1), (1, 170), (1, 33)]
DRAFTED = [(5, 5), (3, 700), (4, 130)]
PREFILLS = [(20, 20), (1, 60), (40, 101), (3, 3)]
OPTIONS = [
    (torch.float32, {}),
    pytest.param(torch.float16, {"window": 5}, marks=pytest.mark.slow),
    (torch.float16, {"window": 40, "softcap": 4.0}),
    (torch.bfloat16, {"sinks": True}),
    (torch.float32, {"window": 32, "sinks": True}),
]
BOTH = ["decode", "prefill"]


def check(case, form, factor=1.0, trees=None, tree=None, **options):
    sinks = random(case.heads, seed=5).to(case.dtype) if options.pop("sinks", False) else None
    found = getattr(case, form)(tree=tree, scale=0.3, sinks=sinks, **options)
    expected = case.expected(
        scale=0.3,
        window=options.get("window"),
        cap=options.get("softcap"),
        sinks=sinks,
        trees=trees,
    )
    assert_near(found, expected, case.dtype, factor)


@pytest.mark.parametrize(("dtype", "options"), OPTIONS, ids=str)
def test_decode(dtype, options):
    check(Case(DECODES, dtype=dtype), "decode", **options)


@pytest.mark.parametrize("options", [{"sinks": True}, {"window": 140}], ids=str)
def test_as_many_splits_as_on_a_gpu(monkeypatch, options):
    """More than a sequence has, for more rows than are merged at once."""
    monkeypatch.setattr(attention, "num_multiprocessors", lambda _: 132)
    check(Case(DRAFTED, dtype=torch.float16, heads=6, kv_heads=1, width=72), "decode", **options)


def test_long_sequences_of_a_large_batch_are_split_by_themselves(monkeypatch):
    """All slots divided by the programs that a device has at once; more sequences than are looked
    at together."""
    monkeypatch.setattr(attention, "num_multiprocessors", lambda _: 4)
    lengths = [1 + index % 3 for index in range(131)]
    lengths[129], lengths[7] = 600, 300
    case = Case([(1, length) for length in lengths], dtype=torch.float32, heads=2, kv_heads=1)
    check(case, "decode")
    # 1,156 slots by 12 programs are 97 each; a part has 128 at the least.
    assert case.parts_stored(block_floats=16 * (16 + 2)) == 3 + 5


@pytest.mark.parametrize("window", [None, 200])
def test_as_many_splits_of_a_sequence_as_are_merged(monkeypatch, window):
    monkeypatch.setattr(attention, "_SPLIT_TOKENS", 32)
    monkeypatch.setattr(attention, "num_multiprocessors", lambda _: 132)
    case = Case([(1, 32 * 70), (2, 9)], dtype=torch.float32, heads=1, kv_heads=1)
    check(case, "decode", window=window)
    assert case.parts_stored(block_floats=16 * (16 + 2)) == (35 if window is None else 7)


@pytest.mark.parametrize(("dtype", "options"), OPTIONS, ids=str)
def test_prefill(dtype, options):
    check(Case(PREFILLS, dtype=dtype), "prefill", **options)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("form", BOTH)
def test_codes_are_expanded(kv_dtype, form):
    check(Case([(1, 40), (2, 290)], dtype=torch.float16, kv_dtype=kv_dtype), form, sinks=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tokens"), [(14, 2, 3), pytest.param(70, 1, 1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("form", BOTH)
def test_groups_of_any_number_of_heads(heads, kv_heads, tokens, form):
    case = Case([(tokens, 40)], dtype=torch.float32, heads=heads, kv_heads=kv_heads)
    check(case, form)


@pytest.mark.parametrize("page", [pytest.param(1, marks=pytest.mark.slow), 128])
@pytest.mark.parametrize("form", BOTH)
def test_blocks_of_any_size(page, form):
    check(Case([(2, 140), (1, 3)], dtype=torch.float32, heads=2, page=page), form, window=100)


@pytest.mark.parametrize("form", BOTH)
def test_heads_of_any_width(form):
    check(Case([(2, 40)], dtype=torch.float32, width=80), form, window=20)


@pytest.mark.parametrize(
    ("kv_dtype", "latent", "length"),
    [(torch.float32, 16, 150), (torch.int8, 16, 40), (torch.float32, 272, 40)],
)
@pytest.mark.parametrize("form", BOTH)
def test_latents(kv_dtype, latent, length, form):
    case = Case(
        [(1, length), (4, 20)], dtype=torch.float32, kv_dtype=kv_dtype, heads=5, kv_heads=1,
        width=latent + 8, latent=latent,
    )  # fmt: skip
    assert case.kv.is_latent
    check(case, form)


def tree_mask(case, trees):
    counts, bits, positions = [], [], []
    for index, (tokens, length) in enumerate(case.sequences):
        parents = trees.get(index, ())
        first = length - len(parents)
        counts.append(len(parents))
        known = tokens - len(parents)
        bits += [0] * known
        bits += [
            sum(1 << each for each in ancestors(parents, node)) for node in range(len(parents))
        ]
        positions += range(length - tokens, first)
        positions += [first + depth - 1 for depth in depths(parents)]
    signed = [each - (1 << 64) if each >> 63 else each for each in bits]
    return TreeMask(
        num_drafts_S=int32(counts),
        ancestors_T=torch.tensor(signed, dtype=torch.int64, device=DEVICE),
        positions_T=int32(positions),
    )


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("form", BOTH)
def test_draft_trees(window, form):
    trees = {0: (-1, -1, 0, 0, 1, 4), 2: (-1, 0, -1)}
    case = Case([(7, 40), (2, 20), (4, 9)], dtype=torch.float32, heads=2, kv_heads=1)
    check(case, form, trees=trees, tree=tree_mask(case, trees), window=window)


@pytest.mark.slow
def test_the_largest_tree():
    trees = {0: tuple(max(-1, node - 3) for node in range(MAX_TREE_DRAFTS))}
    case = Case([(MAX_TREE_DRAFTS + 1, 70)], dtype=torch.float32, heads=1, kv_heads=1)
    check(case, "decode", trees=trees, tree=tree_mask(case, trees))


@pytest.mark.parametrize("form", BOTH)
def test_a_sequence_of_no_length_is_skipped(form):
    case = Case([(1, 20), (1, 30)], dtype=torch.float32)
    expected = getattr(case, form)(scale=0.3)
    case.sequences[1] = (1, 0)
    found = getattr(case, form)(scale=0.3)
    assert torch.equal(found[0], expected[0])
    assert torch.isnan(found[1]).all()


def test_what_does_not_fit_is_refused():
    for change in ("q", "kv"):
        case = Case([(1, 20)], dtype=torch.float32)
        other = Case([(1, 20)], dtype=torch.float16, width=32)
        setattr(case, change, getattr(other, change))
        with pytest.raises(ValueError, match=r"fit|KV"):
            case.decode(scale=1.0)
