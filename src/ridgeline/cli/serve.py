"""``ridgeline serve``: an OpenAI- and Anthropic-compatible server."""

import argparse
import webbrowser
from contextlib import ExitStack
from typing import get_args

from ridgeline.cli.display import error_console, loading_bar
from ridgeline.cli.options import (
    Parser,
    add_model_options,
    add_settings,
    engine_settings,
    given_settings,
)
from ridgeline.core.config import EngineConfig, with_overrides
from ridgeline.fleet.policies import PolicyName
from ridgeline.server.config import ServerConfig

_MOST_REPLICAS = 64


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    add_model_options(parser)
    add_settings(parser, ServerConfig, title="server")
    parser.add_argument(
        "--replicas",
        type=_replicas,
        default=1,
        metavar="N",
        help="engines on this machine behind one port, each with its part of the processors",
    )
    parser.add_argument(
        "--policy",
        default="price",
        choices=get_args(PolicyName),
        help="how the router of --replicas chooses an engine; default: by predicted seconds",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.set_defaults(run=run)


def _replicas(text: str) -> int:
    if not (text.isdigit() and 1 <= int(text) <= _MOST_REPLICAS):
        raise argparse.ArgumentTypeError(f"expected 1 to {_MOST_REPLICAS}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Load and serve until SIGTERM or Ctrl-C."""
    from ridgeline.server.serving import serve  # torch takes a second: not for --help

    config = ServerConfig(**given_settings(arguments, ServerConfig))
    # By priority, so that batch jobs run in what online requests leave; tenants share.
    settings = {"scheduling_policy": "priority"} | engine_settings(arguments)
    if "kv_disk_tier_path" not in settings:
        settings.pop("encryption_key_file", None)  # it is the data folder's then
    engine_config = with_overrides(EngineConfig(model=arguments.model), **settings)
    opens = webbrowser.open if arguments.open else None
    if arguments.replicas > 1:
        from ridgeline.fleet.replicas import serve_replicas

        line = error_console.print
        serve_replicas(
            engine_config,
            config,
            arguments.replicas,
            policy=arguments.policy,
            announce=line,
            on_listening=opens,
        )
        return 0
    with ExitStack() as loading:
        progress = loading.enter_context(loading_bar())

        def announce(line: str) -> None:
            loading.close()  # the first line says that the model is loaded
            error_console.print(line, markup=False)

        serve(engine_config, config, progress=progress, announce=announce, on_listening=opens)
    return 0
