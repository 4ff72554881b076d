"""lm-eval, unmodified, on two local tasks; its scores against those computed offline by `LLM`.

Runs in Ridgeline's own environment and starts lm-eval in the one that ``argv[2]`` names.
"""

import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from ridgeline import LLM, SamplingParams

HELDOUT = Path(__file__).parents[2] / "src/ridgeline/assets/heldout/heldout.jsonl"
NUM_DOCS = 24
CHOICE = """task: ridgeline_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: label
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
GENERATE = """task: ridgeline_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/generate.jsonl}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def documents():
    """Texts with the line that really follows and one from elsewhere."""
    generator = random.Random(0)
    texts = [json.loads(line)["text"] for line in HELDOUT.read_text().splitlines()[:400]]
    found = []
    for text in texts:
        lines = [line for line in text.splitlines(keepends=True) if line.strip()]
        if len(lines) >= 8 and lines[6].strip():
            found.append(("".join(lines[:6]), lines[6].rstrip("\n")))
    found = found[:NUM_DOCS]
    others = [line for _, line in found]
    return [
        {"text": text, "choices": [line, generator.choice(others)], "label": 0, "target": line}
        for text, line in found
    ]


def offline(llm, docs):
    """The same by hand: log-likelihood of each continuation, and greedy text."""
    scores, texts = [], []

    def encode(text):
        return llm.tokenizer.encode(text, add_special_tokens=False)  # as lm-eval does

    for doc in docs:
        # lm-eval counts the space at the end of a context to the continuation.
        context = encode(doc["text"].rstrip())
        row = []
        for choice in doc["choices"]:
            whole = context + encode(doc["text"] + choice)[len(context) :]
            params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
            (output,) = llm.generate([whole], params)
            row.append(sum(entry.logprob for entry in output.prompt_logprobs[len(context) :]))
        scores.append(row)
        params = SamplingParams(max_tokens=12, temperature=0.0, stop=("\n",))
        texts.append(llm.generate([encode(doc["text"])], params)[0].outputs[0].text)
    return scores, texts


def main(url, binary):
    docs = documents()
    with tempfile.TemporaryDirectory() as folder:
        for name, template in (("choice", CHOICE), ("generate", GENERATE)):
            Path(folder, f"{name}.yaml").write_text(template.format(folder=folder))
            Path(folder, f"{name}.jsonl").write_text("\n".join(map(json.dumps, docs)))
        model = "model=embedded,tokenizer_backend=remote,num_concurrent=4,max_retries=1"
        command = [
            binary, "run", "--model", "local-completions",
            "--model_args", f"{model},base_url={url}/v1/completions",
            "--tasks", "ridgeline_choice,ridgeline_generate", "--include_path", folder,
            "--output_path", f"{folder}/out", "--log_samples",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-1500:])
        samples = {
            name: sorted(
                (json.loads(line) for path in Path(folder).rglob(f"samples_ridgeline_{name}*")
                 for line in path.read_text().splitlines()),
                key=lambda sample: sample["doc_id"],
            )
            for name in ("choice", "generate")
        }  # fmt: skip
    with LLM(dtype="float32") as llm:
        scores, texts = offline(llm, docs)
    theirs = [[float(r[0][0]) for r in sample["resps"]] for sample in samples["choice"]]
    pairs = [pair for rows in zip(theirs, scores, strict=True) for pair in zip(*rows, strict=True)]
    gap = max(abs(a - b) for a, b in pairs)
    accuracy = sum(row[0] >= row[1] for row in scores) / len(scores)
    reported = sum(sample["acc"] for sample in samples["choice"]) / len(samples["choice"])
    same = sum(s["resps"][0][0] == t for s, t in zip(samples["generate"], texts, strict=True))
    checks = {
        f"loglikelihood: largest difference {gap:.1e} over {2 * len(docs)}": gap < 1e-3,
        f"accuracy {reported:.3f}, offline {accuracy:.3f}": reported == accuracy,
        f"generate_until: {same} of {len(docs)} texts equal": same == len(docs),
    }
    for check, holds in checks.items():
        print(json.dumps({"check": check, "problem": None if holds else "differs"}))


main(sys.argv[1], sys.argv[2])
