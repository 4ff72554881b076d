"""Medusa (Cai et al. 2024, arXiv 2401.10774): heads beside the target, one for each distance."""

from collections.abc import Mapping

from ridgeline.core.spec import MedusaSpec, ModelSpec
from ridgeline.models.config import ConfigReader
from ridgeline.models.draft_head import DraftHeadDefinition
from ridgeline.models.family import TensorSource
from ridgeline.models.known_keys import unknown_keys
from ridgeline.models.unsupported import refuse_block_drafter

# Of what they are trained for, and of the format.
_INERT = ("base_model_name_or_path", "version", "medusa_choices", "hidden_size", "vocab_size",
          "truncated_vocab_size", "medusa_fc_bias", "max_paths", "topk")  # fmt: skip


def describe_medusa(config: Mapping[str, object], target: ModelSpec) -> DraftHeadDefinition:
    """What the config of heads says, in the authors' form.

    Raises:
        CorruptFileError: a value is missing, of the wrong type, or absurd.
        UnsupportedModelError: its vocabulary is another than the model's.
    """
    reader = ConfigReader(config)
    refuse_block_drafter(reader)
    spec = MedusaSpec(
        hidden_size=target.hidden_size,
        num_heads=reader.integer("medusa_num_heads", maximum=64),
        num_blocks=reader.integer("medusa_num_layers", minimum=0, maximum=64),
    )
    reader.refuse("truncated_vocab_size", unless=(target.vocab_size,))
    sources = {}
    for head in range(spec.num_heads):
        for block in range(spec.num_blocks):
            place = f"{head}.{block}.linear"
            sources[f"heads.{head}.{block}"] = _source(f"{place}.weight")
            sources[f"heads.{head}.{block}_bias"] = _source(f"{place}.bias")
        sources[f"heads.{head}.out"] = _source(f"{head}.{spec.num_blocks}.weight")
    return DraftHeadDefinition(
        spec=spec,
        sources=sources,
        borrowed={"embed": "embed"},
        unknown=tuple(sorted({*unknown_keys(reader)} - {*_INERT})),
    )


def _source(name: str) -> TensorSource:
    return TensorSource(name=name, other_names=(f"medusa_head.{name}",))
