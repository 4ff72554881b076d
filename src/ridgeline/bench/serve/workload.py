"""Seeded requests: when they arrive, how long they are, and what they share."""

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline.core.errors import InvalidRequestError

Length = Callable[[random.Random], int]

_NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One request of a conversation: tokens that are new in its prompt, and its output's length."""

    new_token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialogue:
    """Turns one after the other; the first is due ``at_s`` seconds after the run's start.

    The prompt of a turn is everything before it, answers included, and its own tokens.
    ``at_s`` is ``None`` in a closed loop, where it starts as soon as there is a place.
    """

    user: int
    at_s: float | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Conversations to make. ``rate`` is of conversations per second, Poisson; ``None``: closed.

    Each conversation begins with one of ``num_prefixes`` shared prefixes of ``prefix_tokens``.
    """

    num_conversations: int
    input_length: Length
    output_length: Length
    rate: float | None = None
    num_turns: int = 1
    prefix_tokens: int = 0
    num_prefixes: int = 1
    vocab: range = range(10, 1000)
    seed: int = 0

    def at(self, *, rate: float | None, seed: int) -> "Workload":
        """The same kind of requests at another rate, with other contents."""
        return replace(self, rate=rate, seed=seed)

    def conversations(self) -> Iterator[Dialogue]:
        """The same ones for the same seed, whatever the rate."""
        lengths, arrivals = random.Random(f"lengths {self.seed}"), random.Random(f"at {self.seed}")
        prefixes = [
            _tokens(random.Random(f"prefix {self.seed} {index}"), self.prefix_tokens, self.vocab)
            for index in range(self.num_prefixes)
        ]
        at_s = 0.0
        for user in range(self.num_conversations):
            content = random.Random(f"content {self.seed} {user}")
            prefix = prefixes[lengths.randrange(self.num_prefixes)]
            turns = []
            for index in range(self.num_turns):
                new = _tokens(content, self.input_length(lengths), self.vocab)
                turns.append(
                    Turn(
                        new_token_ids=prefix + new if index == 0 else new,
                        max_tokens=self.output_length(lengths),
                    )
                )
            yield Dialogue(user=user, at_s=None if self.rate is None else at_s, turns=tuple(turns))
            at_s += 0.0 if self.rate is None else arrivals.expovariate(self.rate)


def read_trace(path: Path, *, vocab: range, seed: int = 0) -> list[Dialogue]:
    """Conversations of one turn from JSON lines of {"at_s", "prompt_tokens", "output_tokens"}.

    Lines of the same "prefix" (a name) begin with the same "prefix_tokens" tokens.

    Raises:
        InvalidRequestError: the file cannot be read, or a line is not such an object.
    """
    conversations = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"The trace {path} cannot be read: {error}") from error
    for number, line in enumerate(filter(str.strip, lines)):
        try:
            entry = json.loads(line)
            prompt_tokens, max_tokens = int(entry["prompt_tokens"]), int(entry["output_tokens"])
            at_s, shared = float(entry["at_s"]), int(entry.get("prefix_tokens", 0))
            if min(prompt_tokens, max_tokens) < 1 or at_s < 0 or not 0 <= shared <= prompt_tokens:
                raise ValueError("out of bounds")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequestError(f"{path}, request {number + 1}: {error!r}") from error
        prefix = _tokens(random.Random(f"prefix {seed} {entry.get('prefix')}"), shared, vocab)
        rest = _tokens(random.Random(f"content {seed} {number}"), prompt_tokens - shared, vocab)
        turn = Turn(new_token_ids=prefix + rest, max_tokens=max_tokens)
        conversations.append(Dialogue(user=number, at_s=at_s, turns=(turn,)))
    if not conversations:
        raise InvalidRequestError(f"The trace {path} has no requests.")
    return sorted(conversations, key=lambda conversation: conversation.at_s or 0.0)


def parse_length(text: str) -> Length:
    """A length in tokens: ``128``, ``uniform:64:256``, ``lognormal:MEDIAN:SIGMA:MAX``,
    or ``bimodal:SHORT:LONG:SHARE_OF_LONG``.

    Raises:
        ValueError: it is none of these.
    """
    if match := re.fullmatch(r"\d+", text):
        fixed = int(match[0])
        if fixed < 1:
            raise ValueError("a length is at least 1")
        return lambda _: fixed
    if match := re.fullmatch(r"uniform:(\d+):(\d+)", text):
        low, high = int(match[1]), int(match[2])
        if not 1 <= low <= high:
            raise ValueError("expected uniform:LOW:HIGH with 1 <= LOW <= HIGH")
        return lambda rng: rng.randint(low, high)
    if match := re.fullmatch(rf"lognormal:{_NUMBER}:{_NUMBER}:(\d+)", text):
        mu, sigma, most = math.log(float(match[1])), float(match[2]), int(match[3])
        return lambda rng: max(1, min(most, round(rng.lognormvariate(mu, sigma))))
    if match := re.fullmatch(rf"bimodal:(\d+):(\d+):{_NUMBER}", text):
        short, long, share = max(1, int(match[1])), max(1, int(match[2])), float(match[3])
        return lambda rng: long if rng.random() < share else short
    raise ValueError("expected N, uniform:A:B, lognormal:MEDIAN:SIGMA:MAX or bimodal:A:B:SHARE")


def _tokens(rng: random.Random, count: int, vocab: range) -> tuple[int, ...]:
    return tuple(rng.choices(vocab, k=count))


def total_tokens(conversations: Sequence[Dialogue]) -> int:
    """The longest sequence that the conversations make, prompt and output."""
    return max(
        sum(len(turn.new_token_ids) + turn.max_tokens for turn in conversation.turns)
        for conversation in conversations
    )
