"""What the prefix cache can tell of itself: why a prompt missed, and what blocks are used for."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MissReport:
    """How far a prompt is cached, and where it leaves the nearest prefix that is.

    ``num_cached`` tokens can be reused (whole blocks). The first ``num_matching`` tokens are those
    of the cached prefix that the prompt goes along with furthest. There it has ``token_id`` where
    the cached prefix has ``cached_token_id``; both are ``None`` if there is nothing to compare: the
    prompt ends, or the cache does. ``num_evicted`` of the matching tokens have lost their KV.
    """

    num_cached: int
    num_matching: int
    token_id: int | None
    cached_token_id: int | None
    num_evicted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVUsage:
    """Blocks of one KV group's pool.

    ``num_held`` are in use, ``num_idle`` cached and in nobody's use, ``num_free`` empty. Those in
    use have room for ``num_slots`` tokens, and hold the KV of ``num_tokens``; a block that several
    sequences share counts once.
    """

    num_held: int
    num_idle: int
    num_free: int
    num_tokens: int
    num_slots: int

    @property
    def waste(self) -> float:
        """Share of the held room that no token uses (Kwon et al. 2023, figure 2)."""
        return 1 - self.num_tokens / self.num_slots if self.num_slots else 0.0
