"""Commands and options of Ollama, llama.cpp and vLLM, and what stands here in their place."""

from ridgeline.core.sampling_params import MAX_LOGPROBS

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
# Options of ours, and what others call them.
_NAMES = {
    "--max-model-len": "-c --ctx-size --num-ctx",
    "--max-tokens": "-n --n-predict --num-predict",
    "--temperature": "--temp",
    "--repetition-penalty": "--repeat-penalty",
    "--seed": "-s",
    "--stop": "-r --reverse-prompt",
    "--structured-outputs": "-j --json-schema --grammar --grammar-file --format",
    "--max-num-seqs": "-np --parallel",
    "--max-num-batched-tokens": "-b --batch-size -ub --ubatch-size",
    "--num-requests": "--num-prompts",
    "--prompt-file": "-f --file",
    "--system": "-sys --system-prompt",
    "--plain": "--nowordwrap --simple-io",
    "--show-reasoning": "--think --hidethinking",
    "--port": "-p",
    "--stall-timeout-s": "-to --timeout",
    "--served-model-name": "-a --alias",
    "--ssl-keyfile": "--ssl-key-file",
    "--ssl-certfile": "--ssl-cert-file",
    "--allow-origin": "--allowed-origins",
    "--otlp-endpoint": "--otlp-traces-endpoint",
    "--chat-template": "--chat-template-file",
    "--reasoning-parser": "--reasoning-format --enable-reasoning",
    "--log-requests": "--enable-log-requests",
    "--no-log-requests": "--log-disable --disable-log-requests --disable-uvicorn-access-log",
    "--revision": "--tokenizer-revision --code-revision",
    "--quantization": "-q --quantize",
    "--gguf-type": "--type",
    "--adapters": "--lora --lora-scaled --lora-modules",
    "--kv-cache-dtype": "-ctk --cache-type-k -ctv --cache-type-v",
    "--kv-cache-memory-bytes": "--num-gpu-blocks-override",
    "--kv-ram-tier-bytes": "-cram --cache-ram --swap-space",
    "--kv-disk-tier-path": "--slot-save-path",
    "--block-tokens": "--block-size",
    "--state-checkpoint-tokens": "--ctx-checkpoints",
    "--no-enable-prefix-caching": "--no-cache-prompt",
    "--enable-segment-reuse": "--cache-reuse",
    "--speculation": "--speculative-config",
    "--draft-model": "-md --model-draft --speculative-model",
    "--num-speculative-tokens": "--draft --draft-max --draft-n",
    "--executor": "--device --backend -dev",
    "--tensor-parallel-size": "--tp-size -ts --tensor-split -sm --split-mode -mg --main-gpu",
    "--expert-parallel-size": "--enable-expert-parallel",
    "--launcher": "--distributed-executor-backend --data-parallel-backend",
    "--workers": "--nnodes",
    "--worker-address": "--master-addr",
    "--model-ttl": "--keep-alive --keepalive --sleep-idle-seconds --enable-sleep-mode",
}
_OPTIONS = {name: option for option, names in _NAMES.items() for name in names.split()}
_IN_REQUESTS = (
    "requests say how they are sampled, and what they leave out the model's generation_config.json"
)
_SAMPLING = {
    "--max-tokens", "--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty",
    "--presence-penalty", "--frequency-penalty", "--stop", "--structured-outputs", "--ignore-eos",
    "--logit-bias", "--system",
}  # fmt: skip
_TOLD = {
    "layers are not moved to a GPU one by one; --executor cuda runs a model there": (
        "-ngl --gpu-layers --n-gpu-layers -ngld --n-cpu-moe --cpu-moe -ot --override-tensor "
        "--no-kv-offload --no-op-offload"
    ),
    "attention never writes its scores to memory": "-fa --flash-attn",
    "a hub name is given as the model, with its quantization after a colon: ridgeline serve "
    "OWNER/NAME:Q4_K_M": "-hf -hfr --hf-repo -hff --hf-file",
    "download the file first: a model is a folder, a GGUF file or a hub name": "-mu --model-url",
    "the environment variable HF_TOKEN has it": "-hft --hf-token",
    "the environment variable HF_HOME says where downloads are kept": "--download-dir",
    "-t is of all threads": "-tb --threads-batch --threads-http",
    "packed weights are in memory, as far as --weights-memory-bytes allows": (
        "--mlock --no-mmap --mmap"
    ),
    "--weights-memory-bytes is what stays in memory, and disk has the rest": "--cpu-offload-gb",
    "numactl binds a process to a part of the memory": "--numa",
    "no code of a model is ever run": "--trust-remote-code",
    "--adapters NAME=FOLDER is enough": "--enable-lora --max-loras --max-lora-rank",
    "prompts are always computed in chunks": "--enable-chunked-prefill",
    "--max-num-batched-tokens and --tpot-slo-s say how prompts are cut": (
        "--long-prefill-token-threshold --max-num-partial-prefills"
    ),
    "batches are always continuous, but for --batching": "-cb --cont-batching",
    "the next step is always planned while one runs": "--async-scheduling",
    "--tool-call-parser is enough": "--enable-auto-tool-choice",
    "text is printed as it is made, but for --json": "--stream",
    "chat templates are always used": "--jinja --no-jinja",
    "requests have chat_template_kwargs": "--chat-template-kwargs",
    "the tokenizer is the model's own": "--tokenizer --tokenizer-mode",
    "token ids are taken in place of a text": "--skip-tokenizer-init",
    "`ridgeline chat` is a conversation, and its -p TEXT one answer": (
        "-i --interactive -cnv --conversation -no-cnv --no-conversation -st --single-turn"
    ),
    "a line ends by Alt-Enter, and three quotes are around a text of several": (
        "-mli --multiline-input"
    ),
    "the shell has such: $'a\\nb'": "-e --escape",
    "--json has the answer alone": "--no-display-prompt",
    "tokens and seconds are always told on standard error": "-v --verbose --perf --log-verbosity",
    "the log is standard error": "--log-file",
    "on a terminal answers are rendered, but for --plain": "--color",
    "/file puts a file into a chat, `ridgeline generate --prompt-file` completes one": "-f --file",
    "`ridgeline serve` is the server": "--host --port --api-key --api-key-file",
    "a model is there until the command ends": "--keep-alive --keepalive",
    "`ridgeline --version` prints it": "--version",
    "models run by Ridgeline's own code": "--model-impl",
    "answers have the role assistant": "--response-role",
    "a proxy before the server does so": "--root-path --middleware",
    "a stream has its usage where stream_options asks for it": "--enable-force-include-usage",
    "requests have logit_bias and structured outputs": "--logits-processors",
    "--no-log-requests leaves out the lines of requests": "--uvicorn-log-level",
    "there are temperature, top_k, top_p, min_p and three penalties": (
        "--samplers --sampling-seq --typical --mirostat --repeat-last-n --dry-multiplier "
        "--xtc-probability"
    ),
    "an output ends where its context is full; a chat leaves out its oldest turns": (
        "--keep --context-shift --no-context-shift"
    ),
    "max_tokens of a request are of reasoning as well": "--reasoning-budget",
    "only text is read": "--mmproj --limit-mm-per-prompt --mm-processor-kwargs --media-path",
    "a layer with a window keeps no more than that": "--swa-full",
    "the context is cut to what memory holds by itself": "--fit",
    "what a model's files say is taken: it is changed in its config.json": (
        "--rope-scaling --rope-freq-base --rope-freq-scale --rope-theta --yarn-orig-ctx "
        "--override-kv --hf-overrides"
    ),
    "the model's generation_config.json is read, and requests say otherwise": (
        "--generation-config --override-generation-config"
    ),
    "what a model makes follows from its files, and has its routes: /v1/embeddings, /v1/rerank, "
    "/v1/chat/completions": (
        "--embedding --embeddings --rerank --reranking --pooling --pooler-config --task --runner "
        "--convert"
    ),
    "/metrics, /props and /slots are always there": "--metrics --props --slots --no-slots",
    "the page is at the server's address": "--webui --no-webui",
    "several models are named one after the other: ridgeline serve A B --memory 8GiB": (
        "--models-dir --models-max"
    ),
    "a first request always runs before the server is ready": "--no-warmup",
    "`ridgeline collect-env` tells of the devices": "--list-devices",
    "nice(1) says so": "--prio",
    "--speculation adaptive decides when to draft": "--draft-min --draft-p-min",
    "nothing is compiled but kernels": (
        "-O -cc --enforce-eager --compilation-config --optimization-level --max-seq-len-to-capture"
    ),
    "grammars are always llguidance's": "--guided-decoding-backend --structured-outputs-config",
    "KV is shared by --kv-peers, --kv-redis-url and --kv-disk-tier-path": "--kv-transfer-config",
    "the model has a process of its own, and --replicas are several": (
        "--disable-frontend-multiprocessing --api-server-count"
    ),
    "`ridgeline worker --join` is on other machines": "--headless --node-rank",
    "prompts are never logged": "--max-log-len",
    "metrics are read at /metrics": "--disable-log-stats",
    "usage always has the cached tokens": "--enable-prompt-tokens-details",
    f"requests ask for up to {MAX_LOGPROBS}": "--max-logprobs",
    "downloads are by HTTPS alone": "--insecure",
    "`ridgeline show` prints all that is known": (
        "--license --parameters --template --modelfile --system"
    ),
}
_NO_NEED = {name: text for text, names in _TOLD.items() for name in names.split()}


def meant_option(word: str, known: frozenset[str]) -> str | None:
    """What to do in place of an option of another program, if ``known`` has it: the end of a
    sentence that says that there is no option ``word``."""
    option = _OPTIONS.get(word, word)
    if option in known:
        return f"here it is {option}"
    if option in _SAMPLING and "--port" in known and "--served-model-name" in known:
        return _IN_REQUESTS
    return _NO_NEED.get(word)
