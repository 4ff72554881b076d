"""What ``--help`` of each command shows at its end: lines that may be typed as they are."""

EXAMPLES = {
    "serve": (
        "ridgeline serve",
        "ridgeline serve Qwen/Qwen3-0.6B --quantization int4 --port 8080",
        "ridgeline serve model.gguf --host 0.0.0.0 --api-key secret",
        "ridgeline serve Qwen/Qwen3-0.6B -tp 2",
        "ridgeline serve small=Qwen/Qwen3-0.6B Qwen/Qwen3-4B --memory 8GiB --model-ttl 10m",
    ),
    "route": (
        "ridgeline route --engine http://a:8000 --engine http://b:8000 --router-key-file key",
    ),
    "fleet": (
        "ridgeline fleet up fleet.yaml",
        "ridgeline fleet up fleet.yaml --manifests manifests",
        "ridgeline fleet plan fleet.yaml",
        "ridgeline fleet status fleet.yaml",
        "ridgeline fleet verify fleet.yaml",
        "ridgeline fleet drain fleet.yaml 1",
        "ridgeline fleet replay fleet.yaml night.jsonl --speed 4",
    ),
    "cascade": (
        "ridgeline cascade calibrate sample.jsonl --small http://a:8000 --large http://b:8000",
    ),
    "worker": (
        "ridgeline worker --join first-machine:7070 --key-file key",
        "ridgeline worker ~/models/qwen3 --join 10.0.0.1:7070 --key-file key --once",
    ),
    "generate": (
        "ridgeline generate -p 'def fibonacci(n):' -n 64 --temperature 0",
        "ridgeline generate Qwen/Qwen3-0.6B --prompt-file notes.txt --json",
    ),
    "chat": (
        "ridgeline chat Qwen/Qwen3-0.6B --quantization int4",
        "ridgeline chat model.gguf --system 'Answer briefly.'",
        "ridgeline chat Qwen/Qwen3-0.6B 'Why is the sky blue?'",
    ),
    "pull": (
        "ridgeline pull Qwen/Qwen3-0.6B --alias qwen",
        "ridgeline pull unsloth/Qwen3-0.6B-GGUF:Q4_K_M",
    ),
    "list": ("ridgeline list", "ridgeline list ~/models --json"),
    "show": ("ridgeline show Qwen/Qwen3-0.6B",),
    "rm": ("ridgeline rm unsloth/Qwen3-0.6B-GGUF:Q4_K_M",),
    "embed": (
        "ridgeline embed BAAI/bge-small-en-v1.5 -p 'What is a roofline?'",
        "ridgeline embed BAAI/bge-small-en-v1.5 -i texts.jsonl --truncate -1",
    ),
    "rerank": ("ridgeline rerank BAAI/bge-reranker-base -q 'What is a roofline?' -i texts.txt",),
    "batch": ("ridgeline batch requests.jsonl Qwen/Qwen3-0.6B -o answers.jsonl",),
    "probe": ("ridgeline probe http://127.0.0.1:8000 --concurrency 1,8",),
    "bench": (
        "ridgeline bench --shape llama-3.2-1b --quantization int4 --batch 1,8,32",
        "ridgeline bench serve --rate 1,2,4 --ttft-slo 500",
        "ridgeline bench ladder",
    ),
    "bench-figures": ("ridgeline bench figures --budget 5m --only K1,B7",),
    "bench-links": ("ridgeline bench links --ranks 4",),
    "quantize": ("ridgeline quantize Qwen/Qwen3-0.6B -o qwen-int4",),
    "prune": (
        "ridgeline prune Qwen/Qwen3-0.6B -o qwen-sparse --pattern 2:4",
        "ridgeline prune Qwen/Qwen3-0.6B -o qwen-small --remove-ffn 0.25",
    ),
    "distill": (
        "ridgeline distill qwen-small --teacher Qwen/Qwen3-0.6B -o qwen-healed --train-text texts",
        "ridgeline distill qwen-small --teacher Qwen/Qwen3-0.6B -o qwen-healed --ranks 2",
    ),
    "train-adapter": (
        "ridgeline train-adapter Qwen/Qwen3-0.6B -o adapter --context system-prompt.txt",
        "ridgeline train-adapter Qwen/Qwen3-0.6B -o adapter --train-text texts",
    ),
    "eval": ("ridgeline eval qwen-int4 --against Qwen/Qwen3-0.6B",),
    "convert": (
        "ridgeline convert Qwen/Qwen3-0.6B qwen.gguf --gguf-type q4_k_m",
        "ridgeline convert meta-llama/Llama-2-7b-hf -o llama-gqa --kv-heads 8",
    ),
    "imatrix": ("ridgeline imatrix Qwen/Qwen3-0.6B -o qwen.imatrix.gguf",),
    "profile": ("ridgeline profile --shape llama-3.2-1b --quantization int4",),
    "bench-serve": (
        "ridgeline bench serve --rate 1,2,4 --ttft-slo 500",
        "ridgeline bench serve --url http://127.0.0.1:8000 --concurrency 1,8",
    ),
    "bench-ladder": ("ridgeline bench ladder --subjects embedded,1b",),
    "plan": (
        "ridgeline plan --shape llama-3.1-8b --hardware h100 --count 8 --layouts --slo tpot=0.01",
        "ridgeline plan --shape llama-3.1-8b --hardware l4 --rate 0.5 --slo ttft=0.5,tpot=0.1",
    ),
    "optimize": (
        "ridgeline optimize --workload chat --budget 2m --html report.html",
        "ridgeline optimize Qwen/Qwen3-0.6B --trace day.jsonl --slo ttft=0.5,tpot=0.05",
    ),
    "tune": ("ridgeline tune http://127.0.0.1:8000 --slo ttft=0.5,tpot=0.05",),
    "rank": (
        "ridgeline rank qwen2.5-0.5b llama-3.2-1b llama-3.1-8b --hardware l4,h100 --context 4000",
    ),
    "memory": ("ridgeline memory --shape llama-3.1-8b --quantization int4",),
    "cost": ("ridgeline cost --hardware h100 --output-tok-s 2500",),
    "hardware": ("ridgeline hardware",),
    "ceilings": ("ridgeline ceilings",),
    "roofline": ("ridgeline roofline --shape llama-3.2-1b",),
    "collect-env": ("ridgeline collect-env --json",),
    "completion": (
        "ridgeline completion bash",
        "ridgeline completion zsh",
    ),
}
EXAMPLES["run"] = tuple(line.replace(" chat ", " run ") for line in EXAMPLES["chat"])
