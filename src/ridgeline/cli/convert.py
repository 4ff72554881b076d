"""``ridgeline convert``: a model from one file format, or kind of attention, to another."""

import argparse
from pathlib import Path

from ridgeline.cli.display import loading_bar, output_console
from ridgeline.cli.model_quality import add_text_options, print_quality, run_layered
from ridgeline.cli.options import Parser, add_settings, given_settings, num_bytes
from ridgeline.compress.conversion.recipe import ConversionRecipe
from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.gguf_file_types import FILE_TYPES

_DTYPES = ("float32", "float16", "bfloat16")
_OF_WEIGHTS = ("calibration", "merge", "window_tokens", "num_windows", "seed")


def add_options(parser: Parser) -> None:
    """Add the options of this command."""
    parser.add_argument("model", metavar="IN", help="folder, GGUF file, hub name, or `embedded`")
    out = parser.add_mutually_exclusive_group(required=True)
    out.add_argument("out", nargs="?", metavar="OUT", type=Path, help="GGUF file or folder to make")
    out.add_argument("-o", "--out", dest="out_option", metavar="OUT", type=Path, help="the same")
    parser.add_argument(
        "--format",
        choices=("gguf", "safetensors"),
        help="what OUT will be; default gguf if it ends so, else safetensors",
    )
    parser.add_argument(
        "--gguf-type", choices=tuple(FILE_TYPES), help="of GGUF: the number format; default q4_k_m"
    )
    parser.add_argument(
        "--imatrix", type=Path, metavar="FILE", help="of GGUF: importance of each input column"
    )
    parser.add_argument(
        "--split-max-size", type=num_bytes, metavar="SIZE", help="of GGUF: tensors of one file"
    )
    parser.add_argument(
        "--requantize",
        action="store_true",
        help="of GGUF: take a model that is quantized already; the errors of both add up",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="of safetensors: the number format; default IN's"
    )
    add_settings(parser, ConversionRecipe, title="attention", shown=True)
    add_text_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Convert."""
    arguments.out = arguments.out or arguments.out_option
    if given := given_settings(arguments, ConversionRecipe):
        return _convert_attention(arguments, ConversionRecipe(**given))
    for option in ("calibration", "text", "resume"):
        if getattr(arguments, option, None):
            raise InvalidRequestError(
                f"--{option} goes with --kv-heads, --window or --share, not with another format."
            )
    # After parsing: these bring torch, which --help does not need.
    from ridgeline.weights import locate_model
    from ridgeline.weights.conversion import convert_to_gguf, convert_to_safetensors
    from ridgeline.weights.gguf.imatrix import read_imatrix

    arguments.format = arguments.format or (
        "gguf" if arguments.out.suffix == ".gguf" else "safetensors"
    )
    to_gguf = arguments.format == "gguf"
    _refuse_options(arguments, to_gguf)
    name = None if arguments.model == "embedded" else arguments.model
    with loading_bar() as progress:
        path = locate_model(name, progress=progress)
        if not to_gguf:
            convert_to_safetensors(path, arguments.out, arguments.dtype, progress=progress)
            written = [arguments.out]
        elif not path.is_dir():
            raise InvalidRequestError(
                f"{path.name} is GGUF already; make another from the model's safetensors."
            )
        else:
            written = convert_to_gguf(
                path,
                arguments.out,
                arguments.gguf_type or "q4_k_m",
                name="ridgeline-embedded" if name is None else Path(name).name,
                importance=None if arguments.imatrix is None else read_imatrix(arguments.imatrix),
                split_max_bytes=arguments.split_max_size,
                requantize=arguments.requantize,
                progress=progress,
            )
    for each in written:
        print(each)
    return 0


def _convert_attention(arguments: argparse.Namespace, recipe: ConversionRecipe) -> int:
    # After parsing: this brings torch, which --help does not need.
    from ridgeline.compress.conversion.convert import convert

    if arguments.out.suffix == ".gguf":
        raise InvalidRequestError(
            "Another attention is written as a folder of safetensors: convert that to GGUF then."
        )
    for option in ("format", "gguf_type", "imatrix", "split_max_size", "requantize", "dtype"):
        if getattr(arguments, option):
            raise InvalidRequestError(
                f"--{option.replace('_', '-')} does not go with another attention: convert twice."
            )
    for option in () if recipe.is_calibrated else _OF_WEIGHTS:
        if hasattr(arguments, option):
            raise InvalidRequestError(
                f"--{option.replace('_', '-')} has no effect on windows, which change no weight; "
                "it goes with --kv-heads or --share."
            )
    done = run_layered(arguments, recipe, convert)
    report = done.report
    output_console().print(
        f"{report.path}: {report.weights_bytes / 1e6:,.1f} MB of weights; K and V of a token have "
        f"{report.kv_elements:,} elements, of {report.kv_elements_before:,}. Heal it: ridgeline "
        f"distill {report.path} --teacher {arguments.model} -o HEALED --train-text FILES",
        markup=False,
        soft_wrap=True,
    )
    if done.documents:
        print_quality(done.model, report.path, done.documents)
    return 0


def _refuse_options(arguments: argparse.Namespace, to_gguf: bool) -> None:
    """Options of the other format."""
    others = ("dtype",) if to_gguf else ("gguf_type", "imatrix", "split_max_size", "requantize")
    for option in others:
        if getattr(arguments, option):
            raise InvalidRequestError(
                f"--{option.replace('_', '-')} is not of --format {arguments.format}."
            )
    if to_gguf and arguments.out.suffix.lower() != ".gguf":
        raise InvalidRequestError(f"{arguments.out} must end in .gguf.")
