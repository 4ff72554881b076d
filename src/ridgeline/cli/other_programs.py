"""Commands and options of Ollama, llama.cpp and vLLM, and what stands here in their place."""

# What vLLM's `bench` measures: the end of "there is no command bench NAME".
BENCH_COMMANDS = {
    "throughput": "`ridgeline bench --batch 32` measures decode steps, "
    "and `ridgeline bench serve --concurrency 32` whole requests",
    "latency": "`ridgeline bench` measures steps",
    "sweep": "`ridgeline optimize` tries settings",
}
# The end of a sentence that begins with "there is no command NAME".
COMMANDS = {
    "ps": "the `/api/ps` of a running server lists what is in memory",
    "stop": "Ctrl-C ends a server, and POST /admin/models/unload lets one of several models go",
    "cp": "`ridgeline pull MODEL --alias NAME` gives a model a second name",
    "create": "there are no Modelfiles; settings are options, or a file: "
    "`ridgeline serve --config FILE.yaml`",
    "push": "models are only downloaded; `hf upload` of huggingface_hub uploads a folder",
    "ls": "`ridgeline list` lists the models on this machine",
    "download": "`ridgeline pull` downloads a model",
    "complete": "`ridgeline generate` completes a prompt",
    "run-batch": "`ridgeline batch` answers a file of requests",
    "perplexity": "`ridgeline eval` measures it",
    "launch": "`ridgeline serve` has the APIs of OpenAI, Anthropic and Ollama; point a tool at it",
    "models": "`ridgeline list` lists the models on this machine",
    "unload": "POST /admin/models/unload lets one of several models of a server go",
    "version": "`ridgeline --version` prints it",
    "help": "`ridgeline --help` lists the commands, and `ridgeline COMMAND --help` its options",
}
_OPTIONS = {
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--num-ctx": "--max-model-len",
    "--n-predict": "--max-tokens",
    "--num-predict": "--max-tokens",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "-np": "--max-num-seqs",
    "--num-prompts": "--num-requests",
    "--parallel": "--max-num-seqs",
    "-f": "--prompt-file",
    "--file": "--prompt-file",
    "-p": "--port",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-md": "--draft-model",
    "--model-draft": "--draft-model",
    "--lora": "--adapters",
    "--lora-modules": "--adapters",
    "-ctk": "--kv-cache-dtype",
    "--cache-type-k": "--kv-cache-dtype",
    "--type": "--gguf-type",
    "--tp-size": "--tensor-parallel-size",
    "--device": "--executor",
    "--draft": "--num-speculative-tokens",
    "--draft-max": "--num-speculative-tokens",
    "--draft-n": "--num-speculative-tokens",
    "--keep-alive": "--model-ttl",
    "--speculative-config": "--speculation",
    "--enable-log-requests": "--log-requests",
    "--backend": "--executor",
}
_NO_LAYERS = "layers are not moved to a GPU one by one; --executor cuda runs a model there"
_NO_NEED = {
    "-ngl": _NO_LAYERS,
    "--gpu-layers": _NO_LAYERS,
    "--n-gpu-layers": _NO_LAYERS,
    "-fa": "attention never writes its scores to memory",
    "--flash-attn": "attention never writes its scores to memory",
    "-hf": "a hub name is given as the model: ridgeline serve NAME",
    "-hfr": "a hub name is given as the model: ridgeline serve NAME",
    "--hf-repo": "a hub name is given as the model: ridgeline serve NAME",
    "--cpu-offload-gb": "--weights-memory-bytes is what stays in memory, and disk has the rest",
    "--trust-remote-code": "no code of a model is ever run",
    "--enable-lora": "--adapters NAME=FOLDER is enough",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-auto-tool-choice": "--tool-call-parser is enough",
    "--stream": "text is printed as it is made, but for --json",
    "--jinja": "chat templates are always used",
    "--tokenizer": "the tokenizer is the model's own",
    "--tokenizer-mode": "the tokenizer is the model's own",
}


def meant_option(word: str, known: frozenset[str]) -> str | None:
    """What to do in place of an option of another program, if ``known`` has it: the end of a
    sentence that says that there is no option ``word``."""
    option = _OPTIONS.get(word)
    return f"here it is {option}" if option in known else _NO_NEED.get(word)
