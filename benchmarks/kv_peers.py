"""What KV out of another engine's memory gives, and what a peer that fails costs.

    python -m benchmarks.kv_peers [--tokens 4096] [--pairs 5] [--requests 600] [--short 500]

A second process has an engine that gives out its KV. First, with random weights in the shape of
SmolLM2-135M: seconds to the first token of a new prompt, and in turns of one that the other engine
has computed just before (the last block is always computed). Then the embedded model answers
prompts of ``--short`` tokens, each once by an engine without peers and once by one with, while the
other process is stopped and continued, twice, and killed; tokens are compared. Without pairs, this
alone. Prints one JSON object.
"""

import argparse
import json
import multiprocessing
import os
import random
import secrets
import signal
import socket
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median, quantiles

from benchmarks.shapes import shape_folder
from ridgeline import LLM, SamplingParams

_PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
_VOCABULARY = 4000
_RAM_BYTES = 2 << 30
_SAVED_S = 0.3  # in which a thread has written a prompt's last blocks
_STOPPED_FOR = 20  # requests
Settings = dict[str, object]


def answer(model: str | None, settings: Settings, orders: Connection) -> None:
    """The other engine: computes each prompt that it is sent, and says when its KV is there."""
    with LLM(model, **settings) as llm:
        orders.send("ready")
        while (prompt := orders.recv()) is not None:
            llm.generate([prompt], _PARAMS)
            time.sleep(_SAVED_S)
            orders.send("done")


class Peer:
    """The process of the other engine, which gives out its KV at ``address``."""

    def __init__(self, model: str | None, key: str, settings: Settings) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        own = {"kv_peer_address": self.address, "kv_ram_tier_bytes": _RAM_BYTES}
        spawn = multiprocessing.get_context("spawn")
        self._orders, theirs = spawn.Pipe()
        given = (model, settings | own | {"kv_peer_key_file": key}, theirs)
        self._process = spawn.Process(target=answer, args=given)
        self._process.start()
        self._orders.recv()

    def compute(self, prompt: list[int]) -> None:
        self._orders.send(prompt)
        self._orders.recv()

    def signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)


def first_token(llm: LLM, prompt: list[int]) -> tuple[float, int, int]:
    """Seconds to it, the token, and how many of the prompt's were cached."""
    began_s = time.perf_counter()
    (result,) = llm.generate([prompt], _PARAMS)
    seconds = time.perf_counter() - began_s
    return seconds, result.outputs[0].token_ids[0], result.num_cached_tokens


def prefixes(key: str, num_tokens: int, pairs: int) -> dict[str, object]:
    """A prompt that nobody has computed, and one that the peer has, in turns."""
    rng = random.Random(0)
    seconds: dict[str, list[float]] = {"cold": [], "peer": []}
    cached = set()
    settings: Settings = {"load_format": "dummy", "max_num_seqs": 4}
    settings |= {"kv_cache_memory_bytes": 1 << 30, "max_model_len": num_tokens + 64}
    with shape_folder("smollm2-135m") as folder:
        peer = Peer(str(folder), key, settings)
        peers = {"kv_peers": (peer.address,), "kv_peer_key_file": key}
        with LLM(str(folder), **settings, **peers) as llm:
            for _ in range(pairs + 1):
                for kind in seconds:
                    prompt = [rng.randrange(_VOCABULARY) for _ in range(num_tokens)]
                    if kind == "peer":
                        peer.compute(prompt)
                    taken_s, _, num_cached = first_token(llm, prompt)
                    seconds[kind].append(taken_s)
                    if kind == "peer":
                        cached.add(num_cached)
        peer.signal(signal.SIGKILL)
    cold_s, peer_s = (median(each[1:]) for each in seconds.values())  # the first warms up
    return {
        "tokens": num_tokens,
        "cached": sorted(cached),
        "cold_s": round(cold_s, 3),
        "peer_s": round(peer_s, 3),
        "ratio": round(peer_s / cold_s, 3),
    }


def faults(key: str, num_requests: int, num_tokens: int) -> dict[str, object]:
    """The same prompts without peers and with one that is stopped, continued, and killed."""
    rng = random.Random(1)
    settings: Settings = {"max_num_seqs": 1}
    peer = Peer(None, key, settings)
    peers = {"kv_peers": (peer.address,), "kv_peer_key_file": key}
    plain: list[float] = []
    peered: list[float] = []
    wrong = 0
    with LLM(None, **settings) as without, LLM(None, **settings, **peers) as llm:
        for number in range(num_requests):
            if number in (num_requests // 4, num_requests // 2):
                peer.signal(signal.SIGSTOP)
            elif number in (num_requests // 4 + _STOPPED_FOR, num_requests // 2 + _STOPPED_FOR):
                peer.signal(signal.SIGCONT)
            elif number == 3 * num_requests // 4:
                peer.signal(signal.SIGKILL)
            prompt = [rng.randrange(10, _VOCABULARY) for _ in range(num_tokens)]
            tokens = set()
            kinds = [(without, plain), (llm, peered)]
            for each, seconds in kinds if number % 2 else reversed(kinds):
                taken_s, token, _ = first_token(each, prompt)
                seconds.append(taken_s)
                tokens.add(token)
            wrong += len(tokens) > 1
    p99_s = [quantiles(each, n=100)[98] for each in (plain, peered)]
    return {
        "requests": num_requests,
        "wrong": wrong,
        "median_ratio": round(median(peered) / median(plain), 3),
        "p99_s": [round(each, 4) for each in p99_s],
        "p99_ratio": round(p99_s[1] / p99_s[0], 3),
        "longest_s": round(max(peered), 3),
    }


def main() -> None:
    """Measure both, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--short", type=int, default=500)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        path.touch(mode=0o600)
        path.write_bytes(secrets.token_bytes(32))
        key, pairs = str(path), arguments.pairs
        found = {"faults": faults(key, arguments.requests, arguments.short)}
        if pairs:
            found["prefix"] = prefixes(key, arguments.tokens, pairs)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
