"""The ops by `ridgeline.kernels.triton`, and by cuBLAS where the batch is large."""

from collections.abc import Hashable, Iterable, Sequence

import torch

from ridgeline.core.errors import MachineError
from ridgeline.executors.cuda.inputs import PassInput, RopeRows
from ridgeline.executors.cuda.kernels import AnyActivation, AttendSpec, Draw, Experts, Gain
from ridgeline.executors.cuda.slots import Settings
from ridgeline.kernels import triton as kernels
from ridgeline.kernels.gpu import has_fp8, missing_for_int4
from ridgeline.kernels.triton import (
    AdjustmentTables,
    DeviceMatrix,
    Format,
    KVTensors,
    StepRows,
)

_MAX_SAMPLED = 256  # rows at once


class TritonKernels:
    """See `ridgeline.executors.cuda.kernels.Kernels`. One stream uses it at a time."""

    name = "triton"
    decides_on_device = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._workspace = kernels.Workspace(device)
        self._sampling = kernels.SampleWorkspace(_MAX_SAMPLED, device)
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self.linear_configs = kernels.LinearConfigs()
        self._multiplies_fp8 = device.type == "cuda" and has_fp8()

    def reserve(self, matrices: Iterable[DeviceMatrix], dtype: torch.dtype) -> None:
        """Room to expand the largest of them, for products of large batches.

        Raises:
            MachineError: there are some that cannot be compiled for the device.
        """
        matrices = tuple(matrices)
        if self._device.type == "cuda" and any(m.format is Format.INT4 for m in matrices):
            reason = missing_for_int4()
            if reason is not None:
                raise MachineError(reason)
        elements = max(
            (m.shape[-1] * m.shape[-2] for m in matrices if m.format is not Format.PLAIN), default=0
        )
        if elements * dtype.itemsize > len(self._scratch):
            size = elements * dtype.itemsize
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self._device)

    def product_class(
        self, num_tokens: int, matrices: Iterable[DeviceMatrix], dtype: torch.dtype
    ) -> Hashable:
        """What the kernels of products with so many tokens are compiled for."""
        x = torch.empty(num_tokens, 0, dtype=dtype, device=self._device)
        plans: list[Hashable] = []
        for matrix in matrices:
            if num_tokens > self._small_batch(matrix, dtype):
                plans.append(None)
                continue
            for gated in (False, True):
                width = matrix.shape[-2] // (2 if gated else 1)
                config = self.linear_configs.found(x, matrix, gated=gated)
                plans.append(kernels.plan_of(x, matrix, width, self._workspace, config))
        return tuple(plans)

    @staticmethod
    def experts_class(num_tokens: int, top_k: int, num_experts: int) -> Hashable:
        """What the kernels of a mixture of experts are compiled for."""
        pairs = num_tokens * top_k
        return kernels.pairs_of_a_block(pairs, num_experts), kernels.pairs_of_a_pass(pairs)

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
        rows = StepRows.empty(len(sources_T), len(tables_GRM), log_L.device)
        kernels.begin_step(
            sources_T, positions_T, slots_T, log_L, tables_GRM, rows, block_tokens=block_tokens
        )
        return rows

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
        kernels.end_step(
            sources_B, positions_B, number, rows.slots_T, drawn_B, log_L, padding=padding
        )

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
        if len(x_TI) > self._small_batch(matrix, x_TI.dtype):
            out = self._large(x_TI, matrix, bias_O)
            if activation is not None:
                gate, up = out.chunk(2, dim=-1)
                out = self.activate(up, activation, gate)
            if residual_TO is None:
                return out
            return residual_TO.add_(out, alpha=residual_scale)
        width = matrix.shape[-2] // (1 if activation is None else 2)
        out = x_TI.new_empty(len(x_TI), width) if residual_TO is None else residual_TO
        call = kernels.LinearCall(
            matrix=matrix,
            bias_O=bias_O,
            activation=activation,
            has_residual=residual_TO is not None,
        )
        kernels.linear(
            x_TI,
            matrix,
            out,
            workspace=self._workspace,
            config=self.linear_configs.get(x_TI, call, self._workspace),
            bias_O=bias_O,
            residual_TO=residual_TO,
            residual_scale=residual_scale,
            activation=activation,
        )
        return out

    def normalise(self, x: torch.Tensor, gain: Gain) -> torch.Tensor:
        out = torch.empty_like(x)
        kernels.normalise(x, out, gain.spec, weight=gain.weight, bias=gain.bias)
        return out

    def activate(
        self, up: torch.Tensor, activation: AnyActivation, gate: torch.Tensor | None
    ) -> torch.Tensor:
        out = up.new_empty(up.shape)
        kernels.activate(up, out, activation, gate_TF=gate)
        return out

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
        query, key = norms or (None, None)
        kernels.rope_and_write(
            q_THd,
            k_TKd,
            v_TKv,
            cos=None if rope is None else rope.cos,
            sin=None if rope is None else rope.sin,
            rows_T=None if rope is None else rope.rows_T,
            kv=kv,
            slots_T=slots_T,
            interleaved=rope is not None and rope.interleaved,
            query_start=starts[0],
            key_start=starts[1],
            query_norm=None if query is None else query.weight,
            key_norm=None if key is None else key.weight,
            norm_spec=None if query is None else query.spec,
        )
        return q_THd

    def attend(
        self, q_THd: torch.Tensor, kv: KVTensors, at: PassInput, spec: AttendSpec
    ) -> torch.Tensor:
        kind = q_THd.dtype
        if kv.k_scales is None and kv.k.dtype != kind:  # KV in another float type
            q_THd = q_THd.to(kv.k.dtype)
        out_THv = q_THd.new_empty(*q_THd.shape[:2], kv.v.shape[-1])
        tree = None
        if at.tree is not None:
            tree = (at.tree.num_drafts_S, at.tree.ancestors_T, at.tree.positions_T)
        segments, tokens, longest = at.short
        total, rest = len(at.stops_S), len(q_THd) - tokens

        def part(first: int, last: int, num_tokens: int) -> kernels.AttentionBatch:
            mask = None
            if tree is not None:
                mask = kernels.TreeMask(
                    num_drafts_S=tree[0][first:last], ancestors_T=tree[1], positions_T=tree[2]
                )
            return kernels.AttentionBatch(
                query_starts_S1=at.query_starts_S1[first : last + 1],
                kv_lengths_S=at.stops_S[first:last],
                block_tables_RP=at.tables.of_slots[spec.group],
                table_rows_S=at.tables.slots_S[first:last],
                num_query_tokens=num_tokens,
                tree=mask,
            )

        if segments:
            kernels.attend_decode(
                q_THd,
                kv,
                out_THv,
                part(0, segments, tokens),
                max_query_tokens=longest,
                workspace=self._workspace,
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
                sinks_H=spec.sinks_H,
            )
        if segments < total:
            kernels.attend_prefill(
                q_THd,
                kv,
                out_THv,
                part(segments, total, rest),
                scale=spec.scale,
                window=spec.window,
                softcap=spec.softcap,
                sinks_H=spec.sinks_H,
            )
        return out_THv.to(kind)

    def experts(self, x_TD: torch.Tensor, logits_TE: torch.Tensor, moe: Experts) -> torch.Tensor:
        tokens, count, top_k = len(x_TD), logits_TE.shape[1], moe.routing.top_k
        pairs = tokens * top_k
        chosen_Tk = torch.empty(tokens, top_k, dtype=torch.int32, device=x_TD.device)
        weights_Tk = torch.empty(tokens, top_k, dtype=torch.float32, device=x_TD.device)
        kernels.route(logits_TE, chosen_Tk, weights_Tk, moe.routing, correction_E=moe.correction_E)
        order = kernels.ExpertOrder(pairs, count, x_TD.device)
        kernels.sort_by_expert(chosen_Tk, order)
        inner = x_TD.new_empty(pairs, moe.down.shape[-1])
        kernels.grouped_linear(
            x_TD,
            moe.gate_up,
            inner,
            order,
            pairs_per_row=top_k,
            bias_EO=moe.gate_up_bias,
            activation=moe.activation,
        )
        results = x_TD.new_empty(pairs, x_TD.shape[1])
        kernels.grouped_linear(
            inner,
            moe.down,
            results,
            order,
            pairs_per_row=1,
            bias_EO=moe.down_bias,
            weights_P=weights_Tk.flatten(),
        )
        out_TD = torch.empty_like(x_TD)
        kernels.combine(results.view(tokens, top_k, -1), out_TD)
        return out_TD

    def adjust(
        self,
        logits_NV: torch.Tensor,
        tables: AdjustmentTables,
        slots_N: torch.Tensor,
        tokens_N: torch.Tensor,
        stops_N: torch.Tensor,
    ) -> torch.Tensor:
        out_NV = torch.empty_like(logits_NV, dtype=torch.float32)
        kernels.count_tokens(tables, slots_N, tokens_N, stops_N)
        kernels.adjust_logits(logits_NV, out_NV, tables, slots_N, stops_N)
        return out_NV

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
        tokens_N = torch.empty(len(logits_NV), dtype=torch.int64, device=logits_NV.device)
        positions_N = positions_N.int()
        for first in range(0, len(tokens_N), _MAX_SAMPLED):
            part = slice(first, first + _MAX_SAMPLED)
            rows = kernels.SamplingRows(
                slots_N=slots_N[part],
                position_N=positions_N[part],
                temperature_R=settings.fractions[0],
                top_p_R=settings.fractions[1],
                min_p_R=settings.fractions[2],
                top_k_R=settings.counts[0],
                sample_index_R=settings.counts[1],
                seed_R=settings.seeds,
            )
            kernels.sample(
                logits_NV[part],
                rows,
                tokens_N[part],
                workspace=self._sampling,
                masks_NW=None if masks_NW is None else masks_NW[part],
                truncate=how is Draw.TRUNCATED,
            )
        return tokens_N

    def move_slots(
        self, kv: Sequence[KVTensors], sources: torch.Tensor, targets: torch.Tensor
    ) -> None:
        for layer in kv:
            kernels.move_slots(layer, sources, targets)

    def _large(
        self, x_TI: torch.Tensor, matrix: DeviceMatrix, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        out_TO = x_TI.new_empty(len(x_TI), matrix.shape[-2])
        if self._multiplies_scaled(matrix, x_TI.dtype):
            codes = torch.empty_like(x_TI, dtype=torch.float8_e4m3fn)
            scales_T = torch.empty(len(x_TI), dtype=torch.float32, device=x_TI.device)
            kernels.quantize_rows(x_TI, codes, scales_T)
            kernels.scaled_matmul(codes, scales_T, matrix, out_TO, bias_O=bias_O)
            return out_TO
        scratch = None
        if matrix.format is not Format.PLAIN:
            scratch = self._scratch.view(x_TI.dtype)
        kernels.matmul(x_TI, matrix, out_TO, scratch=scratch, bias_O=bias_O)
        return out_TO

    def _small_batch(self, matrix: DeviceMatrix, dtype: torch.dtype) -> int:
        """Tokens up to which one kernel reads the weights as they are."""
        if self._multiplies_scaled(matrix, dtype):
            return kernels.SMALL_BATCH
        return kernels.small_batch(matrix, dtype)

    def _multiplies_scaled(self, matrix: DeviceMatrix, dtype: torch.dtype) -> bool:
        return self._multiplies_fp8 and kernels.multiplies_scaled(matrix, dtype)
