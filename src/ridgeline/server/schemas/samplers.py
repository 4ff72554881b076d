"""Samplers of llama.cpp that are not here, and its fields without effect."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Off = Annotated[float, Meta(ge=0.0, le=0.0)]
One = Annotated[float, Meta(ge=1.0, le=1.0)]


class LlamaCppSamplers(Struct, forbid_unknown_fields=True, kw_only=True):
    """What its front ends send with each request.

    What would change the draw may only be off: ``typical_p`` (``typ_p``), ``tfs_z``, ``mirostat``,
    ``dry_multiplier``, ``xtc_probability``, ``dynatemp_range``, ``top_n_sigma``. Inert: the
    parameters of what is off, ``n_keep``, ``n_discard``, ``id_slot``, ``cache_prompt``
    (prefixes are always cached), ``repeat_last_n`` (all of the text counts), ``samplers`` and
    ``min_keep`` (the order is ours), ``timings_per_token``, ``return_progress`` and
    ``post_sampling_probs``.
    """

    typical_p: One | None = None
    typ_p: One | None = None
    tfs_z: One | None = None
    mirostat: Literal[0] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    dry_multiplier: Off | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: Off | None = None
    xtc_threshold: float | None = None
    dynatemp_range: Off | None = None
    dynatemp_exponent: float | None = None
    top_n_sigma: Annotated[float, Meta(le=0.0)] | None = None
    n_keep: int | None = None
    n_discard: int | None = None
    id_slot: int | None = None
    cache_prompt: bool | None = None
    repeat_last_n: int | None = None
    samplers: str | list[str] | None = None
    min_keep: int | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    post_sampling_probs: bool | None = None
