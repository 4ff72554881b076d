"""What an admin asks of a server."""

from typing import Annotated

from msgspec import Meta, Struct


class ProfileRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """``steps`` plans to record, fewer if they do not run within ``timeout_s``; ``per_layer``: a
    row for each op of each layer."""

    steps: Annotated[int, Meta(ge=1, le=256)] = 16
    timeout_s: Annotated[float, Meta(gt=0, le=600)] = 30.0
    per_layer: bool = False
