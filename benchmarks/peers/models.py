"""One shape's random weights in the forms that the peers read.

``python -m benchmarks.peers.models [SHAPE …]``. A Hugging Face folder in bf16 is written once; the
GGUF files and the OpenVINO models are made from it by the peers' own tools. What is there already
is left alone.
"""

import argparse
import json
import os
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import gguf
import torch
from benchmarks.peers.paths import LLAMA_CPP_TOOLS, model_folder, peer_python
from safetensors.torch import save_file
from tests.weights.gguf_export import export

from ridgeline.kernels.tensors import as_tensor
from ridgeline.models import PRESETS, describe, lower
from ridgeline.weights import dummy_weights

SHAPES = ("llama-3.2-1b", "qwen2.5-0.5b")
# llama.cpp's own Q4_0 leaves the head in Q6_K; "pure" has it in Q4_0 as well.
GGUF_FORMS = {
    "bf16": (),
    "q4_0": ("Q4_0",),
    "q4_0-pure": ("--pure", "Q4_0"),
}
# The default leaves embedding and head in int8; "all" has them in int4 as well.
OPENVINO_FORMS = {
    "int4": ("--group-size", "128", "--ratio", "1.0", "--sym"),
    "int4-all": ("--group-size", "128", "--ratio", "1.0", "--sym", "--all-layers"),
}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def checkpoint(shape: str) -> Path:
    """The Hugging Face folder of a shape, with a tokenizer that only fills its place."""
    folder = model_folder(shape) / "hf"
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    config = dict(PRESETS[shape]) | {"architectures": [_architecture(shape)]}
    definition = describe(config)
    weights = dummy_weights(lower(definition.spec), dtype="bfloat16", seed=0)
    named: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        source = definition.sources[name]
        assert not source.transpose, source
        named[source.name] = as_tensor(weight)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    assets = resources.files("ridgeline").joinpath("assets", "target")
    for name in _TOKENIZER_FILES:
        (folder / name).write_bytes(assets.joinpath(name).read_bytes())
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def gguf_file(shape: str, form: str) -> Path:
    """The GGUF file of a shape in one of `GGUF_FORMS`."""
    path = model_folder(shape) / f"{form}.gguf"
    if path.exists():
        return path
    if form == "bf16":
        part = path.with_suffix(".part")
        export(
            checkpoint(shape), part, str(PRESETS[shape]["model_type"]),
            matrices=gguf.GGMLQuantizationType.BF16, tokenizer=_invented_vocabulary(shape),
        )  # fmt: skip
        part.rename(path)
        return path
    *flags, kind = GGUF_FORMS[form]
    tool, part = LLAMA_CPP_TOOLS / "llama-quantize", path.with_suffix(".part")
    command = [tool, *flags, gguf_file(shape, "bf16"), part, kind, "2"]
    subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
    part.rename(path)
    return path


def openvino_folder(shape: str, form: str) -> Path:
    """The OpenVINO model of a shape in one of `OPENVINO_FORMS`."""
    folder = model_folder(shape) / f"openvino-{form}"
    if folder.exists():
        return folder
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    tool = peer_python("openvino").with_name("optimum-cli")
    command = [
        tool, "export", "openvino", "--model", checkpoint(shape), "--task",
        "text-generation-with-past", "--weight-format", "int4", *OPENVINO_FORMS[form], part,
    ]  # fmt: skip
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    subprocess.run([str(word) for word in command], check=True, env=offline)
    part.rename(folder)
    return folder


def _architecture(shape: str) -> str:
    return {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[
        str(PRESETS[shape]["model_type"])
    ]


def _invented_vocabulary(shape: str) -> dict[str, object]:
    """Tokens that stand for nothing, so that llama.cpp loads the file."""
    count = int(str(PRESETS[shape]["vocab_size"]))
    return {
        "ggml.model": "llama",
        "ggml.tokens": ["<unk>", *(f"t{index}" for index in range(1, count))],
        "ggml.token_type": [2] + [1] * (count - 1),
        "ggml.scores": [0.0] * count,
    }


def main() -> None:
    """Make every form of the shapes that are named, or of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar="SHAPE")
    for shape in parser.parse_args().shapes:
        print(checkpoint(shape))
        for form in GGUF_FORMS:
            print(gguf_file(shape, form))
        for form in OPENVINO_FORMS:
            print(openvino_folder(shape, form))


if __name__ == "__main__":
    main()
