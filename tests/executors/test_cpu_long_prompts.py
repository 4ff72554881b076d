"""Prompts whose activations no near cache holds: matrices multiply them block by block."""

import numpy as np
from tests.tiny import CONFIG, Driver, tiny_executor, tiny_model

from ridgeline.core.config import EngineConfig
from ridgeline.core.plan import Outputs
from ridgeline.executors import create_executor

WIDE = CONFIG | {
    "hidden_size": 2048,
    "intermediate_size": 1536,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
PROMPT = [(7 * i + i * i) % 97 for i in range(320)]  # 2.6 MB of activations in float32


def test_a_prompt_in_chunks_has_the_bits_of_the_whole():
    model = tiny_model(WIDE, dtype="float32")
    logits = []  # of all tokens
    for size in (len(PROMPT), 100):
        executor = tiny_executor(
            model=model,
            block_tokens=16,
            make=lambda models, block_tokens: create_executor(
                models, EngineConfig(executor="cpu", block_tokens=block_tokens)
            ),
        )
        driver = Driver(executor, blocks_per_slot=32)
        outputs = Outputs(sample=True, logits=True)
        admission = driver.admit(0, PROMPT)
        chunks = []
        for start in range(0, len(PROMPT), size):
            tokens = PROMPT[start : start + size]
            segment = driver.segment(0, start, tokens, fresh=start == 0, outputs=outputs)
            result = driver.run(segment, admissions=(admission,) if start == 0 else ())
            chunks.append(result.passes[0][0].logits)
        logits.append(np.concatenate(chunks))
        executor.close()
    np.testing.assert_array_equal(logits[0], logits[1])
