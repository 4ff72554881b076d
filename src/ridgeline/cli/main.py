"""Parsing, and the one place where errors become a sentence and an exit code."""

import argparse
import io
import logging
import os
import re
import sys
from collections.abc import Sequence

import ridgeline
from ridgeline.cli.config_file import apply_config_file
from ridgeline.cli.environment import apply_environment
from ridgeline.cli.examples import EXAMPLES
from ridgeline.cli.options import Parser
from ridgeline.cli.other_programs import BENCH_COMMANDS
from ridgeline.core.errors import MissingDependencyError, RidgelineError
from ridgeline.core.garbage import no_collection

# The module that has the options and runs each command (or several, then with the function that
# adds them), and a line of --help, which shows them in these groups.
GROUPS = {
    "run a model": {
        "serve": ("serve", "serve a model over HTTP"),
        "route": ("route", "one address in front of several engines"),
        "fleet": ("fleet", "engines and their router from one file: up, plan, status, verify"),
        "cascade": ("cascade", "when the answer of a small model will do: calibrate"),
        "worker": ("worker", "compute a part of a model that another machine serves"),
        "generate": ("generate", "complete a prompt"),
        "chat": ("chat", "talk to a model"),
        "run": ("chat", "the same as chat"),
        "embed": ("embed", "embeddings of texts, as JSONL"),
        "rerank": ("rerank", "documents by their relevance to a query"),
        "batch": ("batch", "answer a JSONL file of requests"),
    },
    "models on this machine": {
        "pull": ("models:add_pull_options", "download a model"),
        "list": ("models:add_list_options", "models on this machine: bits, size, licence, speed"),
        "show": ("models:add_show_options", "what is known of one of them"),
        "rm": ("models:add_rm_options", "delete downloaded models"),
    },
    "change a model, and compare": {
        "quantize": ("quantize", "make a smaller model that answers almost the same"),
        "prune": ("prune", "make zeros, or take away layers, heads and channels"),
        "distill": ("distill", "train a student on a teacher's answers: heal, shrink, train int3"),
        "train-adapter": (
            "train_adapter",
            "a LoRA adapter, from text or in place of a long prompt",
        ),
        "eval": ("eval", "perplexity of a model, and how far it is from another"),
        "convert": (
            "convert",
            "a model to GGUF or safetensors, or to fewer KV heads, windows, shared KV",
        ),
        "imatrix": ("imatrix", "what a model's matrices see, for better GGUF files"),
    },
    "predict and choose": {
        "plan": ("plan", "predict memory, latency, throughput and cost on any hardware"),
        "rank": ("rank", "models beside each other: fit, speed at a context, concurrency, cost"),
        "memory": ("memory", "bytes of weights, KV cache and activations"),
        "cost": ("cost", "what measured rates cost, in tokens and requests"),
        "hardware": ("catalogue", "list the catalogue's machines, with the source of every figure"),
    },
    "measure and improve": {
        "roofline": ("roofline", "what bounds a model here, and what to try next"),
        "optimize": (
            "optimize",
            "the settings that serve a load best here: predicted, raced, proven",
        ),
        "tune": ("tune", "whether a server's settings still suit what it is asked"),
        "profile": ("profile", "where the seconds of a step go, op by op"),
        "bench": ("bench", "measure prefill and decode; also `bench serve`, `ladder`, …"),
        "bench-serve": ("bench_serve", "measure an engine or a URL under load"),
        "bench-ladder": (
            "bench_ladder",
            "what kernels, formats and speculation give, predicted and measured",
        ),
        "bench-figures": ("bench_figures", "published figures, and what this machine has"),
        "bench-links": ("bench_links", "what exchanges between the processes of one model take"),
        "probe": ("probe", "measure an OpenAI-compatible endpoint"),
        "ceilings": ("ceilings", "measure memory, arithmetic, disk, network and PCIe in 30 s"),
    },
    "this installation": {
        "collect-env": ("collect_env", "describe machine and installation"),
        "completion": ("completion", "print the completion of a shell"),
    },
}
COMMANDS = {name: told for group in GROUPS.values() for name, told in group.items()}
_TITLES = {next(iter(group)): title for title, group in GROUPS.items()}
_BENCHES = ("serve", "ladder", "links", "figures")
_INTERRUPTED = 130
_SERVER_PACKAGES = ("httptools", "multipart", "prometheus_client", "starlette", "uvicorn", "uvloop")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code: 0, 1 (model, machine), 2 (the caller's mistake)."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a locale without UTF-8: "?" for what it lacks
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"] and words[1:2]:
        if words[1] in BENCH_COMMANDS and not os.path.exists(words[1]):
            meant = BENCH_COMMANDS[words[1]]
            build_parser().error(f"there is no command bench {words[1]}: {meant}")
        if words[1] in _BENCHES:
            words[:2] = [f"bench-{words[1]}"]
    parser = build_parser(*words[:1])
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        arguments = _parsed(parser, words)
        code: int = arguments.run(arguments)
        if sys.stdout is not None:
            sys.stdout.flush()
    except RidgelineError as error:
        print(f"error: {parser.in_options(str(error), words)}", file=sys.stderr)
        return error.exit_code
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package != "torch" and package not in _SERVER_PACKAGES:
            raise
        extra = "torch" if package == "torch" else "server"
        from ridgeline.core.extras import install_command

        needed = f"This command needs {package}: {install_command(extra)}."
        print(f"error: {needed}", file=sys.stderr)
        return MissingDependencyError.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away: `ridgeline generate | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # standard output cannot be written: a full disk
        print(f"error: The output cannot be written: {error.strerror}.", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _parsed(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """What the words mean, for which the command's modules are imported."""
    with no_collection():
        arguments = parser.parse_args(words)
        arguments.command_line = words
        apply_environment(arguments)
        apply_config_file(arguments)
        return arguments


def build_parser(word: str = "") -> Parser:
    """The parser of the whole command line, or of the command that is its first word."""
    parser = Parser(prog="ridgeline", description="LLM inference that knows its bound.")
    parser.formatter_class = _Grouped
    parser.add_argument("--version", action="version", version=ridgeline.__version__)
    commands = parser.add_subparsers(
        required=True, title="commands", metavar="COMMAND", parser_class=Parser
    )
    for name in [word] if word in COMMANDS else COMMANDS:
        module, text = COMMANDS[name]
        prog = f"ridgeline {name.replace('bench-', 'bench ')}"
        lines = EXAMPLES.get(name)
        epilog = "\n  ".join(("examples:", *lines)) if lines else None
        commands.add_parser(
            name, prog=prog, help=text, epilog=epilog, module=f"ridgeline.cli.{module}"
        )
    return parser


class _Grouped(argparse.RawDescriptionHelpFormatter):
    """Puts the title of its group before a group's first command."""

    def _format_action(self, action: argparse.Action) -> str:
        title = _TITLES.get(action.dest)
        before = "" if title is None else f"\n  {title}:\n"
        shown = super()._format_action(action)
        return before + re.sub(r"^( +)bench-", r"\1bench ", shown)
