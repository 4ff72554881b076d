"""The ops in PyTorch: what a host runs in the place of a GPU, and the first rung of the ladder.

Steps of one token for each segment wait for nothing, so that they can be recorded. Shapes: T
tokens, S segments of one token, C KV slots, H heads, K KV heads, d head width, v that of V.
"""

from collections.abc import Iterable, Sequence

import torch
from torch.nn import functional

from ridgeline.core.rounding import ceil_div
from ridgeline.core.spec import NormScope
from ridgeline.decoding import ancestors
from ridgeline.executors.cuda.inputs import PassInput, RopeRows, Span
from ridgeline.executors.cuda.kernels import AnyActivation, AttendSpec, Draw, Experts, Gain
from ridgeline.executors.cuda.sampling import adjusted, draw
from ridgeline.executors.cuda.slots import Settings
from ridgeline.kernels import reference
from ridgeline.kernels.triton import (
    AdjustmentTables,
    DeviceMatrix,
    Format,
    KVTensors,
    StepRows,
    move_slots,
)
from ridgeline.kernels.triton.kv_cache import QUANTIZED
from ridgeline.kernels.triton.packing import unpack_nibbles


class TorchKernels:
    """See `ridgeline.executors.cuda.kernels.Kernels`."""

    name = "torch"
    decides_on_device = False

    def reserve(self, matrices: Iterable[DeviceMatrix], dtype: torch.dtype) -> None:
        pass

    def begin_step(
        self,
        sources_T: torch.Tensor,
        positions_T: torch.Tensor,
        slots_T: torch.Tensor,
        log_L: torch.Tensor,
        tables_GRM: torch.Tensor,
        *,
        block_tokens: int,
    ) -> StepRows:
        logged = log_L.index_select(0, (-1 - sources_T).clamp(min=0))
        tokens = torch.where(sources_T >= 0, sources_T, logged)
        void = tokens < 0
        positions = torch.where(void, 0, positions_T)
        _, num_slots, longest = tables_GRM.shape
        slots = torch.where(void, num_slots - 1, slots_T)
        blocks = tables_GRM.flatten(1).index_select(1, slots * longest + positions // block_tokens)
        return StepRows(
            token_ids_T=tokens.clamp(min=0),
            positions_T=positions,
            slots_T=slots,
            stops_T=(positions + 1).int(),
            kv_slots_GT=blocks.long() * block_tokens + positions % block_tokens,
        )

    def end_step(
        self,
        sources_B: torch.Tensor,
        positions_B: torch.Tensor,
        number: torch.Tensor,
        rows: StepRows,
        drawn_B: torch.Tensor,
        log_L: torch.Tensor,
        *,
        padding: int,
    ) -> None:
        places = number * len(sources_B) + torch.arange(len(sources_B), device=number.device)
        log_L.index_copy_(0, places, torch.where(rows.slots_T == padding, -1, drawn_B))
        sources_B.copy_(-1 - places)
        positions_B.add_(1)
        number.add_(1)

    def linear(
        self,
        x_TI: torch.Tensor,
        matrix: DeviceMatrix,
        *,
        bias_O: torch.Tensor | None = None,
        activation: AnyActivation | None = None,
        residual_TO: torch.Tensor | None = None,
        residual_scale: float = 1.0,
    ) -> torch.Tensor:
        out = functional.linear(x_TI, unpacked(matrix, x_TI.dtype), bias_O)
        if activation is not None:
            gate, up = out.chunk(2, dim=-1)
            out = self.activate(up, activation, gate)
        if residual_TO is None:
            return out
        return residual_TO + (out if residual_scale == 1.0 else out * residual_scale)

    def normalise(self, x: torch.Tensor, gain: Gain) -> torch.Tensor:
        return reference.normalise(x, gain.weight, gain.spec, bias=gain.bias)

    def activate(
        self, up: torch.Tensor, activation: AnyActivation, gate: torch.Tensor | None
    ) -> torch.Tensor:
        if gate is not None:
            return reference.gated(gate, up, activation)
        assert isinstance(activation, str), "what is clamped has a gate"
        return reference.activate(up, activation)

    def rotate_and_write(
        self,
        q_THd: torch.Tensor,
        k_TKd: torch.Tensor,
        v_TKv: torch.Tensor | None,
        kv: KVTensors,
        slots_T: torch.Tensor,
        *,
        rope: RopeRows | None,
        starts: tuple[int, int] = (0, 0),
        norms: tuple[Gain, Gain] | None = None,
    ) -> torch.Tensor:
        if norms is not None:
            q_THd, k_TKd = (
                reference.normalise_heads(x, _weight(norm), norm.spec, NormScope.EACH_HEAD)
                for x, norm in zip((q_THd, k_TKd), norms, strict=True)
            )
        if rope is not None:
            q_THd, k_TKd = (
                rope.rotate(x, start) for x, start in zip((q_THd, k_TKd), starts, strict=True)
            )
        _store(kv.k, kv.k_scales, slots_T, k_TKd)
        if v_TKv is not None:
            _store(kv.v, kv.v_scales, slots_T, v_TKv)
        return q_THd

    def attend(
        self, q_THd: torch.Tensor, kv: KVTensors, at: PassInput, spec: AttendSpec
    ) -> torch.Tensor:
        table = at.tables[spec.group]
        if at.spans is None or at.short.tokens == len(at.stops_S) == len(q_THd):
            return _attend_each(q_THd, kv, table, at.stops_S, spec)
        parts = [
            _attend_span(q_THd[span.first : span.last], kv, table[index], span, at, spec)
            for index, span in enumerate(at.spans)
        ]
        return torch.cat(parts)

    def experts(self, x_TD: torch.Tensor, logits_TE: torch.Tensor, moe: Experts) -> torch.Tensor:
        """Every token through every expert, which waits for nothing; hosts' models are small."""
        chosen_Tk, weights_Tk = reference.route(
            logits_TE, moe.routing, correction_E=moe.correction_E
        )
        shares_TE = torch.zeros_like(logits_TE).scatter(1, chosen_Tk, weights_Tk)
        both = torch.einsum("td,efd->tef", x_TD, unpacked(moe.gate_up, x_TD.dtype))
        if moe.gate_up_bias is not None:
            both = both + moe.gate_up_bias
        gate, up = both.chunk(2, dim=-1)
        inner = reference.gated(gate, up, moe.activation)
        out = torch.einsum("tef,edf->ted", inner, unpacked(moe.down, x_TD.dtype))
        if moe.down_bias is not None:
            out = out + moe.down_bias
        summed = (reference.wide(out) * shares_TE[..., None]).sum(dim=1)
        return summed.to(x_TD.dtype)

    def adjust(
        self,
        logits_NV: torch.Tensor,
        tables: AdjustmentTables,
        slots_N: torch.Tensor,
        tokens_N: torch.Tensor,
        stops_N: torch.Tensor,
    ) -> torch.Tensor:
        return adjusted(logits_NV, tables, slots_N, tokens_N, stops_N)

    def sample(
        self,
        logits_NV: torch.Tensor,
        settings: Settings,
        slots_N: torch.Tensor,
        positions_N: torch.Tensor,
        *,
        masks_NW: torch.Tensor | None = None,
        how: Draw = Draw.TRUNCATED,
    ) -> torch.Tensor:
        if masks_NW is not None:
            bits = torch.arange(32, device=masks_NW.device)
            allowed = (masks_NW.long()[..., None] >> bits & 1).flatten(1)[:, : logits_NV.shape[1]]
            logits_NV = logits_NV.masked_fill(allowed == 0, float("-inf"))
        of_rows = Settings(
            fractions=settings.fractions.index_select(1, slots_N),
            counts=settings.counts.index_select(1, slots_N),
            seeds=settings.seeds.index_select(0, slots_N),
        )
        return draw(logits_NV, of_rows, positions_N, how)

    def move_slots(
        self, kv: Sequence[KVTensors], sources: torch.Tensor, targets: torch.Tensor
    ) -> None:
        for layer in kv:
            move_slots(layer, sources, targets)


def unpacked(matrix: DeviceMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The values ``[..., O, I]`` of a matrix, computed in at least float32 and rounded once."""
    if matrix.format is Format.PLAIN:
        return matrix.codes.to(dtype)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    codes, columns = matrix.codes, matrix.shape[-1]
    if matrix.format is Format.INT4:
        codes = unpack_nibbles(codes, matrix.unit)
    values = codes.to(work).view(*codes.shape[:-1], -1, matrix.group or columns)
    if matrix.zeros is not None:
        values = values - matrix.zeros.mT[..., None].to(work)
    elif matrix.format is Format.INT4:
        values = values - 8
    assert matrix.scales is not None
    spread = values * matrix.scales.mT[..., None].to(work)
    return spread.flatten(-2).to(dtype)


def _weight(gain: Gain) -> torch.Tensor:
    assert gain.weight is not None
    return gain.weight


def _store(
    pool: torch.Tensor, scales: torch.Tensor | None, slots_T: torch.Tensor, x_TKd: torch.Tensor
) -> None:
    """Write tokens into flat slots of a pool ``[N, K, B, d]``, quantized if it is."""
    block_tokens = pool.shape[2]
    blocks, offsets = slots_T // block_tokens, slots_T % block_tokens
    if scales is None:
        pool[blocks, :, offsets] = x_TKd.to(pool.dtype)
        return
    wide, largest = x_TKd.float(), QUANTIZED[pool.dtype]
    scales_TK = wide.abs().amax(dim=-1) / largest
    codes = wide / torch.where(scales_TK > 0, scales_TK, 1.0)[..., None]
    codes = codes.round() if pool.dtype == torch.int8 else codes
    codes = codes.clamp(-largest, largest).to(pool.dtype)
    pool.view(torch.uint8)[blocks, :, offsets] = codes.view(torch.uint8)
    scales[blocks, :, offsets] = scales_TK


def _load(
    pool: torch.Tensor, scales: torch.Tensor | None, tables_SM: torch.Tensor, kind: torch.dtype
) -> torch.Tensor:
    """What the blocks of some tables hold: ``[S, M·B, K, d]`` of type ``kind``."""
    index = tables_SM.flatten()
    raw = pool.view(torch.uint8) if scales is not None else pool
    found = raw.index_select(0, index)
    if scales is not None:
        found = found.view(pool.dtype).float() * scales.index_select(0, index)[..., None]
    rows, columns = tables_SM.shape
    by_token = found.view(rows, columns, *found.shape[1:]).transpose(2, 3).flatten(1, 2)
    return by_token.to(kind)


def _attend_each(
    q_SHd: torch.Tensor,
    kv: KVTensors,
    tables_SM: torch.Tensor,
    stops_S: torch.Tensor,
    spec: AttendSpec,
) -> torch.Tensor:
    """One token of each segment over a context of its own: ``[S, H, v]``."""
    num, heads, width = q_SHd.shape
    kv_heads, num_slots = kv.k.shape[1], tables_SM.shape[1] * kv.block_tokens
    slots = torch.arange(num_slots, device=stops_S.device)[None]
    seen_SC = slots < stops_S[:, None]
    if spec.window is not None:
        seen_SC = seen_SC & (slots >= stops_S[:, None] - spec.window)
    if spec.softcap is None and spec.sinks_H is None:
        k_SCKd, v_SCKv = (
            _load(pool, scales, tables_SM, q_SHd.dtype).masked_fill(~seen_SC[..., None, None], 0.0)
            for pool, scales in ((kv.k, kv.k_scales), (kv.v, kv.v_scales))
        )
        out = functional.scaled_dot_product_attention(
            q_SHd.view(num, kv_heads, heads // kv_heads, width),
            k_SCKd.transpose(1, 2),
            v_SCKv.transpose(1, 2),
            attn_mask=seen_SC[:, None, None],
            scale=spec.scale,
        )
        return out.reshape(num, heads, -1)
    kind = reference.wide(q_SHd).dtype
    k_SCKd = _load(kv.k, kv.k_scales, tables_SM, kind)
    v_SCKv = _load(kv.v, kv.v_scales, tables_SM, kind)
    q = q_SHd.to(kind).view(num, kv_heads, heads // kv_heads, width)
    scores = reference.softcap(
        torch.einsum("skgd,sckd->skgc", q, k_SCKd) * spec.scale, spec.softcap
    )
    scores = scores.masked_fill(~seen_SC[:, None, None], float("-inf"))
    if spec.sinks_H is not None:
        sinks = reference.wide(spec.sinks_H).view(1, kv_heads, -1, 1).expand(num, -1, -1, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., : k_SCKd.shape[1]]
    # What lies in slots that nobody sees may be anything, and 0 · NaN is NaN.
    v_SCKv = v_SCKv.masked_fill(~seen_SC[..., None, None], 0.0)
    out = torch.einsum("skgc,sckd->skgd", weights, v_SCKv)
    return out.reshape(num, heads, -1).to(q_SHd.dtype)


def _attend_span(
    q_SHd: torch.Tensor,
    kv: KVTensors,
    table_M: torch.Tensor,
    span: Span,
    at: PassInput,
    spec: AttendSpec,
) -> torch.Tensor:
    """A segment's tokens over its KV: ``[S, H, v]``."""
    block_tokens = kv.block_tokens
    low = 0 if spec.window is None else max(0, span.start - spec.window + 1)
    blocks = table_M[None, low // block_tokens : ceil_div(span.stop, block_tokens)]
    skipped = low - low // block_tokens * block_tokens
    kind = reference.wide(q_SHd).dtype
    k_CKd, v_CKv = (
        _load(pool, scales, blocks, kind)[0, skipped : skipped + span.stop - low]
        for pool, scales in ((kv.k, kv.k_scales), (kv.v, kv.v_scales))
    )
    positions = at.positions_T[span.first : span.last]
    keys = torch.arange(low, span.stop, device=positions.device)
    drafted = None
    if span.parents:  # a tree's slots are not in the order of their positions
        keys[span.start - low :] = positions
        drafted = _drafted(span).to(positions.device)
    seen = reference.visible(
        query_positions_S=positions,
        key_positions_C=keys,
        drafted_SD=drafted,
        window=spec.window,
    )
    return reference.attend(
        q_SHd, k_CKd, v_CKv, seen, scale=spec.scale, cap=spec.softcap, sinks_H=spec.sinks_H
    )


def _drafted(span: Span) -> torch.Tensor:
    """Which drafts each token of a segment with a tree sees, bool ``[S, D]``."""
    drafts, tokens = len(span.parents), span.last - span.first
    seen = torch.zeros(tokens, drafts, dtype=torch.bool)
    for node in range(drafts):
        seen[tokens - drafts + node, list(ancestors(span.parents, node))] = True
    return seen
