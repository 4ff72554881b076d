"""The root of a request's prefix-cache keys: all that its KV depends on beside the tokens."""

import hashlib

from ridgeline.core.rope_spec import DynamicScaling
from ridgeline.core.spec import ModelSpec


def cache_key(
    *, layout_digest: str, spec: ModelSpec, num_prompt_tokens: int, adapter: int, salt: str
) -> bytes:
    """SHA-256 over the KV layout, the adapter, the tenant's salt and, where the rotation of
    positions depends on the prompt's length, that (docs/decisions/0004-dynamic-rope.md)."""
    parts = [layout_digest, str(adapter), salt]
    for rope in {layer.attention.rope for layer in spec.layers if layer.attention}:
        match rope and rope.scaling:
            case DynamicScaling(original_max_position=limit) if num_prompt_tokens > limit:
                parts.append(str(num_prompt_tokens))
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).digest()
