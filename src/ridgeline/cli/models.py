"""``ridgeline pull``, ``list``, ``show`` and ``rm``: models as files that a person has."""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ridgeline.cli.display import error_console, loading_bar, output_console, print_columns
from ridgeline.cli.options import Parser
from ridgeline.core.errors import InvalidRequestError, RidgelineError
from ridgeline.core.formats import float_format
from ridgeline.core.host import available_memory_bytes

_CONTEXT = 4096  # tokens whose KV is counted in what "fits here"
_LABELS = {"num_bytes": "size", "needed_bytes": "needs", "fits": "fits here", "tok_s": "tok/s"}


def add_pull_options(parser: Parser) -> None:
    """Add the options of ``pull``."""
    parser.add_argument(
        "model", metavar="MODEL", help="owner/name, or owner/name:Q4_K_M for one GGUF file"
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit")
    parser.add_argument("--alias", metavar="NAME", help="call it NAME from now on")
    parser.set_defaults(run=pull)


def add_list_options(parser: Parser) -> None:
    """Add the options of ``list``."""
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="of GGUF files")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=list_models)


def add_show_options(parser: Parser) -> None:
    """Add the options of ``show``."""
    parser.add_argument("model", metavar="MODEL", help="one that is here: folder, file or name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=show)


def add_rm_options(parser: Parser) -> None:
    """Add the options of ``rm``."""
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as `ridgeline list` names it")
    parser.set_defaults(run=remove)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalModel:
    """A model on this machine, and what it would need and give here.

    ``bits`` are those of a weight on average, ``needed_bytes`` weights and the KV of one sequence
    of 4,096 tokens. ``tok_s`` is predicted by a stored calibration, low to high; ``None`` without
    one, and for GGUF. ``problem``: why it cannot be run.
    """

    name: str
    path: str
    num_bytes: int
    licence: str | None = None
    family: str | None = None
    parameters: int | None = None
    bits: float | None = None
    context: int | None = None
    needed_bytes: int | None = None
    fits: bool | None = None
    tok_s: tuple[float, float, float] | None = None
    problem: str | None = None
    aliases: tuple[str, ...] = ()


def pull(arguments: argparse.Namespace) -> int:
    """Download a model, what is not here yet of it."""
    from ridgeline.weights import download_model
    from ridgeline.weights.aliases import check_alias, read_aliases, write_alias
    from ridgeline.weights.hub import fetch_card

    if Path(arguments.model).expanduser().exists():
        raise InvalidRequestError(f"{arguments.model} is on this machine already.")
    if arguments.alias is not None:
        check_alias(arguments.alias)
    name: str = read_aliases().get(arguments.model, arguments.model)
    with loading_bar() as progress:
        path = download_model(name, revision=arguments.revision, progress=progress)
        fetch_card(name.partition(":")[0], arguments.revision)
    if arguments.alias is not None:
        write_alias(arguments.alias, name)
    found = next((each for each in local_models([]) if _is_same(each.name, name)), None)
    if found is None:
        error_console.print(f"{name} is in {path}.", markup=False)
        return 0
    _print_table([found])
    shown = arguments.alias or arguments.model
    error_console.print(f"ridgeline chat {shown}", style="dim", markup=False)
    return 0


def _is_same(one: str, other: str) -> bool:
    return one.casefold() == other.casefold()  # as quantizations are read


def list_models(arguments: argparse.Namespace) -> int:
    """Print what was downloaded, and the GGUF files of the folders."""
    found = local_models(arguments.folders)
    if arguments.json:
        print(json.dumps({"models": [asdict(model) for model in found]}))
    elif found:
        _print_table(found)
    else:
        error_console.print("Nothing was downloaded yet: ridgeline pull Qwen/Qwen3-0.6B")
    return 0


def show(arguments: argparse.Namespace) -> int:
    """Print all that is known of one model without loading it."""
    from ridgeline.weights import locate_model
    from ridgeline.weights.aliases import read_aliases

    name: str = arguments.model
    wanted = read_aliases().get(name, name)
    found = next((each for each in local_models([]) if _is_same(each.name, wanted)), None)
    if found is None:
        path = locate_model(name, offline=True)
        found = describe_local(name, path, _size(path), None)
    facts = {key: value for key, value in asdict(found).items() if value not in (None, ())}
    if arguments.json:
        print(json.dumps(facts))
        return 0
    console = output_console()
    for key, value in facts.items():
        label = _LABELS.get(key, key)
        console.print(f"{label:10} {_shown(key, value)}", markup=False, soft_wrap=True)
    return 0


def remove(arguments: argparse.Namespace) -> int:
    """Delete models of the hub's cache."""
    from ridgeline.weights.downloaded import remove_downloaded

    for name in arguments.models:
        freed, aliases = remove_downloaded(name)
        also = f", and with it {', '.join(aliases)}" if aliases else ""
        error_console.print(f"{name} is gone: {freed / 1e9:.2f} GB{also}.", markup=False)
    return 0


def local_models(folders: list[Path]) -> list[LocalModel]:
    """The hub's cache, and the GGUF files in some folders."""
    from ridgeline.weights.aliases import read_aliases
    from ridgeline.weights.downloaded import downloaded_models
    from ridgeline.weights.gguf.choice import gguf_names

    found = [
        describe_local(each.name, each.path, each.num_bytes, each.licence)
        for each in downloaded_models()
    ]
    for folder in folders:
        if not folder.is_dir():
            raise InvalidRequestError(f"There is no folder {folder}.")
        for name in gguf_names(path.name for path in folder.iterdir()):
            path = folder / name
            found.append(describe_local(str(path), path, _size(path), None))
    names: dict[str, list[str]] = {}
    for alias, name in read_aliases().items():
        names.setdefault(name.casefold(), []).append(alias)
    return [replace(each, aliases=tuple(names.get(each.name.casefold(), ()))) for each in found]


def describe_local(name: str, path: Path, num_bytes: int, licence: str | None) -> LocalModel:
    """What a model's configuration says, and what follows for this machine; no weight is read."""
    from ridgeline.executors import default_executor, executor_traits
    from ridgeline.models import describe, lower, read_config
    from ridgeline.quant.declared import declared_formats
    from ridgeline.roofline import PricedModel
    from ridgeline.roofline.memory import kv_bytes, num_parameters
    from ridgeline.weights.gguf import GGUFCheckpoint, describe_gguf

    model = LocalModel(name=name, path=str(path), num_bytes=num_bytes, licence=licence)
    try:
        if path.is_dir():
            definition = describe(read_config(path))
            formats = declared_formats(definition)
        else:
            with GGUFCheckpoint(path) as checkpoint:
                definition = describe_gguf(checkpoint)
                licence = licence or _text(checkpoint.metadata.get("general.license"))
            formats = {}
    except RidgelineError as error:
        return replace(model, problem=str(error))
    spec = definition.spec
    priced = PricedModel(
        spec=spec,
        ops=lower(spec),
        activations=float_format(definition.dtype),
        weight_formats=formats,
    )
    parameters = num_parameters(priced)
    needed = int(num_bytes + kv_bytes(priced, min(_CONTEXT, spec.max_position)))
    executor = executor_traits(default_executor())
    is_priced = path.is_dir()
    return replace(
        model,
        licence=licence,
        family=definition.family.model_type,
        parameters=parameters,
        bits=round(8 * num_bytes / parameters, 2),
        context=spec.max_position,
        needed_bytes=needed,
        fits=needed <= (executor.device_bytes() or available_memory_bytes()),
        tok_s=_predicted(executor.priced(priced), executor.name) if is_priced else None,
    )


def _predicted(model: Any, executor: str) -> tuple[float, float, float] | None:
    """Tokens per second of one sequence after 512 tokens: expected, low, high."""
    from ridgeline.core.errors import CorruptFileError
    from ridgeline.core.plan import ModelRole
    from ridgeline.kernels.cpu.library import native_level
    from ridgeline.roofline.batch import make_batch
    from ridgeline.roofline.calibration import calibration_path, load, measured_elsewhere
    from ridgeline.roofline.predict import StepPredictor

    try:
        calibration = load(calibration_path(executor))
    except CorruptFileError:
        return None
    if calibration is None or measured_elsewhere(calibration, native_level()):
        return None
    predictor = StepPredictor({ModelRole.TARGET: model}, calibration)
    step = predictor.interval(predictor.batch_seconds(make_batch([(512, 513)])), "decode")
    return 1 / step.seconds, 1 / step.high_s, 1 / step.low_s


def _print_table(models: list[LocalModel]) -> None:
    header = ("name", "GB", "bits", "parameters", "context", "fits here", "tok/s", "licence")
    rows = [
        (
            ", ".join((model.name, *model.aliases)),
            f"{model.num_bytes / 1e9:.2f}",
            *(
                ("", "", "", "no: see `ridgeline show`", "")
                if model.problem is not None
                else (
                    f"{model.bits:.3g}",
                    _count(model.parameters or 0),
                    f"{model.context:,}",
                    "yes" if model.fits else "no",
                    "" if model.tok_s is None else "{:.3g} ({:.3g}–{:.3g})".format(*model.tok_s),
                )
            ),
            model.licence or "",
        )
        for model in models
    ]
    print_columns(output_console(), header, rows)


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"


def _shown(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return f"{value / 1e9:.2f} GB"
    if key == "fits":
        return "yes" if value else "no"
    if key == "tok_s":
        return "{:.3g} ({:.3g}–{:.3g})".format(*value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
