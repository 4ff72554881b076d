"""Settings of speculative decoding: who guesses tokens, how many, and how they are verified."""

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from ridgeline.core.parts import one_of_or_part, part_names
from ridgeline.core.settings.bounds import Meta
from ridgeline.core.settings.model import on_load
from ridgeline.core.settings.reading import Needs, Reads, Tries

Speculation = Literal[
    "off",
    "ngram",
    "suffix",
    "recycling",
    "lookahead",
    "draft",
    "exit",
    "eagle3",
    "mtp",
    "medusa",
    "combined",
    "adaptive",
]
DRAFT_MODEL_SPECULATION = ("draft", "combined", "adaptive")  # those that use a draft model
HEAD_SPECULATION = (
    "eagle3",
    "mtp",
    "medusa",
)  # those whose drafter reads the target's hidden states
# Those whose drafter has files of its own.
NAMED_SPECULATION = (*DRAFT_MODEL_SPECULATION, "eagle3", "medusa")
# Those that draft what a caller predicts.
PREDICTION_SPECULATION = ("ngram", "suffix", "combined", "adaptive")
EXIT_SPECULATION = ("exit", "combined", "adaptive")  # those that may use the target's first layers
MAX_SPECULATIVE_TOKENS = 64

_REUSE = Needs("reuse_kv", lambda config: config.reuse_kv)
_GUESSES = Needs("speculation", lambda config: config.speculation != "off")
_NAMING = Needs(
    f"speculation {' or '.join(NAMED_SPECULATION)}",
    lambda config: config.speculation in NAMED_SPECULATION,
)
_DRAFTING = Needs(
    f"speculation {' or '.join((*DRAFT_MODEL_SPECULATION, *HEAD_SPECULATION))}",
    lambda config: config.speculation in (*DRAFT_MODEL_SPECULATION, *HEAD_SPECULATION),
)
_EXITING = Needs(
    f"speculation {' or '.join(EXIT_SPECULATION)}",
    lambda config: config.speculation in EXIT_SPECULATION,
)


def drafter_names() -> tuple[str, ...]:
    """What ``speculation`` may be beside off: drafters of Ridgeline's own and installed ones."""
    own = tuple(name for name in get_args(Speculation) if name != "off")
    return (*own, *part_names("drafters"))


def takes_predictions(speculation: str) -> bool:
    """Whether an output that a caller predicts may be drafted; installed drafters are told it."""
    return speculation in PREDICTION_SPECULATION or speculation not in get_args(Speculation)


def _draft_format(name: str, value: str) -> str:
    if value not in ("auto", "none"):
        on_load(name, value)
    return value


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings:
    """How tokens are guessed and verified together.

    Attributes:
        speculation: how next tokens are guessed and verified together: off, ngram (looks in the
            prompt and output), suffix (and in earlier outputs), recycling (what was likely after
            the same token before), lookahead (n-grams that the model makes ahead of what it says),
            draft (a draft model), exit (the model's own first layers),
            eagle3 (an EAGLE-3 drafter), mtp (the model's own layer for it), medusa (heads beside
            it), combined (ngram, else draft or exit), adaptive (what pays), or an installed
            drafter. No output changes.
        verification: how guesses are verified: exact, or rejection (Leviathan, Chen), which accepts
            more of a draft model's. Outputs are then distributed as without speculation, but they
            are not the same ones, and a request's own seed is refused.
        num_speculative_tokens: tokens that are guessed at once, at the most.
        draft_shape: chain, or tree: the most likely ones, several in one place, which takes fewer
            passes of a draft model and accepts more where tokens are sampled.
        draft_model: a smaller model with the same vocabulary; the embedded model has its own. Of
            eagle3 and medusa, a drafter of this model. combined and adaptive take that of eagle3,
            too, and mtp for the model's own layer.
        draft_layers: after how many layers of the model its own head guesses, in place of a draft
            model; without it, exit takes a quarter.
        draft_quantization: what a draft model's matrices are quantized to as they are loaded, none,
            or auto for quantization. Coarser ones cost accepted drafts, and no quality.
    """

    speculation: Annotated[
        str,
        Reads(one_of_or_part(get_args(Speculation), "drafters")),
        _REUSE,
        Tries(values=("ngram", "suffix", "draft", "adaptive"), predicted=False),
    ] = "off"
    verification: Annotated[
        Literal["exact", "rejection"],
        _GUESSES,
        Needs(
            "a drafter of chains, which lookahead is not",
            lambda config: config.speculation != "lookahead",
        ),
    ] = "exact"
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=MAX_SPECULATIVE_TOKENS), _GUESSES] = 4
    draft_shape: Annotated[
        Literal["chain", "tree"],
        _GUESSES,
        Needs("verification='exact'", lambda config: config.verification == "exact"),
    ] = "chain"
    draft_model: Annotated[str | None, _NAMING] = None
    draft_layers: Annotated[Annotated[int, Meta(ge=1)] | None, _EXITING] = None
    draft_quantization: Annotated[str, Reads(_draft_format), _DRAFTING] = "auto"
