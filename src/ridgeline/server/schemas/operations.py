"""What an admin, or a router, asks of a server."""

from typing import Annotated

from msgspec import Meta, Struct

from ridgeline.scheduler.prediction import LinearPredictor, StepCurve


class ProfileRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``steps`` plans to record, fewer if they do not run within ``timeout_s``; ``per_layer``: a
    row for each op of each layer."""

    steps: Annotated[int, Meta(ge=1, le=256)] = 16
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 30.0
    per_layer: bool = False


_Share = Annotated[float, Meta(ge=0)]


class EngineState(Struct, kw_only=True):
    """How a server is, for the routers in front of it.

    ``is_open``: it asks for no keys. ``epoch`` is another one when nothing that was cached is left.
    ``models``: names that it serves. ``max_seqs`` run at once, and ``kv_tokens`` are held.
    Steps take ``curve``, by their tokens, and as `LinearPredictor`. The rest is what it is among
    engines that read KV of each other: its random name there, empty if it gives out none, the bytes
    of KV of a token (0: not known yet), and the names of those that it can read from now, with
    bytes a second (0: nothing came of late). For people who watch are shares: of KV in use, of
    prompts' tokens found in caches, and of the last seconds what `RecentUse` says.
    """

    ready: bool
    reason: str | None
    is_open: bool
    epoch: str
    models: tuple[str, ...]
    max_seqs: Annotated[int, Meta(ge=1)]
    kv_tokens: Annotated[int, Meta(ge=0)]
    pass_s: Annotated[float, Meta(ge=0)]
    token_s: Annotated[float, Meta(ge=0)]
    pair_s: Annotated[float, Meta(ge=0)]
    curve: StepCurve | None = None
    kv_name: str = ""
    kv_token_bytes: Annotated[float, Meta(ge=0)] = 0.0
    kv_sources: dict[str, Annotated[float, Meta(ge=0)]] = {}
    kv_usage: _Share | None = None
    hit_rate: _Share | None = None
    busy: _Share | None = None
    mbu: _Share | None = None

    @property
    def linear(self) -> LinearPredictor:
        return LinearPredictor(pass_s=self.pass_s, token_s=self.token_s, pair_s=self.pair_s)
