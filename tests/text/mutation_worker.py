"""Loads mutated tokenizer folders, one line of JSON per case; run by test_mutations.

``python -m tests.text.mutation_worker FOLDERS SCRATCH FIRST COUNT``
"""

import json
import random
import resource
import shutil
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ridgeline.core.errors import RidgelineError
from ridgeline.text import ChatTemplate, IncrementalDetokenizer, Tokenizer

FILES = ("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
JUNK: list[Any] = [
    None, True, -1, 0, 1, 2**31, 2**32, 2**63, 2**64, 10**30, 1e308, -0.5, "", "x", "\x00", "▁" * 9,
    [], {}, [[]], {"a": 1}, [1, 2], ["a", "b"], "a b", "<s>", {"content": 5}, {"type": "BPE"},
]  # fmt: skip


def _slots(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every (container, key) below ``value``; long lists and vocabularies only in part."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value))
    if len(items) > 60:
        items = items[:20] + items[-20:]
    for key, item in items:
        found.append((value, key))
        if isinstance(item, dict | list):
            _slots(item, found)
    return found


def _in_json(change: Callable[[random.Random, Any, Any], None]) -> Callable[..., bytes]:
    def mutate(rng: random.Random, data: bytes) -> bytes:
        tree = json.loads(data)
        for _ in range(rng.choice([1, 1, 1, 3])):
            slots = _slots(tree, [])
            if slots:
                change(rng, *rng.choice(slots))
        return json.dumps(tree).encode()

    return mutate


def _swap_type(rng: random.Random, container: Any, key: Any) -> None:
    container[key] = rng.choice(JUNK)


def _delete(_rng: random.Random, container: Any, key: Any) -> None:
    del container[key]


def _huge_number(rng: random.Random, container: Any, key: Any) -> None:
    container[key] = rng.choice([2**31, 2**32 - 1, 2**32, 2**53, 2**63, 2**64, 10**400, -(2**63)])


def _rename(rng: random.Random, container: Any, key: Any) -> None:
    if isinstance(container, dict):
        container[rng.choice(["type", "content", "id", "x", ""])] = container.pop(key)
    else:
        container.append(container[key])


def _duplicate_value(rng: random.Random, container: Any, key: Any) -> None:
    other, other_key = rng.choice(_slots(container, []))
    container[key] = json.loads(json.dumps(other[other_key]))


def _flip(rng: random.Random, data: bytes) -> bytes:
    mutated = bytearray(data)
    for _ in range(rng.randrange(1, 20)):
        mutated[rng.randrange(len(mutated))] = rng.randrange(256)
    return bytes(mutated)


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def _nest(rng: random.Random, data: bytes) -> bytes:
    depth = rng.choice([130, 1_000, 100_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    nested = opening * depth + b"1" + closing * rng.choice([depth, 0])
    at = data.find(b":", rng.randrange(len(data)))
    return data[: at + 1] + nested + data[at + 1 :]


def _raw_text(rng: random.Random, data: bytes) -> bytes:
    junk = [b'"\\ud800"', b"NaN", b"1e999", b"9" * 5000, b"\xff\xfe", b"//", b'""', b"-0", b"\x00"]
    at = data.find(b":", rng.randrange(len(data)))
    return data[: at + 1] + rng.choice(junk) + b"," + data[at + 1 :]


MUTATIONS: list[Callable[[random.Random, bytes], bytes]] = [
    _flip,
    _truncate,
    _nest,
    _raw_text,
    *map(_in_json, (_swap_type, _swap_type, _delete, _huge_number, _rename, _duplicate_value)),
]


def use(folder: Path) -> None:
    """Load a folder and do with it what an engine does."""
    tokenizer = Tokenizer.from_folder(folder)
    template = ChatTemplate.from_tokenizer(tokenizer)
    for text in ("Hello wörld 你好 🎉 <s> </s>\n\n  x", "", "a" * 300):
        ids = tokenizer.encode(text)
        tokenizer.decode(ids, skip_special_tokens=False)
    ids = list(range(0, 600, 7))
    text = tokenizer.decode(ids)
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(ids) + detokenizer.finish() == text
    for index in range(0, 800, 31):
        tokenizer.token_bytes(index)
    tokenizer.digest()
    assert all(isinstance(index, int) for index in tokenizer.eos_token_ids)
    if template is not None:
        template.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)


def main() -> None:
    """Run the cases FIRST … FIRST + COUNT, announcing each before it begins."""
    folders, scratch = Path(sys.argv[1]), Path(sys.argv[2])
    first, count = int(sys.argv[3]), int(sys.argv[4])
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    bases = sorted(folders.iterdir())
    for case in range(first, first + count):
        rng = random.Random(case)
        folder = scratch / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(bases[case % len(bases)], folder)
        path = folder / rng.choice(FILES)
        path.write_bytes(MUTATIONS[case // len(bases) % len(MUTATIONS)](rng, path.read_bytes()))
        print(json.dumps({"case": case, "begins": True}), flush=True)
        start = time.process_time()
        outcome = "works"
        try:
            use(folder)
        except RidgelineError as error:
            outcome = "refused" if str(error).isprintable() and str(error) else "bad message"
        except BaseException:
            outcome = traceback.format_exc()
        seconds = time.process_time() - start
        print(json.dumps({"case": case, "outcome": outcome, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
