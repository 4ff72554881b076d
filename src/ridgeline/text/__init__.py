"""Text: tokenizers, chat templates, incremental detokenizing, stop strings."""

from ridgeline.text.chat_messages import check_messages
from ridgeline.text.chat_template import ChatTemplate
from ridgeline.text.decoding import DecoderPlan
from ridgeline.text.detokenizer import IncrementalDetokenizer
from ridgeline.text.gguf_tokenizer import tokenizer_from_gguf
from ridgeline.text.special_tokens import eos_token_ids
from ridgeline.text.stop_strings import StopMatch, StopStringMatcher
from ridgeline.text.template_process import RenderLimits
from ridgeline.text.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "DecoderPlan",
    "IncrementalDetokenizer",
    "RenderLimits",
    "StopMatch",
    "StopStringMatcher",
    "Tokenizer",
    "check_messages",
    "eos_token_ids",
    "tokenizer_from_gguf",
]
