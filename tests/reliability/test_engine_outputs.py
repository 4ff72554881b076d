"""Items 23, 24 and 27: batches, caches and chunks change no bit, and memory is bounded."""

import json
import random
import subprocess
import sys

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.kernels.cpu.library import native_kernels_run

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")
SETTINGS = {"executor": "cpu", "dtype": "float32", "block_tokens": 16, "max_num_seqs": 8}
TRIALS = [25, pytest.param(500, marks=pytest.mark.slow)]


def requests(rng):
    """Prompts, half of them with a common start, and settings for each."""
    common = [rng.randrange(290) for _ in range(rng.randint(16, 60))]
    prompts, params = [], []
    for _ in range(rng.randint(2, 8)):
        start = common[: rng.randint(1, len(common))] if rng.random() < 0.5 else []
        prompts.append(start + [rng.randrange(290) for _ in range(rng.randint(1, 30))])
        params.append(
            SamplingParams(
                temperature=rng.choice([0.0, 0.7, 1.5]),
                top_p=rng.choice([1.0, 0.8]),
                seed=rng.randrange(1 << 30),
                max_tokens=rng.randint(1, 12),
                logprobs=rng.choice([None, 2]),
            )
        )
    return prompts, params


def essence(outputs):
    """Tokens and the bits of their log-probabilities."""
    return [
        [(sample.token_ids, sample.logprobs, sample.finish_reason) for sample in output.outputs]
        for output in outputs
    ]


@pytest.mark.parametrize("trials", TRIALS)
def test_a_batch_has_the_bits_of_each_alone(model_folder, trials, counted):
    """Item 23."""
    with LLM(str(model_folder), **SETTINGS, enable_prefix_caching=False) as llm:
        for seed in range(trials):
            prompts, params = requests(random.Random(seed))
            alone = [
                essence(llm.generate([prompt], each))[0]
                for prompt, each in zip(prompts, params, strict=True)
            ]
            assert essence(llm.generate(prompts, params)) == alone, seed
    counted(trials)


@pytest.mark.parametrize("trials", TRIALS)
def test_cached_and_chunked_have_the_bits_of_plain(model_folder, trials, counted):
    """Item 24."""
    with (
        LLM(str(model_folder), **SETTINGS, enable_prefix_caching=False) as plain,
        LLM(str(model_folder), **SETTINGS, max_num_batched_tokens=24) as other,
    ):
        for seed in range(trials):
            prompts, params = requests(random.Random(seed))
            expected = essence(plain.generate(prompts, params))
            for _ in range(2):  # the second time from the cache
                assert essence(other.generate(prompts, params)) == expected, seed
        assert other._engine.scheduler.prefix_cache.stats.hit_tokens > 16 * trials
    counted(trials)


FULL_LENGTH = """
import resource, sys
from ridgeline import LLM, SamplingParams

settings = {"executor": "cpu", "load_format": "dummy"}
with LLM(sys.argv[1], **settings, max_num_batched_tokens=8192, enable_prefix_caching=False) as llm:
    length = llm.config.max_model_len - 1
    prompt = [i % 32000 for i in range(length)]
    params = SamplingParams(max_tokens=1, temperature=0)
    llm.generate([prompt], params)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=5)
    (output,) = llm.generate([prompt], params)
    assert len(output.prompt_logprobs) == length
    print(length, llm.spec.vocab_size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_prompt_logprobs_of_a_full_context_take_little_memory(tmp_path, counted):
    """Item 27: the logits of all positions would be a gigabyte."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000,
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-c", FULL_LENGTH, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    length, vocab, grown_kib = map(int, done.stdout.split())
    assert length * vocab * 4 > 10**9
    assert grown_kib < 128 << 10, f"{grown_kib} KiB"
    counted(1)
