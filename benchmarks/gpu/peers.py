"""The same shape in transformers with torch.compile, where transformers is installed."""

import importlib.util
import time
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.gpu.progress import Bench

_COMPILE_S = 60.0  # that it takes at the least
_PROMPT, _OUTPUT = 512, 64


def bench_transformers(bench: Bench) -> None:
    """The shape of the fewest layers."""
    shapes, progress = bench.settings.shapes, bench.progress
    shape = min(shapes, key=lambda name: _layers(shapes[name]))
    if bench.settings.compiles and progress.allows("transformers", _COMPILE_S):
        found = transformers_tokens_per_s(shapes[shape], bench.device.torch_device)
        progress.result("transformers", (shape, found))


def transformers_tokens_per_s(config: Mapping[str, object], at: torch.device) -> float | str:
    """Output tokens per second at batch 1 in bfloat16, with a static cache and torch.compile; a
    sentence where that cannot be measured."""
    if importlib.util.find_spec("transformers") is None:
        return "transformers is not installed."
    try:
        return _tokens_per_s(config, at)
    except Exception as error:  # another project's, which may have changed
        return f"transformers could not: {type(error).__name__}: {error}"


def _tokens_per_s(config: Mapping[str, object], at: torch.device) -> float:
    import transformers

    settings: dict[str, Any] = {k: v for k, v in config.items() if k != "torch_dtype"}
    known = transformers.AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    with torch.device(at):
        make: Any = transformers.AutoModelForCausalLM.from_config
        model = make(known, dtype=torch.bfloat16).eval()
        prompt = torch.randint(0, known.vocab_size, (1, _PROMPT))
    arguments = {"cache_implementation": "static", "do_sample": False, "eos_token_id": None}

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        model.generate(prompt, min_new_tokens=tokens, max_new_tokens=tokens, **arguments)
        if at.type == "cuda":
            torch.cuda.synchronize(at)
        return time.perf_counter() - began

    for tokens in (4, _OUTPUT):  # compiles
        seconds(tokens)
    return (_OUTPUT - 1) / (seconds(_OUTPUT) - seconds(1))


def _layers(config: Mapping[str, object]) -> int:
    layers = config["num_hidden_layers"]
    assert isinstance(layers, int)
    return layers
