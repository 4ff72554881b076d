"""RoBERTa (arXiv 1907.11692) and XLM-RoBERTa (arXiv 1911.02116): BERT with other positions.

Their positions are counted from behind the row of the padding token.
"""

from functools import partial

from ridgeline.core.spec import ModelSpec
from ridgeline.models.bert import ENCODER_IGNORED, build_encoder, encoder_tensors
from ridgeline.models.config import ConfigReader
from ridgeline.models.family import Family

_PADDING = 1  # of the pretrained models


def _build(config: ConfigReader, *, model_type: str) -> ModelSpec:
    padding = config.integer("pad_token_id", minimum=0, maximum=2**24, default=_PADDING)
    return build_encoder(
        config, model_type=model_type, type_vocab_size=2, first_position=padding + 1
    )


ROBERTA, XLM_ROBERTA = (
    Family(
        model_type=model_type,
        build=partial(_build, model_type=model_type),
        tensors=encoder_tensors("roberta."),
        ignored=ENCODER_IGNORED,
    )
    for model_type in ("roberta", "xlm-roberta")
)
