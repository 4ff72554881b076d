"""Tiny encoders of every family, and classifiers, with every parameter random."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

_SIZES = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MODERN = _SIZES | _SPECIAL | {
    "cls_token_id": 1,
    "sep_token_id": 2,
    "norm_eps": 0.02,
    "local_attention": 12,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 900.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    },
}  # fmt: skip
_EPS = {"layer_norm_eps": 0.03}  # large, so that the tests feel it


@dataclass(frozen=True, kw_only=True)
class EncoderCase:
    """A config by the name of its transformers classes."""

    name: str
    classes: str
    config: dict[str, object]
    has_types: bool = False

    @property
    def hf_config(self) -> transformers.PretrainedConfig:
        settings = self.config | {"attn_implementation": "eager"}
        return getattr(transformers, f"{self.classes}Config")(**settings)


ENCODER_CASES = [
    EncoderCase(name="bert", classes="Bert", config=_SIZES | _EPS, has_types=True),
    EncoderCase(
        name="bert-relu", classes="Bert", config=_SIZES | {"hidden_act": "relu"}, has_types=True
    ),
    EncoderCase(name="roberta", classes="Roberta", config=_SIZES | _EPS, has_types=True),
    EncoderCase(
        name="xlm-roberta", classes="XLMRoberta", config=_SIZES | _EPS | {"type_vocab_size": 1}
    ),
    EncoderCase(name="modernbert", classes="ModernBert", config=_MODERN),
    EncoderCase(
        name="modernbert-biases",
        classes="ModernBert",
        config=_MODERN
        | {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True}
        | {"classifier_pooling": "mean"},
    ),
]
ENCODER_CASES.append(
    EncoderCase(
        name="embedding-gemma",
        classes="Gemma3Text",
        config=_SIZES
        | _SPECIAL
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "query_pre_attn_scalar": 11,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "use_bidirectional_attention": True,
        },
    )
)
DECODER_CASE = EncoderCase(
    name="qwen3",
    classes="Qwen3",
    config=_SIZES | _SPECIAL | {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 1},
)


@torch.no_grad()
def make_model(
    case: EncoderCase, folder: Path, *, suffix: str = "Model", **changes: object
) -> torch.nn.Module:
    """A model of random parameters in float32, saved to a folder with a tokenizer."""
    config = case.hf_config
    for name, value in changes.items():
        setattr(config, name, value)
    model = getattr(transformers, f"{case.classes}{suffix}")(config).eval()
    generator = torch.Generator().manual_seed(len(case.name) * 31 + len(suffix))
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            gains = 0.6 + torch.rand(parameter.shape, generator=generator)
            parameter.copy_(gains if name.endswith("weight") else values * 0.4)
        elif "embeddings" in name or "embed_tokens" in name:
            parameter.copy_(values)
        else:
            parameter.copy_(values * 1.4 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    write_wordpiece(folder)
    return model


def write_wordpiece(folder: Path) -> None:
    """A WordPiece tokenizer of 199 tokens, whose pairs are told apart by their types."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["[CLS]", "[PAD]", "[UNK]", "[SEP]", *letters, *(f"##{letter}" for letter in letters)]
    words += [f"{a}{b}" for a in letters for b in letters][: 199 - len(words)]
    tokenizer = Tokenizer(
        models.WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 0), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def random_texts(count: int, *, seed: int, words: tuple[int, int] = (1, 20)) -> list[str]:
    """Words of a few letters."""
    random = np.random.default_rng(seed)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    return [
        " ".join(
            "".join(random.choice(letters, size=random.integers(1, 4)))
            for _ in range(random.integers(*words))
        )
        for _ in range(count)
    ]
