"""Config keys that every family treats alike: without effect here, or not supported."""

from collections.abc import Collection

from ridgeline.models.config import ConfigReader

_INERT = """
_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path add_cross_attention
architectures attention_dropout attn_implementation attn_pdrop auto_map bad_words_ids
begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
early_stopping embd_pdrop embedding_dropout encoder_no_repeat_ngram_size eos_token_id
exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
gradient_checkpointing hidden_dropout id2label initializer_range is_decoder is_encoder_decoder
is_llama_config keys_to_ignore_at_inference label2id length_penalty max_length min_length
model_type name_or_path no_repeat_ngram_size num_beam_groups num_beams num_labels
num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
problem_type pruned_heads remove_invalid_values repetition_penalty resid_pdrop residual_dropout
return_dict return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature
tf_legacy_loss tie_encoder_decoder tie_last_hidden_states tokenizer_class top_k top_p torch_dtype
torchscript transformers_version typical_p unsloth_fixed unsloth_version use_bfloat16 use_cache
"""
INERT = frozenset(_INERT.split())

# Values with which a key has no effect; any other changes the output.
_REFUSED: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_multiplier": (),
    "attn_output_gate": (False,),
    "clip_qkv": (),
    "embedding_multiplier": (1, 1.0),
    "is_causal": (True,),
    "is_encoder_decoder": (False,),
    "logit_scale": (1, 1.0),
    "logits_scaling": (1, 1.0),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1, 1.0),
    "per_layer_config": (),
    "pretraining_tp": (1,),
    "pruned_heads": ({},),
    "residual_multiplier": (1, 1.0),
    "rope_interleaved": (False,),
    "use_bidirectional_attention": (False,),
}


def refuse_unsupported(config: ConfigReader, *, computed: Collection[str] = ()) -> None:
    """Raise `UnsupportedModelError` for keys that ask for what the family does not compute.

    ``computed`` are the keys that it does compute (`Family.computes`).
    """
    for name, harmless in _REFUSED.items():
        if name not in computed:
            config.refuse(name, unless=harmless)


def unknown_keys(config: ConfigReader) -> list[str]:
    """The keys that nobody read and that are not known to be inert, by dotted name."""
    return [name for name in config.leftovers() if name.rsplit(".", 1)[-1] not in INERT]
