"""KV tiers as the configuration wants them, and the name of what KV is interchangeable."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from ridgeline.core.config import EngineConfig
from ridgeline.core.doors import read_address
from ridgeline.core.encryption import Encryption, read_key
from ridgeline.core.protocols import Executor
from ridgeline.core.settings.kv import REDIS_PASSWORD, SHARED_TIERS
from ridgeline.core.spec import ModelSpec
from ridgeline.kvcache import PrefixCache
from ridgeline.kvcache.tiers import (
    ComingEntries,
    DiskTier,
    PeerServer,
    PeerTier,
    RamTier,
    RedisTier,
    Tier,
    Transfers,
)
from ridgeline.roofline.storage import cache_folder
from ridgeline.weights.digest import content_digest

_KNOWN_DIGESTS = "weights.json"


def make_transfers(
    config: EngineConfig, executor: Executor, digest: str
) -> Callable[[PrefixCache], Transfers] | None:
    """What `Scheduler` takes as ``transfers``; ``None`` without tiers. ``digest``: `kv_digest`.

    Raises:
        DiskError: the disk tier's folder cannot be used.
        MissingDependencyError: a package that a tier needs is not installed.
        NetworkError: nothing can listen at ``kv_peer_address``.
        SettingsError: a key, an address or the Redis server cannot be used.
    """
    encryption = Encryption.from_file(config.encryption_key_file)
    ram = RamTier(config.kv_ram_tier_bytes, ttl_s=config.kv_ttl_s)
    coming = ComingEntries()
    tiers: list[Tier] = [ram] if config.kv_ram_tier_bytes else []
    if config.kv_disk_tier_path is not None:
        folder = Path(config.kv_disk_tier_path)
        tiers.append(
            DiskTier(
                folder, config.kv_disk_tier_bytes, ttl_s=config.kv_ttl_s, encryption=encryption
            )
        )
    first_of_servers = len(tiers)
    if config.kv_redis_url is not None:
        tiers.append(
            RedisTier(
                config.kv_redis_url,
                namespace=digest,
                password=os.environ.get(REDIS_PASSWORD),
                ttl_s=config.kv_ttl_s,
                encryption=encryption,
            )
        )
    if config.kv_peer_key_file is not None:  # made last, since it listens: others may fail
        tiers.insert(first_of_servers, _peer_tier(config, ram, coming, digest, encryption))
    if not tiers:
        return None
    return lambda cache: Transfers(cache, tiers, executor, coming=coming)


def _peer_tier(
    config: EngineConfig, ram: RamTier, coming: ComingEntries, digest: str, encryption: Encryption
) -> PeerTier:
    assert config.kv_peer_key_file is not None
    key = read_key(Path(config.kv_peer_key_file))
    addresses = [read_address(each) for each in config.kv_peers]
    server = None
    if config.kv_peer_address is not None:
        own = read_address(config.kv_peer_address)
        server = PeerServer(own, ram, key=key, digest=digest, encryption=encryption, coming=coming)
    return PeerTier(addresses, key=key, digest=digest, encryption=encryption, server=server)


def kv_digest(
    config: EngineConfig, executor: Executor, *, spec: ModelSpec, dtype: str, folder: Path | None
) -> str:
    """Names all that KV depends on beside prompt, adapter slot and salt.

    Within one engine that is the layout. With tiers that other engines read, it is also
    the weights and the adapters (all bytes of their files), the spec, the name of a drafter whose
    KV is beside it, and what computes with them in which formats: the executor, its kernels and
    dtype, and the quantization on load.

    Raises:
        DiskError: the weights cannot be read again.
    """
    layout = executor.kv_layout().digest
    folder_of_tier = config.kv_disk_tier_path
    if not any(getattr(config, name) for name in SHARED_TIERS):
        return layout
    paths = [] if folder is None or config.load_format == "dummy" else [folder]
    paths += map(Path, config.adapters.values())
    memory = cache_folder() if folder_of_tier is None else Path(folder_of_tier)
    weights = content_digest(paths, memory=memory / _KNOWN_DIGESTS)
    random_weights = (config.load_format, config.seed if config.load_format == "dummy" else 0)
    computed = (executor.name, executor.kernels, dtype, config.quantization)
    drafter = (config.draft_model, config.draft_quantization) if spec.draft_head else None
    parts = (layout, weights, random_weights, spec, drafter, *computed)
    return hashlib.sha256("\0".join(map(repr, parts)).encode()).hexdigest()
