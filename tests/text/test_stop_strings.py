"""The matcher equals a search in the whole text, however the text is split."""

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from ridgeline.core.errors import InvalidRequestError
from ridgeline.text import StopStringMatcher


def _expected(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None, int]:
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None, -1
    end, minus_length, stop = min(ends)
    return text[: end if include else end + minus_length], stop, end


def _splits(text: str) -> Iterator[list[str]]:
    for bits in itertools.product((0, 1), repeat=max(len(text) - 1, 0)):
        parts = [text[:1]]
        for char, bit in zip(text[1:], bits, strict=True):
            if bit:
                parts.append(char)
            else:
                parts[-1] += char
        yield parts


def _suffixes_that_begin_a_stop(text: str, stops: Sequence[str]) -> list[str]:
    suffixes = [text[start:] for start in range(len(text) + 1)]
    return [suffix for suffix in suffixes if any(stop.startswith(suffix) for stop in stops)]


def _check(parts: list[str], stops: Sequence[str], include: bool) -> None:
    text = "".join(parts)
    wanted, stop, end = _expected(text, stops, include)
    matcher = StopStringMatcher(stops, include_stop=include)
    emitted, seen = "", ""
    for part in parts:
        emitted += matcher.push(part)
        seen += part
        assert wanted.startswith(emitted)
        if matcher.match is None:
            # As much is out as no stop can claim: the longest suffix that begins one stays.
            held = 0 if include else max(map(len, _suffixes_that_begin_a_stop(seen, stops)))
            assert len(emitted) == len(seen) - held
    emitted += matcher.flush()
    assert emitted == wanted
    assert matcher.flush() == ""
    assert matcher.matched == stop
    if matcher.match is not None:
        assert matcher.match.end == end
        assert text[matcher.match.start : end] == stop


@pytest.mark.parametrize("include", [False, True])
def test_stops_that_end_too_early_do_not_count(include: bool) -> None:
    """Text of which the first part may not stop: an end in it is passed over, a beginning not."""
    rng = random.Random(5)
    for _ in range(3_000):
        text = "".join(rng.choices("ab", k=rng.randrange(1, 16)))
        stops = _random_stops(rng, "ab", 4)
        first = rng.randrange(len(text) + 1)
        ends = [
            (end, -len(stop), stop)
            for stop in stops
            for end in range(first + 1, len(text) + 1)
            if text[:end].endswith(stop)
        ]
        matcher = StopStringMatcher(stops, include_stop=include)
        emitted = matcher.push(text[:first], may_stop=False) + matcher.push(text[first:])
        emitted += matcher.flush()
        end, minus_length, stop = min(ends, default=(len(text), 0, None))
        assert matcher.matched == stop
        assert emitted == text[: end if include else end + minus_length]


def _random_stops(rng: random.Random, alphabet: str, longest: int) -> list[str]:
    count = rng.randrange(1, 5)
    return ["".join(rng.choices(alphabet, k=rng.randint(1, longest))) for _ in range(count)]


@pytest.mark.parametrize("include", [False, True])
def test_every_split_of_random_texts(include: bool) -> None:
    rng = random.Random(3)
    for _ in range(400):
        text = "".join(rng.choices("ab", k=rng.randrange(7)))
        stops = _random_stops(rng, "ab", 4)
        for parts in _splits(text):
            _check(parts, stops, include)


@pytest.mark.parametrize("include", [False, True])
def test_random_splits_of_longer_texts(include: bool) -> None:
    rng = random.Random(4)
    for _ in range(3_000):
        text = "".join(rng.choices("abc", k=rng.randrange(30)))
        stops = _random_stops(rng, "abc", 6)
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randrange(6)))
        parts = [text[i:j] for i, j in itertools.pairwise([0, *cuts, len(text)])]
        _check(parts, stops, include)


@pytest.mark.parametrize(
    ("stops", "text", "stop", "start"),
    [
        (["abcd", "bc"], "xabcd", "bc", 2),
        (["b", "ab"], "xxab", "ab", 2),
        (["ab", "b"], "xxab", "ab", 2),
        (["abab", "baa"], "ababaa", "abab", 0),
        (["\n\nHuman:"], "a\n\n\nHuman: b", "\n\nHuman:", 2),
        (["é🎉"], "xé🎉", "é🎉", 1),
    ],
)
def test_which_stop_wins(stops: list[str], text: str, stop: str, start: int) -> None:
    matcher = StopStringMatcher(stops)
    assert "".join(map(matcher.push, text)) == text[:start]
    assert matcher.match is not None
    assert (matcher.match.stop, matcher.match.start) == (stop, start)
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_without_stops_text_passes() -> None:
    matcher = StopStringMatcher([])
    assert matcher.push("abc") == "abc"
    assert matcher.flush() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], [None], [3]])
def test_stops_that_are_no_stops(stops: list[str]) -> None:
    with pytest.raises(InvalidRequestError):
        StopStringMatcher(stops)


def test_hostile_text_is_linear() -> None:
    """A quadratic search would make 10^10 steps of this."""
    stop = "a" * 100_000 + "b"
    matcher = StopStringMatcher([stop])
    emitted = sum(len(matcher.push("a" * 1_000)) for _ in range(300))
    assert emitted == 200_000
    assert len(matcher.flush()) == 100_000
