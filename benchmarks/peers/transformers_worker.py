"""Measures transformers on PyTorch; runs in its environment, without Ridgeline.

Input and output as of ``openvino_worker.py``.
"""

import json
import statistics
import sys
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

DECODE_STEPS = 8
START_TOKENS = 16


@torch.inference_mode()
def measure(model: PreTrainedModel, cell: dict) -> float:
    """Prompt tokens of one forward pass; output tokens by the median step."""
    random = torch.Generator().manual_seed(cell["tokens"])
    prompt = cell["tokens"] or START_TOKENS
    tokens = torch.randint(5, 1000, (cell["batch"], prompt), generator=random)
    cache = DynamicCache(config=model.config)
    start = time.perf_counter()
    output = model(tokens, past_key_values=cache, logits_to_keep=1)
    if cell["kind"] == "prefill":
        return prompt / (time.perf_counter() - start)
    seconds = []
    for _ in range(DECODE_STEPS):
        start = time.perf_counter()
        tokens = output.logits[:, -1:].argmax(-1)
        output = model(tokens, past_key_values=cache, logits_to_keep=1)
        seconds.append(time.perf_counter() - start)
    return cell["batch"] / statistics.median(seconds[1:])


def main() -> None:
    """Measure every cell once, after a warm-up."""
    job = json.load(sys.stdin)
    setting = job["setting"]
    torch.set_num_threads(job["threads"])
    model = AutoModelForCausalLM.from_pretrained(
        job["folder"],
        dtype=getattr(torch, setting["dtype"]),
        attn_implementation=setting["attention"],
    ).eval()
    measure(model, {"kind": "decode", "tokens": 0, "batch": 1})
    print(json.dumps({cell["name"]: measure(model, cell) for cell in job["cells"]}))


if __name__ == "__main__":
    main()
