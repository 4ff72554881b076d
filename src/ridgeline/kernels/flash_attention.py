"""Attention by an installed FlashAttention package, over the paged KV cache as it lies.

Version 2 (``flash_attn``) and version 3 (``flash_attn_interface``, for Hopper) read caches
``[N, B, K, d]`` of any strides; ours, ``[N, K, B, d]``, are that with two axes exchanged. Lengths
and block tables stay on the device, so that a decode step can be recorded.

Shapes: T rows of queries, S sequences, H heads, K KV heads, d their width, N blocks of B tokens, P
entries of a block table.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch.nn import functional

_ARGUMENTS = ("cache_seqlens", "softmax_scale", "causal", "window_size", "softcap")
_PROMPT_ARGUMENTS = ("cu_seqlens_q", "max_seqlen_q")
_VARLEN_ARGUMENTS = (
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal",
    "window_size", "softcap", "block_table",
)  # fmt: skip
_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Where the KV of some sequences lies: int32 tables ``[S, P]`` and lengths ``[S]``, those of
    this pass included, on the device."""

    tables_SP: torch.Tensor
    lengths_S: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Masking:
    """What is seen and how scores are made; ``window`` counts the token itself."""

    scale: float
    window: int | None = None
    softcap: float | None = None

    def arguments(self) -> Mapping[str, object]:
        """In the package's terms, in which a window is the tokens before one's own."""
        return {
            "softmax_scale": self.scale,
            "causal": True,
            "window_size": (-1, -1) if self.window is None else (self.window - 1, 0),
            "softcap": self.softcap or 0.0,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashAttention:
    """The functions of one version, and their limits.

    Attributes:
        name: with the version, for people.
        with_kvcache: `flash_attn_with_kvcache`.
        varlen: `flash_attn_varlen_func` of version 2, for prompts; version 3 has ``None``, whose
            other function takes them.
        page_multiple: what the tokens of a block must be a multiple of.
        most_width: of a head; its elements are a multiple of 8.
        dtypes: of q, K and V.
    """

    name: str
    with_kvcache: Callable[..., torch.Tensor]
    varlen: Callable[..., torch.Tensor] | None = None
    page_multiple: int = 1
    most_width: int = 256
    dtypes: tuple[torch.dtype, ...] = _DTYPES

    def misfit(
        self, *, kv_dtype: torch.dtype, block_tokens: int, head_dim: int, has_sinks: bool
    ) -> str | None:
        """Why it cannot do an op, to follow "it"; ``None`` if it can."""
        if kv_dtype not in self.dtypes:
            taken = " and ".join(_name(dtype) for dtype in self.dtypes)
            return f"reads {taken} KV, and this is {_name(kv_dtype)}"
        if block_tokens % self.page_multiple:
            return (
                f"reads blocks of multiples of {self.page_multiple} tokens, and block_tokens is "
                f"{block_tokens}"
            )
        if head_dim > self.most_width or head_dim % 8:
            return (
                f"has heads of up to {self.most_width} elements, multiples of 8, and these have "
                f"{head_dim}"
            )
        if has_sinks:
            return "has no sinks"
        return None

    def decode(
        self,
        q_SHd: torch.Tensor,
        k_NKBd: torch.Tensor,
        v_NKBd: torch.Tensor,
        sequences: Sequences,
        masking: Masking,
    ) -> torch.Tensor:
        """``[S, H, d]``: the last token of each sequence over its KV. It can be recorded."""
        out_S1Hd = self.with_kvcache(
            q_SHd[:, None],
            k_NKBd.transpose(1, 2),
            v_NKBd.transpose(1, 2),
            cache_seqlens=sequences.lengths_S,
            **{self._table: sequences.tables_SP},
            **masking.arguments(),
        )
        return out_S1Hd[:, 0]

    def prefill(
        self,
        q_THd: torch.Tensor,
        k_NKBd: torch.Tensor,
        v_NKBd: torch.Tensor,
        sequences: Sequences,
        masking: Masking,
        *,
        query_starts_S1: torch.Tensor,
        longest: int,
    ) -> torch.Tensor:
        """``[T, H, d]``: rows ``[query_starts[s], query_starts[s + 1])`` are the last tokens of
        sequence s; none has more than ``longest``. The host waits for nothing."""
        k, v = k_NKBd.transpose(1, 2), v_NKBd.transpose(1, 2)
        if self.varlen is None:
            return self.with_kvcache(
                q_THd,
                k,
                v,
                cache_seqlens=sequences.lengths_S,
                cu_seqlens_q=query_starts_S1,
                max_seqlen_q=longest,
                **{self._table: sequences.tables_SP},
                **masking.arguments(),
            )
        ends_S = sequences.lengths_S.cumsum(0, dtype=torch.int32)
        return self.varlen(
            q_THd,
            k,
            v,
            cu_seqlens_q=query_starts_S1,
            cu_seqlens_k=functional.pad(ends_S, (1, 0)),
            max_seqlen_q=longest,
            max_seqlen_k=sequences.tables_SP.shape[1] * k.shape[1],
            block_table=sequences.tables_SP,
            **masking.arguments(),
        )

    @property
    def _table(self) -> str:
        """What the block tables are called."""
        return "page_table" if self.varlen is None else "block_table"


def installed_flash_attention(capability: tuple[int, int]) -> FlashAttention | str:
    """The latest version that is installed and made for a compute capability, or one sentence on
    why there is none."""
    problems = []
    if capability[0] == 9:
        third = _third()
        if isinstance(third, FlashAttention):
            return third
        problems.append(third)
    second = _second()
    if isinstance(second, FlashAttention):
        return second
    told = [problem for problem in (*problems, second) if problem]
    return told[0] if told else "FlashAttention is not installed (flash-attn)."


def flash_attention_versions() -> str:
    """What is installed, without importing it; for `collect-env`."""
    packages = ("flash_attn_3", "flash_attn")
    found = [each for each in packages if find_spec(each) is not None]
    return ", ".join(f"{each} {_version(each)}" for each in found) or "not installed"


def _third() -> FlashAttention | str:
    """Version 3; an empty reason where it is not installed."""
    for name in ("flash_attn_interface", "flash_attn_3.flash_attn_interface"):
        if find_spec(name.partition(".")[0]) is None:
            continue
        title = f"FlashAttention 3 {_version('flash_attn_3')}"
        try:
            function = import_module(name).flash_attn_with_kvcache
        except ModuleNotFoundError as error:
            if error.name == name:
                continue
            return f"{title} cannot be imported: {error}."
        except Exception as error:  # its own libraries, which may be another PyTorch's
            return f"{title} cannot be imported: {type(error).__name__}: {error}."
        lacking = _lacking(function, ("page_table", *_PROMPT_ARGUMENTS, *_ARGUMENTS))
        if lacking:
            return f"{title} has no {lacking} of flash_attn_with_kvcache."
        return FlashAttention(name=title, with_kvcache=function)
    return ""


def _second() -> FlashAttention | str:
    """Version 2; an empty reason where it is not installed."""
    if find_spec("flash_attn") is None:
        return ""
    title = f"FlashAttention {_version('flash_attn')}"
    try:
        module = import_module("flash_attn")
        functions = module.flash_attn_with_kvcache, module.flash_attn_varlen_func
    except Exception as error:  # its own libraries, which may be another PyTorch's
        return f"{title} cannot be imported: {type(error).__name__}: {error}."
    wanted = ("block_table", *_ARGUMENTS), _VARLEN_ARGUMENTS
    for function, arguments in zip(functions, wanted, strict=True):
        lacking = _lacking(function, arguments)
        if lacking:
            return f"{title} has no {lacking} of {function.__name__}."
    return FlashAttention(
        name=title, with_kvcache=functions[0], varlen=functions[1], page_multiple=256
    )


def _lacking(function: Callable[..., object], arguments: tuple[str, ...]) -> str:
    """The arguments of ours that a version does not have."""
    has = inspect.signature(function).parameters
    return ", ".join(each for each in arguments if each not in has)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
