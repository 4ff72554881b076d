"""``ridgeline serve``: an OpenAI- and Anthropic-compatible server of one model or several."""

import argparse
import webbrowser
from contextlib import ExitStack
from typing import TYPE_CHECKING, get_args

from ridgeline.cli.display import error_console, loading_bar
from ridgeline.cli.options import (
    Parser,
    add_model_options,
    add_settings,
    engine_settings,
    given_settings,
    num_bytes,
)
from ridgeline.core.config import EngineConfig, with_overrides
from ridgeline.core.durations import parse_seconds
from ridgeline.core.errors import SettingsError
from ridgeline.core.settings.kv import SHARED_TIERS
from ridgeline.fleet.policies import PolicyName
from ridgeline.server.config import ServerConfig

if TYPE_CHECKING:
    from ridgeline.server.pool.pool import PoolPlan

_MOST_REPLICAS = 64


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    add_settings(parser, ServerConfig, title="server")
    parser.add_argument(
        "models", nargs="*", metavar="NAME=MODEL", help="more; NAME= may be left out"
    )
    group = parser.add_argument_group("several models")
    group.add_argument(
        "--memory",
        type=num_bytes,
        metavar="SIZE",
        help="of all models together; they are loaded as they are asked for",
    )
    group.add_argument(
        "--model-ttl", type=_seconds, metavar="TIME", help="let go of one that idles, as in 10m"
    )
    group.add_argument(
        "--model-wait",
        type=_seconds,
        metavar="TIME",
        help="that a request waits for its model at the most; default 5m",
    )
    parser.add_argument(
        "-dp",
        "--data-parallel-size",
        "--replicas",
        dest="replicas",
        type=_replicas,
        default=1,
        metavar="N",
        help="engines on this machine behind one port, each with its part of the processors",
    )
    for name, which in (("min", "fewest"), ("max", "most")):
        parser.add_argument(
            f"--{name}-replicas",
            type=_replicas,
            metavar="N",
            help=f"{which} engines, of which there are as many as keep --slo",
        )
    parser.add_argument(
        "--policy",
        default="least-seconds",
        choices=get_args(PolicyName),
        help="how the router of --replicas chooses an engine; default: by predicted seconds",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(run=run, router_settings={})


def _replicas(text: str) -> int:
    if not (text.isdigit() and 1 <= int(text) <= _MOST_REPLICAS):
        raise argparse.ArgumentTypeError(f"expected 1 to {_MOST_REPLICAS}")
    return int(text)


def _counts(arguments: argparse.Namespace, config: ServerConfig) -> tuple[int, int | None]:
    """Replicas at the start, and the most there may be if the load decides."""
    fewest, most = arguments.min_replicas, arguments.max_replicas
    if most is None:
        if fewest is not None:
            raise SettingsError("--min-replicas needs --max-replicas.")
        return arguments.replicas, None
    if arguments.replicas > 1:
        raise SettingsError("--replicas is a number that stays; give it or --max-replicas.")
    if (fewest := fewest or 1) > most:
        raise SettingsError("--min-replicas must not exceed --max-replicas.")
    if config.slo is None:
        raise SettingsError(
            "--max-replicas needs --slo, the limits for which there are to be enough replicas."
        )
    return fewest, most


def run(arguments: argparse.Namespace) -> int:
    """Load and serve until SIGTERM or Ctrl-C."""
    from ridgeline.server.serving import serve  # torch takes a second: not for --help

    config = ServerConfig(**given_settings(arguments, ServerConfig))
    # By priority, so that batch jobs run in what online requests leave; tenants share.
    settings = {"scheduling_policy": "priority"} | engine_settings(arguments)
    if settings.keys().isdisjoint(SHARED_TIERS):
        settings.pop("encryption_key_file", None)  # it is the data folder's then
    engine_config = with_overrides(EngineConfig(model=arguments.model), **settings)
    opens = webbrowser.open if arguments.open else None
    pool = _pool(arguments, engine_config, config)
    count, most = _counts(arguments, config)
    if count > 1 or most is not None or arguments.router_settings:
        if pool is not None:
            raise SettingsError("--replicas are of one model, and do not go with --memory.")
        from ridgeline.fleet.replicas import serve_replicas

        line = error_console.print
        serve_replicas(
            engine_config,
            config,
            count,
            max_count=most,
            router={"policy": arguments.policy} | arguments.router_settings,
            announce=line,
            on_listening=opens,
        )
        return 0
    with ExitStack() as loading:
        progress = loading.enter_context(loading_bar())

        def announce(line: str) -> None:
            loading.close()  # the first line says that the model is loaded
            error_console.print(line, markup=False)

        serve(
            engine_config,
            config,
            pool=pool,
            progress=progress,
            announce=announce,
            on_listening=opens,
        )
    return 0


def _pool(
    arguments: argparse.Namespace, engine_config: EngineConfig, config: ServerConfig
) -> "PoolPlan | None":
    """Several models, or one with a budget or a time to live; ``None`` for one that stays."""
    limits = (arguments.memory, arguments.model_ttl, arguments.model_wait)
    if not arguments.models and all(limit is None for limit in limits):
        return None
    from ridgeline.server.pool.plan import pool_plan
    from ridgeline.weights import EMBEDDED

    return pool_plan(
        engine_config,
        [arguments.model or EMBEDDED, *arguments.models],
        config,
        memory_bytes=arguments.memory,
        ttl_s=arguments.model_ttl,
        wait_s=arguments.model_wait,
    )


def _seconds(text: str) -> float:
    try:
        return parse_seconds(text)
    except ValueError:
        raise argparse.ArgumentTypeError("expected a time, such as 90s, 10m or 1h30m") from None
