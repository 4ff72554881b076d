"""Measures OpenVINO GenAI; runs in its environment, without Ridgeline.

One JSON object on standard input: ``folder``, ``threads``, ``setting`` and ``cells`` (kind, tokens,
batch, name); one on standard output: tokens per second by name.
"""

import json
import statistics
import sys

import numpy as np
import openvino as ov
import openvino_genai as genai

DECODE_STEPS = 16
START_TOKENS = 16


def load(job: dict) -> genai.LLMPipeline:
    """The pipeline with the job's settings."""
    setting = job["setting"]
    properties = {
        "ATTENTION_BACKEND": setting["backend"],
        "INFERENCE_NUM_THREADS": job["threads"],
        "PERFORMANCE_HINT": "LATENCY",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": setting["group"],
        "KV_CACHE_PRECISION": setting.get("kv", "u8"),
    }
    if setting["backend"] == "PA":
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.max_num_batched_tokens = setting.get("batched_tokens", 2048)
        scheduler.cache_size = 4
        properties["scheduler_config"] = scheduler
    return genai.LLMPipeline(job["folder"], "CPU", **properties)


def generate(
    pipeline: genai.LLMPipeline, batch: int, prompt: int, new: int
) -> genai.RawPerfMetrics:
    """Run random prompts, ``new`` tokens each, greedily."""
    ids = np.random.default_rng(prompt).integers(5, 1000, (batch, prompt)).astype(np.int64)
    inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
    config = genai.GenerationConfig(
        max_new_tokens=new, min_new_tokens=new, ignore_eos=True, do_sample=False
    )
    return pipeline.generate(inputs, config).perf_metrics.raw_metrics


def measure(pipeline: genai.LLMPipeline, cell: dict) -> float:
    """Prompt tokens by the time to the first token (µs); output tokens by the median step (ms)."""
    if cell["kind"] == "prefill":
        metrics = generate(pipeline, 1, cell["tokens"], 1)
        return cell["tokens"] / (metrics.m_times_to_first_token[0] * 1e-6)
    metrics = generate(pipeline, cell["batch"], cell["tokens"] or START_TOKENS, DECODE_STEPS + 2)
    steps = np.diff(np.array(metrics.m_new_token_times))[1:] * 1e-3
    return cell["batch"] / statistics.median(steps.tolist())


def main() -> None:
    """Measure every cell once, after a warm-up."""
    job = json.load(sys.stdin)
    pipeline = load(job)
    generate(pipeline, 1, 512 if job["cells"][0]["kind"] == "prefill" else START_TOKENS, 2)
    print(json.dumps({cell["name"]: measure(pipeline, cell) for cell in job["cells"]}))


if __name__ == "__main__":
    main()
