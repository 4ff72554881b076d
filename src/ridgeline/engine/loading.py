"""From a model's name to everything that an engine needs of it."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import (
    CorruptFileError,
    InvalidRequestError,
    ModelNotFoundError,
    SettingsError,
)
from ridgeline.core.formats import float_format, on_load_format
from ridgeline.core.pooling import PoolingSpec
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine.pooling_head import PoolingHead
from ridgeline.executors.model import ExecutorModel
from ridgeline.models import PRESETS, ModelDefinition, describe, lower, read_config
from ridgeline.models.pooling import read_pooling
from ridgeline.quant import read_scheme
from ridgeline.text import ChatTemplate, Tokenizer, eos_token_ids, tokenizer_from_gguf
from ridgeline.text.tokenizer_files import has_tokenizer
from ridgeline.weights import (
    CheckpointWeights,
    DummyWeights,
    WeightSource,
    load_lora,
    locate_model,
)
from ridgeline.weights.gguf import GGUFCheckpoint, describe_gguf

_log = logging.getLogger(__name__)

_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Others of transformers' that change what is written, each with the value that changes nothing.
_UNREAD_GENERATION_KEYS = {
    "bad_words_ids": None, "begin_suppress_tokens": None, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0, "forced_bos_token_id": None, "forced_eos_token_id": None,
    "no_repeat_ngram_size": 0, "num_beams": 1, "penalty_alpha": None, "sequence_bias": None,
    "suppress_tokens": None, "typical_p": 1.0,
}  # fmt: skip

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """All of a model but its weights. ``folder`` is ``None`` for a preset with random weights.

    ``tokenizer`` and ``chat_template`` are ``None`` where there are none; then
    ``eos_token_ids`` come from the configuration. ``sampling_defaults`` are the settings that its
    ``generation_config.json`` recommends. ``pooling`` is what it makes of hidden states.
    """

    name: str
    folder: Path | None
    definition: ModelDefinition
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    chat_template: ChatTemplate | None
    sampling_defaults: Mapping[str, Any]
    pooling: PoolingSpec = field(default_factory=PoolingSpec)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(ModelDescription):
    """A model whose weights can be read; those of ``head``, which pooling needs, have been."""

    model: ExecutorModel
    head: PoolingHead


def describe_model(config: EngineConfig, *, progress: Progress | None = None) -> ModelDescription:
    """Find a model, download it if need be, and read all but its weights.

    Raises:
        ModelFileError: it is missing, damaged or not supported.
        MachineError: no network or disk for it.
    """
    preset = PRESETS.get(config.model or "")
    if (
        preset is not None
        and config.load_format != "dummy"
        and not Path(config.model or "").exists()
    ):
        raise ModelNotFoundError(
            f"{config.model} is the name of a shape, without weights: use it with --load-format "
            "dummy (random weights), or name a folder, a GGUF file or a repository of the hub."
        )
    folder = tokenizer = None
    if config.load_format == "dummy" and preset is not None:
        definition = describe(preset, strict=config.strict, context=config.max_model_len)
    else:
        described: list[tuple[ModelDefinition, Tokenizer | None]] = []
        folder = locate_model(
            config.model,
            revision=config.revision,
            offline=config.offline,
            need_weights=config.load_format != "dummy",
            accept=lambda path: described.append(_described(path, config)),
            progress=progress,
        )
        definition, tokenizer = described[-1]
        _check_vocabulary(tokenizer, definition.spec.vocab_size)
    pooling = read_pooling(None if config.load_format == "dummy" else folder, definition.spec)
    if pooling.max_tokens is not None and config.max_model_len is None:
        shorter = min(definition.spec.max_position, pooling.max_tokens)
        definition = replace(definition, spec=replace(definition.spec, max_position=shorter))
    return ModelDescription(
        name=config.model or "embedded",
        folder=folder,
        definition=definition,
        tokenizer=tokenizer,
        eos_token_ids=_eos_token_ids(folder, tokenizer),
        chat_template=_load_chat_template(config, tokenizer),
        sampling_defaults=_sampling_defaults(folder),
        pooling=pooling,
    )


def load_model(config: EngineConfig, *, progress: Progress | None = None) -> LoadedModel:
    """Find, read and check a model, all but its weights: the executor streams them as it is made.

    Raises (and so does the stream):
        ModelFileError: it is missing, damaged or not supported.
        MachineError: no network, disk or memory for it.
    """
    description = describe_model(config, progress=progress)
    definition, folder = description.definition, description.folder
    dtype = definition.dtype if config.dtype == "auto" else float_format(config.dtype).name
    ops = lower(definition.spec)
    scheme = None
    if definition.quantization is not None:
        scheme = read_scheme(definition.quantization, strict=config.strict)
    weights: WeightSource
    if config.load_format == "dummy" or folder is None:
        weights = DummyWeights(ops=ops, dtype=dtype, seed=config.seed)
    else:
        weights = CheckpointWeights(
            path=folder,
            ops=ops,
            sources=definition.sources,
            ignored=definition.ignored,
            dtype=dtype,
            quantization=scheme,
            progress=progress,
        )
    adapters = tuple(
        load_lora(Path(adapter), ops=ops, sources=definition.sources, dtype=dtype)
        for adapter in config.adapters.values()
    )
    return LoadedModel(
        **{each.name: getattr(description, each.name) for each in fields(description)},
        model=ExecutorModel(
            spec=definition.spec,
            ops=ops,
            weights=weights,
            dtype=dtype,
            quantization=on_load_format(config.quantization),
            adapters=adapters,
        ),
        head=PoolingHead.load(folder, description.pooling, description.definition.spec.hidden_size),
    )


def _described(path: Path, config: EngineConfig) -> tuple[ModelDefinition, Tokenizer | None]:
    """The model and the tokenizer of a folder, or of a GGUF file, which has both in it."""
    if path.is_dir():
        definition = describe(read_config(path), strict=config.strict, context=config.max_model_len)
        if definition.quantization is not None:
            read_scheme(definition.quantization, strict=config.strict)  # refused before a download
        return definition, _load_tokenizer(path)
    with GGUFCheckpoint(path) as checkpoint:
        definition = describe_gguf(checkpoint, strict=config.strict, context=config.max_model_len)
        tokenizer = tokenizer_from_gguf(checkpoint.metadata)
    if tokenizer is None:
        _log.warning("%s has no tokenizer; prompts must be token ids.", path)
    return definition, tokenizer


def _check_vocabulary(tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Warn of tokens that the model does not have: a text with one of them is refused."""
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        _log.warning(
            "The tokenizer has %d tokens and the model %d: text with one of the others is refused.",
            tokenizer.vocab_size,
            vocab_size,
        )


def _sampling_defaults(folder: Path | None) -> dict[str, Any]:
    """What ``generation_config.json`` says of sampling, if there is one.

    Raises:
        CorruptFileError: a value is out of bounds.
    """
    if folder is None or not (folder / "generation_config.json").is_file():
        return {}
    config = read_config(folder / "generation_config.json")
    defaults: dict[str, Any] = {
        name: config[name] for name in _SAMPLING_KEYS if config.get(name) is not None
    }
    unread = [
        name
        for name, neutral in _UNREAD_GENERATION_KEYS.items()
        if config.get(name) not in (None, neutral)
    ]
    if unread:
        _log.warning(
            "generation_config.json gives %s, which Ridgeline does not apply.", ", ".join(unread)
        )
    try:
        SamplingParams(**defaults)
    except InvalidRequestError as error:
        raise CorruptFileError(f"generation_config.json: {error}") from error
    return defaults


def _load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer; without one the model still takes token ids."""
    if not has_tokenizer(folder):
        _log.warning("%s has no tokenizer; prompts must be token ids.", folder)
        return None
    return Tokenizer.from_folder(folder)


def _eos_token_ids(folder: Path | None, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The tokenizer's, or what the folder's configuration says without one."""
    if tokenizer is not None:
        return tokenizer.eos_token_ids
    return frozenset() if folder is None else eos_token_ids(folder)


def _load_chat_template(config: EngineConfig, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    if tokenizer is None:
        return None
    if config.chat_template is None:
        return ChatTemplate.from_tokenizer(tokenizer)
    source = config.chat_template
    if "{" not in source:  # a path, not a template
        try:
            source = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"The chat template {source} cannot be read.") from error
    template = ChatTemplate(source, special_tokens=tokenizer.special_tokens)
    template.compile()  # one that was asked for must be usable; the model's own is for chats alone
    return template
