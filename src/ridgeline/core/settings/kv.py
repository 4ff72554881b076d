"""Settings of the KV cache: its pool, what is kept of it for later, and where."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlsplit

from ridgeline.core.errors import SettingsError
from ridgeline.core.kv_formats import kv_dtype_name
from ridgeline.core.settings.bounds import Count, Meta, NumBytes, Seconds
from ridgeline.core.settings.reading import Needs, Reads, Secret, Tries

STATE_CHECKPOINT_TOKENS = 4096

_PREFIXES = Needs("enable_prefix_caching", lambda config: config.enable_prefix_caching)
_REUSE = Needs("reuse_kv", lambda config: config.reuse_kv)
_FOLDER = Needs("kv_disk_tier_path", lambda config: config.kv_disk_tier_path is not None)
# What entries go through that others may see.
SHARED_TIERS = ("kv_disk_tier_path", "kv_redis_url", "kv_peers", "kv_peer_address")
_LASTING = Needs(
    f"{', '.join(SHARED_TIERS[:-1])} or {SHARED_TIERS[-1]}",
    lambda config: any(getattr(config, name) for name in SHARED_TIERS),
)
_PEERS = Needs(
    "kv_peers or kv_peer_address", lambda config: bool(config.kv_peers or config.kv_peer_address)
)
_PEER_KEY = Needs("kv_peer_key_file", lambda config: config.kv_peer_key_file is not None)
_RAM = Needs("kv_ram_tier_bytes", lambda config: config.kv_ram_tier_bytes > 0)
REDIS_PASSWORD = "RIDGELINE_REDIS_PASSWORD"


def _url_without_password(name: str, value: str | None) -> str | None:
    """Settings are shown; so the password must not be one."""
    has_password = False
    if value is not None:
        with suppress(ValueError):
            has_password = urlsplit(value).password is not None or "password=" in value
    if has_password:
        raise SettingsError(f"{name} is shown: give the password in {REDIS_PASSWORD} instead.")
    return value


def _kv_format(_name: str, value: str) -> str:
    return kv_dtype_name(value)


@dataclass(frozen=True, kw_only=True)
class KVSettings:
    """What is kept of K and V, and where.

    Attributes:
        kv_cache_dtype: float32, float16, bfloat16, int8, fp8, int4 (not on a GPU), or auto for the
            weights' own.
        kv_cache_memory_bytes: size of the KV pool.
        block_tokens: tokens in one KV block.
        state_checkpoint_tokens: of models that keep states, such as those with short convolutions,
            one is kept for reuse every so many tokens, beside those at the ends of prompts and
            outputs.
        enable_prefix_caching: reuse the KV of prefixes that were computed before.
        reuse_kv: off, for comparison only, each token computes K and V of its whole context again,
            and no prefix is cached.
        enable_segment_reuse: requests may take over the KV of documents that stand anywhere in
            their prompts (segments); checked on load with the model.
        kv_ttl_s: cached KV that was not used for these seconds is forgotten, in every tier.
        kv_ram_tier_bytes: keep KV that the pool has no room for in this much of the memory.
        kv_disk_tier_path: keep it in this folder as well, where it survives a restart.
        kv_disk_tier_bytes: the most that the folder may hold.
        kv_redis_url: keep it in this server of the Redis protocol as well (redis://, rediss:// for
            TLS, unix://), which engines of one model share; its password comes from the environment
            variable RIDGELINE_REDIS_PASSWORD.
        kv_peers: read KV that the engines at these addresses (HOST:PORT) have computed, and give
            out; this engine's own may be among them.
        kv_peer_address: HOST:PORT at which this engine gives out what it has in kv_ram_tier_bytes.
        kv_peer_key_file: file of the key (32 bytes, or 64 hexadecimal digits, its owner's alone)
            that engines have which read KV of each other.
        encryption_key_file: file of a key (32 bytes, or 64 hexadecimal digits, its owner's alone)
            with which folder and server keep KV encrypted, peers send it, and a server's data
            folder is kept as well.
    """

    kv_cache_dtype: Annotated[str, Reads(_kv_format), Tries(values=("int8", "fp8"))] = "auto"
    kv_cache_memory_bytes: NumBytes | None = None
    block_tokens: Count = 16
    state_checkpoint_tokens: Count = STATE_CHECKPOINT_TOKENS
    enable_prefix_caching: Annotated[bool, Tries(values=(False,))] = True
    reuse_kv: bool = True
    enable_segment_reuse: Annotated[bool, _PREFIXES, _REUSE] = False
    kv_ttl_s: Seconds | None = None
    kv_ram_tier_bytes: Annotated[int, Meta(ge=0, le=2**62), _PREFIXES, _REUSE] = 0
    kv_disk_tier_path: Annotated[str | None, _PREFIXES, _REUSE] = None
    kv_disk_tier_bytes: Annotated[NumBytes, _FOLDER] = 10 * 2**30
    kv_redis_url: Annotated[
        str | None, Secret(), Reads(_url_without_password), _PREFIXES, _REUSE
    ] = None
    kv_peers: Annotated[tuple[str, ...], _PREFIXES, _REUSE, _PEER_KEY] = ()
    kv_peer_address: Annotated[str | None, _RAM, _PEER_KEY] = None
    kv_peer_key_file: Annotated[str | None, _PEERS] = None
    encryption_key_file: Annotated[str | None, _LASTING] = None
