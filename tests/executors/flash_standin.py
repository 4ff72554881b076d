"""The functions of FlashAttention as they are published, in PyTorch, in float64 as well.

What they check of their arguments, and what these mean, is the package's: layouts, types, strides,
masks from the lower right corner. Nothing waits for a device, so that steps can be recorded.
"""

import torch

from ridgeline.kernels.flash_attention import FlashAttention


class Package:
    """Version 2 or 3; ``calls`` are the arguments of each call, by function."""

    def __init__(self, major, *, page_multiple=1, wrong=0.0):
        self.major, self.page_multiple, self.wrong = major, page_multiple, wrong
        self.calls = {"with_kvcache": [], "varlen": []}

    def functions(self, **limits) -> FlashAttention:
        limits = {"dtypes": (torch.float64,), "page_multiple": self.page_multiple} | limits
        if self.major == 3:
            return FlashAttention(
                name="FlashAttention 3 stand-in", with_kvcache=self.with_kvcache_3, **limits
            )
        return FlashAttention(
            name="FlashAttention stand-in",
            with_kvcache=self.with_kvcache_2,
            varlen=self.varlen_2,
            **limits,
        )

    def with_kvcache_2(
        self, q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
    ):  # fmt: skip
        return self._cached(
            q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, causal, window_size,
            softcap,
        )  # fmt: skip

    def with_kvcache_3(
        self, q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
        cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
        cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
        q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
        return_softmax_lse=False,
    ):  # fmt: skip
        if cu_seqlens_q is None:
            return self._cached(
                q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, causal, window_size,
                softcap,
            )  # fmt: skip
        return self._ragged(
            q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, max_seqlen_q,
            softmax_scale, causal, window_size, softcap,
        )  # fmt: skip

    def varlen_2(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
        deterministic=False, return_attn_probs=False, block_table=None,
    ):  # fmt: skip
        assert cu_seqlens_k.dtype == torch.int32
        assert cu_seqlens_k.shape == cu_seqlens_q.shape
        assert max_seqlen_k <= block_table.shape[1] * k.shape[1]
        lengths = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        return self._ragged(
            q, k, v, cu_seqlens_q, lengths, block_table, max_seqlen_q, softmax_scale, causal,
            window_size, softcap,
        )  # fmt: skip

    def _cached(self, q_SQHd, k, v, lengths, table, scale, causal, window, softcap):
        self.calls["with_kvcache"].append(q_SQHd.shape)
        sequences, tokens = q_SQHd.shape[:2]
        row = torch.arange(tokens).repeat(sequences)
        of_row = torch.arange(sequences * tokens) // tokens
        positions = lengths[of_row] - tokens + row
        out = self._rows(
            q_SQHd.flatten(0, 1), k, v, lengths, table, of_row, positions, scale, causal, window,
            softcap,
        )  # fmt: skip
        return out.view(q_SQHd.shape)

    def _ragged(self, q_THd, k, v, starts, lengths, table, longest, scale, causal, window, softcap):
        self.calls["varlen"].append((q_THd.shape, longest))
        assert starts.dtype == torch.int32
        assert starts.is_contiguous()
        assert isinstance(longest, int)
        counts = starts[1:] - starts[:-1]
        rows = torch.arange(len(q_THd))
        of_row = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
        # A tile beyond the longest is never begun; before the first row there is none.
        begun = (rows >= starts[0]) & (rows - starts[of_row] < longest)
        positions = lengths[of_row] - counts[of_row] + rows - starts[of_row]
        out = self._rows(
            q_THd, k, v, lengths, table, of_row, positions, scale, causal, window, softcap
        )
        return out.masked_fill(~begun[:, None, None], float("nan"))

    def _rows(
        self, q_THd, k_NBKd, v_NBKd, lengths, table, of_row, positions, scale, causal, window, cap
    ):
        """Each row at its position of its sequence."""
        page, kv_heads, width = k_NBKd.shape[1:]
        assert page % self.page_multiple == 0, "the block size must be divisible"
        assert v_NBKd.shape == k_NBKd.shape
        assert q_THd.dtype == k_NBKd.dtype == v_NBKd.dtype
        assert width <= 256
        assert width % 8 == 0
        assert q_THd.shape[1] % kv_heads == 0
        assert table.dtype == lengths.dtype == torch.int32
        assert table.shape[0] == len(lengths)
        assert lengths.is_contiguous()
        for tensor in (q_THd, k_NBKd, v_NBKd, table):
            assert tensor.stride(-1) == 1
        pages = table.index_select(0, of_row)
        keys, values = (
            cache.index_select(0, pages.flatten()).view(len(of_row), -1, kv_heads, width)
            for cache in (k_NBKd, v_NBKd)
        )
        slots = torch.arange(keys.shape[1])[None]
        at = positions[:, None]
        seen = slots < lengths[of_row][:, None]
        left, right = window
        if causal:
            right = 0
        if left >= 0:
            seen = seen & (slots >= at - left)
        if right >= 0:
            seen = seen & (slots <= at + right)
        hidden = ~seen[:, :, None, None]
        keys, values = keys.masked_fill(hidden, 0.0), values.masked_fill(hidden, 0.0)
        q = q_THd.view(len(of_row), kv_heads, -1, width)
        scores = torch.einsum("tkgd,tckd->tkgc", q, keys) * scale
        if cap > 0:
            scores = cap * torch.tanh(scores / cap)
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        out = torch.einsum("tkgc,tckd->tkgd", scores.softmax(dim=-1), values)
        return out.reshape(q_THd.shape) * (1.0 + self.wrong)
