"""How many questions a semantic cache answers, and how many of these wrong, beside one threshold.

``python -m benchmarks.semantic_cache [MODEL]``: three sets of questions with known answers, made
from templates, each asked in many words: ``plain`` (questions that differ in all), ``negations``,
and ``details`` (that differ in a number or a name). MODEL makes the vectors, by default the
embedded one; ``planted`` is a set of vectors without a model, whose paraphrases and opposites
scatter as far as each question has it. The best threshold is chosen with hindsight, as nobody can.
"""

import argparse
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ridgeline import LLM
from ridgeline.core.request import CompletionChunk
from ridgeline.server.semantic.cache import SemanticCache, Vector
from ridgeline.server.semantic.policy import binomial_interval

_SCOPE = ("", b"")
_ERROR = 0.02
_ROUNDS = 4000
_THRESHOLDS = (0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995, 0.999)
_OPENINGS = ("", "Please tell me: ", "Quick question. ", "Hi! ", "I wonder, ", "For my homework: ")
_ENDINGS = ("", " Thanks.", " Answer briefly.", " I need to know.")
_CITIES = ("Paris", "Lima", "Oslo", "Cairo", "Tokyo", "Quito", "Delhi", "Rome", "Accra", "Hanoi")
_THINGS = ("mushrooms", "bleach", "raw eggs", "old rice", "aspirin", "snow", "seaweed", "tap water")
_PLAIN = (
    ("how do I boil an egg?", "what is the way to cook an egg in water?"),
    ("who wrote Hamlet?", "which author is Hamlet by?"),
    ("what is the capital of France?", "which city is France's capital?"),
    ("how far is the moon?", "what is the distance to the moon?"),
    ("why is the sky blue?", "what makes the sky look blue?"),
    ("when did the war end?", "in which year was the war over?"),
    ("how do plants eat?", "by what do plants feed themselves?"),
    ("what is a prime number?", "which numbers are called prime?"),
    ("how do I tie a tie?", "what is the way to knot a tie?"),
    ("who painted the Mona Lisa?", "which painter made the Mona Lisa?"),
    ("how old is the earth?", "what is the age of our planet?"),
    ("what do cats like to eat?", "which food do cats prefer?"),
)
Groups = Sequence[Sequence[str]]


def question_groups(name: str) -> Groups:
    """Of each question its wordings; two groups have two answers."""
    if name == "plain":
        found: list[Sequence[str]] = list(_PLAIN)
    elif name == "negations":
        found = [
            (f"is it {what} to eat {thing}?", f"would eating {thing} be {what}?")
            for thing in _THINGS
            for what in ("safe", "not safe")
        ]
    else:
        found = [
            (
                f"how far is {city} by train in {days} days?",
                f"{days} days by train: is {city} near?",
            )
            for city, days in itertools.product(_CITIES, (2, 3, 12))
        ]
    return [
        [f"{opening}{text}{end}" for opening in _OPENINGS for text in texts for end in _ENDINGS]
        for texts in found
    ]


def asked(draw: np.random.Generator, vectors: Sequence[Vector]) -> Iterator[tuple[Vector, int]]:
    """Questions as they come, the first ones most often (Zipf), each with its answer's number."""
    shares = 1.0 / np.arange(1, len(vectors) + 1)
    for group in draw.choice(len(vectors), size=_ROUNDS, p=shares / shares.sum()):
        rows = vectors[group]
        yield rows[draw.integers(len(rows))], int(group)


def planted(draw: np.random.Generator) -> Sequence[Vector]:
    """Vectors of 100 questions and their opposites, 64 wordings each."""
    width, groups = 64, []

    def units(count: int) -> npt.NDArray[np.float64]:
        rows = draw.normal(size=(count, width))
        found: npt.NDArray[np.float64] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        return found

    for _ in range(100):
        (base,), scatter = units(1), draw.uniform(0.05, 0.35)
        for center in (base, base + draw.uniform(0.15, 0.5) * units(1)[0]):
            rows = center + scatter * units(64)
            rows /= np.linalg.norm(rows, axis=1, keepdims=True)
            groups.append(rows.astype(np.float32))
    return groups


def played(stream: Sequence[tuple[Vector, int]]) -> tuple[int, int]:
    """Hits of the cache, and how many of them were wrong."""
    cache = SemanticCache(max_error=_ERROR, max_entries=100_000, audit=0.05)
    hits = wrong = 0
    for vector, answer in stream:
        found = cache.nearest(_SCOPE, vector)
        is_right = found.entry is not None and found.entry.answer.text == str(answer)
        if not found.is_hit:
            chunk = CompletionChunk(request_id=0, index=0, text=str(answer), token_ids=())
            cache.learn(_SCOPE, found, chunk, is_right=is_right)
            continue
        hits, wrong = hits + 1, wrong + (not is_right)
        if cache.wants_audit():
            cache.audited(found, is_right=is_right)
    return hits, wrong


def played_static(stream: Sequence[tuple[Vector, int]], threshold: float) -> tuple[int, int]:
    """The same with one threshold for all; what is not near enough to any question is kept."""
    kept, answers = np.empty((len(stream), len(stream[0][0])), dtype=np.float32), []
    hits = wrong = 0
    for vector, answer in stream:
        similarities = kept[: len(answers)] @ vector
        if answers and similarities.max() >= threshold:
            hits, wrong = hits + 1, wrong + (answers[int(similarities.argmax())] != answer)
        else:
            kept[len(answers)] = vector
            answers.append(answer)
    return hits, wrong


def report(name: str, stream: Sequence[tuple[Vector, int]]) -> None:
    """Print the cache, and the thresholds beside it."""
    hits, wrong = played(stream)
    low, high = binomial_interval(wrong, hits)
    share = hits / len(stream)
    print(f"{name}: {share:.1%} hits, {wrong} of {hits} wrong ({low:.2%} to {high:.2%})")
    tried = {threshold: played_static(stream, threshold) for threshold in _THRESHOLDS}
    for what, limit in (("equal error", wrong / max(hits, 1)), (f"{_ERROR:.0%}", _ERROR)):
        found = [(h / len(stream), t) for t, (h, w) in tried.items() if w <= limit * h]
        best, threshold = max(found, default=(0.0, 1.0))
        print(f"    best threshold at {what}: {best:.1%} hits (at {threshold})")
    near, off = tried[0.95]
    print(f"    threshold 0.95: {near / len(stream):.1%} hits, {off / max(near, 1):.1%} wrong")


def main() -> None:
    """Run all sets."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    model = LLM(parser.parse_args().model)
    draw = np.random.default_rng(0)
    report("planted", list(asked(draw, planted(draw))))
    for name in ("plain", "negations", "details"):
        vectors = []
        for texts in question_groups(name):
            rows = model.embed(texts)
            vectors.append(rows / np.linalg.norm(rows, axis=1, keepdims=True))
        report(name, list(asked(draw, vectors)))


if __name__ == "__main__":
    main()
