"""What reusing documents' KV costs in quality, and what it saves until the first token.

``python -m benchmarks.segment_reuse quality`` takes prompts of four documents of held-out text and
what follows one of them there, on the embedded model. At each of the last tokens the next one's
distribution is compared with that of the whole prompt computed plainly: KL over the 128 likeliest
tokens and the rest as one. ``ttft`` takes four documents that were computed in other requests, in
another order; with ``--model SHAPE`` on random weights.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ridgeline import LLM, SamplingParams
from ridgeline.evaluation import heldout_texts

_DOCUMENTS = 4
_QUESTION = 24  # tokens behind the documents
_ASKED = 12  # of the last of them the next token is compared
_TOP = 128
_HEAD = "Some pages, and a question.\n"

Part = tuple[int, ...]


def prompts(llm: LLM, num_tokens: int) -> Iterator[tuple[Part, list[Part], Part]]:
    """Of each prompt what is before the documents, those, and what follows one of them."""
    assert llm.tokenizer is not None
    length = num_tokens + _QUESTION
    encoded = [llm.tokenizer.encode(text, add_special_tokens=False) for text in heldout_texts()]
    pieces = [tuple(each[:length]) for each in encoded if len(each) >= length]
    head = tuple(llm.tokenizer.encode(_HEAD))
    for number, (first, stop) in enumerate(pairwise(range(0, len(pieces), _DOCUMENTS))):
        part = pieces[first:stop]
        documents = [each[:num_tokens] for each in part]
        yield head, documents, part[number % _DOCUMENTS][num_tokens:]


def distribution(llm: LLM, prompt: Part, params: SamplingParams) -> dict[int, float]:
    """Log-probabilities of the likeliest next tokens."""
    (output,) = llm.generate([list(prompt)], params)
    (logprobs,) = output.outputs[0].logprobs or ()
    return dict(logprobs.top)


def divergence(plain: dict[int, float], found: dict[int, float]) -> float:
    """KL(plain ‖ found) over the tokens that are likely in both, and all others as one."""
    both = sorted(plain.keys() & found.keys())
    p, q = (np.exp([each[token] for token in both]) for each in (plain, found))
    p, q = (np.append(each, max(1e-9, 1 - each.sum())) for each in (p, q))
    return float((p * np.log(p / q)).sum())


def quality(llm: LLM, reuses: Sequence[int], num_tokens: int) -> dict[str, Any]:
    """KL from the plain run, and how often the likeliest token is the same, by computed tokens."""
    found: dict[int, list[float]] = {reuse: [] for reuse in reuses}
    same: dict[int, list[bool]] = {reuse: [] for reuse in reuses}
    count = 0
    for head, documents, question in prompts(llm, num_tokens):
        count += 1
        whole = head + tuple(token for each in documents for token in each) + question
        for cut in range(len(whole) - _ASKED, len(whole)):
            settings: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "logprobs": _TOP}
            plain = distribution(llm, whole[:cut], SamplingParams(**settings))
            for reuse in reuses:
                params = SamplingParams(**settings, segments=documents, segment_reuse=reuse)
                other = distribution(llm, whole[:cut], params)
                found[reuse].append(divergence(plain, other))
                same[reuse].append(
                    max(plain, key=plain.__getitem__) == max(other, key=other.__getitem__)
                )
    base = statistics.fmean(found[reuses[0]])
    return {
        "prompts": count,
        "tokens_of_a_document": num_tokens,
        "kl": {str(reuse): statistics.fmean(each) for reuse, each in found.items()},
        "kl_of_none": {str(reuse): statistics.fmean(each) / base for reuse, each in found.items()},
        "same_top": {str(reuse): statistics.fmean(each) for reuse, each in same.items()},
    }


def ttft(llm: LLM, num_tokens: int, rounds: int) -> dict[str, Any]:
    """Medians of rounds, in turns: the prompt computed plainly, and its documents taken over."""
    rng = np.random.default_rng(0)
    vocab = llm.spec.vocab_size

    def fresh(count: int) -> Part:
        return tuple(rng.integers(3, vocab, size=count).tolist())

    documents = [fresh(num_tokens) for _ in range(_DOCUMENTS)]
    seconds: dict[str, list[float]] = {"plain": [], "0": [], "16": []}
    cached: dict[str, int] = {}
    for turn in range(rounds + 1):
        order = rng.permutation(_DOCUMENTS).tolist()
        for name in seconds:
            parts = [documents[each] for each in order]
            prompt = fresh(20 + turn) + tuple(t for each in parts for t in each) + fresh(16)
            settings: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0}
            if name != "plain":
                settings |= {"segments": parts, "segment_reuse": int(name)}
            (output,) = llm.generate([list(prompt)], SamplingParams(**settings))
            assert output.timings is not None
            assert output.timings.ttft_s is not None
            if turn:  # the first computes the documents
                seconds[name].append(output.timings.ttft_s)
                cached[name] = output.num_cached_tokens
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "tokens_of_a_document": num_tokens,
        "ttft_s": medians,
        "times_faster": {name: medians["plain"] / each for name, each in medians.items()},
        "cached_tokens": cached,
    }


def main() -> None:
    """Measure, and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("quality", "ttft"))
    parser.add_argument("--model")
    parser.add_argument("--tokens", type=int, default=208, help="of a document")
    parser.add_argument("--reuses", type=int, nargs="+", default=[0, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-dtype", default="auto")
    args = parser.parse_args()
    settings: dict[str, Any] = {
        "executor": "cpu", "enable_segment_reuse": True, "kv_cache_dtype": args.kv_cache_dtype,
        "max_num_seqs": 4,
    }  # fmt: skip
    if args.model is not None:
        settings |= {"load_format": "dummy", "max_model_len": _DOCUMENTS * args.tokens + 256}
    with LLM(args.model, **settings) as llm:
        if args.what == "quality":
            found = quality(llm, args.reuses, args.tokens)
        else:
            found = ttft(llm, args.tokens, args.rounds)
    print(json.dumps({"model": llm.name, "kv_cache_dtype": args.kv_cache_dtype} | found))


if __name__ == "__main__":
    main()
