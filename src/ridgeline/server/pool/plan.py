"""Which models a pool has, by the words of whoever starts a server."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.host import available_memory_bytes
from ridgeline.roofline.memory import USABLE_SHARE
from ridgeline.server.config import ServerConfig
from ridgeline.server.pool.pool import PoolConfig, PoolPlan, ServedModel
from ridgeline.weights import EMBEDDED
from ridgeline.weights.aliases import read_aliases

_OF_ONE = ("draft_model", "adapters", "kv_disk_tier_path", "kv_peers", "kv_peer_address")


def pool_plan(
    settings: EngineConfig,
    words: Sequence[str],
    config: ServerConfig,
    *,
    memory_bytes: int | None = None,
    ttl_s: float | None = None,
    wait_s: float | None = None,
) -> PoolPlan:
    """Models by ``MODEL`` or ``NAME=MODEL``; ``embedded`` is the one that comes with Ridgeline.

    A model also has the aliases that its user gave it. Without ``memory_bytes`` the budget is a
    share of what is available now.

    Raises:
        SettingsError: two models have one name, or a setting is of one model alone.
    """
    for name in _OF_ONE:
        if getattr(settings, name) and len(words) > 1:
            raise SettingsError(f"{name} is of one model, and here are {len(words)}.")
    if config.router_key_file is not None:
        raise SettingsError("router_key_file: routers are for servers of one model that stays.")
    if config.semantic_cache_error is not None:
        raise SettingsError("semantic_cache_error is for servers of one model that stays.")
    given = config.served_model_name
    if given and len(given) != len(words):
        raise SettingsError(
            f"served_model_name must be given once for each of {len(words)} models, in their order."
        )
    models: list[ServedModel] = []
    for number, word in enumerate(words):
        name, model = _split(word)
        own = (given[number],) if given else (name, *_aliases(model, besides=name))
        chosen = None if model == EMBEDDED else model
        models.append(ServedModel(names=own, config=replace(settings, model=chosen)))
    names = [name for model in models for name in model.names]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SettingsError(f"Two models are called {twice[0]}; write NAME=MODEL.")
    defaults = PoolConfig(budget_bytes=memory_bytes or int(available_memory_bytes() * USABLE_SHARE))
    return PoolPlan(
        models=tuple(models),
        config=replace(
            defaults,
            ttl_s=defaults.ttl_s if ttl_s is None else ttl_s,
            wait_s=defaults.wait_s if wait_s is None else wait_s,
        ),
    )


def _split(word: str) -> tuple[str, str]:
    name, equals, model = word.partition("=")
    if equals and name and model and not Path(word).exists():
        return name, model
    return word, word


def _aliases(model: str, *, besides: str) -> list[str]:
    return [alias for alias, name in read_aliases().items() if name == model and alias != besides]
