"""LongRoPE beside `generate` of transformers, which computes all anew at the original length."""

import numpy as np
import pytest
import torch
import transformers
from tests.parity.ours import load, run
from tests.parity.test_logits import TOLERANCES

ORIGINAL = 71  # tokens, of phi3-longrope-beyond


@torch.no_grad()
def generated(folder, prompt, num_tokens):
    """All tokens, and the logits ``[num_tokens, V]`` that the generated ones were chosen by."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return out.sequences[0].tolist(), torch.cat(out.logits).numpy()


@pytest.mark.parametrize("executor", TOLERANCES)
@pytest.mark.parametrize(
    ("num_prompt", "max_model_len", "same_from"),
    [(50, ORIGINAL, 50), (50, ORIGINAL + 1, ORIGINAL + 1), (72, None, 72)],
    ids=["within", "across", "beyond"],
)
def test_longrope(oracle_of, executor, num_prompt, max_model_len, same_from):
    """Equal within the original length if the context is, and else wherever text is beyond it."""
    oracle = oracle_of("phi3-longrope-beyond")
    prompt = oracle.prompt[:num_prompt]
    num_tokens = ORIGINAL - num_prompt if max_model_len == ORIGINAL else 28
    token_ids, expected = generated(oracle.folder, prompt, num_tokens)
    model = load(oracle.folder, max_model_len=max_model_len).model
    logits = run(model, token_ids[:-1], prompt_tokens=num_prompt, name=executor)[num_prompt - 1 :]
    differences = np.abs(logits - expected).max(axis=-1)
    num_other = same_from - num_prompt
    assert (differences[num_other:] <= TOLERANCES[executor]).all()
    assert (differences[:num_other] > 0.01).all()
