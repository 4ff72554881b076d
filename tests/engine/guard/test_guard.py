"""What a guard lets out, whatever the borders of chunks and whatever becomes of its scorer."""

import asyncio
import contextlib
import random

import pytest
from msgspec.structs import replace

from ridgeline.core.errors import SettingsError
from ridgeline.core.request import CompletionChunk, FinishReason, PromptReport
from ridgeline.core.result import TokenLogprobs
from ridgeline.engine.guard.config import GuardConfig
from ridgeline.engine.guard.guard import Guard
from ridgeline.engine.guard.stream import guarded
from ridgeline.engine.guard.word_list import WordList

SCORERS = "tests.engine.guard.scorers"
REPORT = PromptReport(num_tokens=3, num_cached_tokens=0)


async def engine(texts, n=1):
    """Chunks of n samples, a token and its log-probability for each text."""
    for number, text in enumerate(texts):
        for index in range(n):
            entry = TokenLogprobs(token_id=number, logprob=-float(number), rank=1, top=())
            yield (
                index,
                CompletionChunk(
                    request_id=1,
                    index=index,
                    text=text,
                    token_ids=(number,),
                    logprobs=(entry,),
                    finish_reason=FinishReason.STOP if number == len(texts) - 1 else None,
                    prompt=REPORT if number == index == 0 else None,
                ),
            )


@contextlib.contextmanager
def a_guard(**settings):
    """A guard whose decisions are in ``kinds``."""
    kinds = []
    guard = Guard(GuardConfig(**settings), lambda kind, _: kinds.append(kind))
    guard.kinds = kinds
    try:
        yield guard
    finally:
        guard.close()


async def run(guard, texts, *, streams=True, n=1):
    pieces = guarded(engine(texts, n), guard, num_samples=n, num_prompts=1, streams=streams)
    return [piece async for piece in pieces]


def outcome(pieces, index=0):
    """The text of a sample, its tokens, why it ended, and what was taken back."""
    chunks = [chunk for number, chunk in pieces if number == index]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    entries = [entry.token_id for chunk in chunks for entry in chunk.logprobs]
    assert tokens == entries
    last = chunks[-1]
    return "".join(c.text for c in chunks), tokens, str(last.finish_reason), last.retracted


@pytest.fixture
def word_list(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("# what nobody may read\nplanted words\n\nİsland\nregex: (?i)key-[0-9]{4,6}\n")
    return str(path)


def test_no_part_of_what_is_planted_goes_out(word_list):
    draw = random.Random(1)

    def cut(text):
        borders = sorted(draw.sample(range(1, len(text)), draw.randint(1, len(text) - 1)))
        return [
            text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True) if a < b
        ]

    async def many(guard, streams):
        texts = []
        for _ in range(60):
            before = "".join(draw.choice("ab pl.K") for _ in range(draw.randint(0, 80)))
            planted = draw.choice(["planted words", "PLANTED Words", "İSLAND", "KEY-12345"])
            texts.append((before, cut(before + planted + "tail" * draw.randint(0, 2))))
        runs = [run(guard, pieces, streams=streams) for _, pieces in texts]
        return zip(texts, await asyncio.gather(*runs), strict=True)

    with a_guard(word_list=word_list) as guard:
        for streams in (True, False):
            for (before, pieces), found in asyncio.run(many(guard, streams)):
                text, tokens, reason, _ = outcome(found)
                assert text == before
                assert reason == "content_filter"
                shown = "".join(pieces[token] for token in tokens)
                assert before.startswith(shown) and len(shown) < len(before) + 1
                assert streams or len(found) == 1
        assert guard.kinds.count("retract") == 120


def test_what_is_not_planted_goes_out_whole_and_in_time(word_list):
    texts = ["a plant", "ed gar", "den, key-12 ", "x" * 80, " and planted"]
    with a_guard(word_list=word_list, window_chars=0) as guard:
        pieces = asyncio.run(run(guard, texts))
    assert outcome(pieces) == ("".join(texts), [0, 1, 2, 3, 4], "stop", None)
    assert pieces[0][1].text == "a "
    assert pieces[0][1].prompt == REPORT
    assert pieces[1][1].text == "planted gar"


@pytest.mark.parametrize(
    ("window", "first"),
    [({"window_chars": 5}, "a"), ({"window_tokens": 2}, "abc"), ({}, "abc")],
)
def test_a_window_is_held_back_until_the_end(window, first):
    texts = ["abc", "def", "ghi", "j"]
    with a_guard(scorer=f"{SCORERS}:Troubled", **window) as guard:
        pieces = asyncio.run(run(guard, texts))
    assert pieces[0][1].text == first
    assert outcome(pieces)[0] == "abcdefghij"


def test_what_went_out_is_taken_back(word_list):
    texts = ["so ", "ba", "d it", " is", " over"]
    with a_guard(scorer=f"{SCORERS}:Late") as guard:
        streamed = asyncio.run(run(guard, texts))
        whole = asyncio.run(run(guard, texts, streams=False))
    text, _, reason, retracted = outcome(streamed)
    assert (text, retracted, reason) == ("so bad it", (3, 6), "content_filter")
    assert outcome(whole) == ("so  it", [], "content_filter", None)
    assert streamed[-1][1].stop_reason == "bad"


def test_a_stream_goes_on_where_another_server_has_left_it(word_list):
    """Text goes out with its tokens; those that are out are seen, and not judged again."""
    texts = ["a ", "pla", "nted", " wor", "d! ", "planted wo", "rds"]

    async def rest(guard, known):
        pieces = guarded(
            engine(texts), guard, num_samples=1, num_prompts=1, streams=True,
            in_whole_chunks=True, is_known=lambda chunk: chunk.token_ids[0] < known,
        )  # fmt: skip
        return [chunk async for _, chunk in pieces]

    with a_guard(word_list=word_list, window_chars=0) as guard:
        for known in range(5):
            chunks = asyncio.run(rest(guard, known))
            assert "".join(chunk.text for chunk in chunks) == "a planted word! "
            for chunk in chunks[known:-1]:
                assert chunk.text == "".join(texts[token] for token in chunk.token_ids)
            assert chunks[-1].finish_reason == "content_filter"


def test_samples_end_each_for_itself(word_list):
    """And the report of the prompt comes with what goes out first."""

    async def source():
        async for index, chunk in engine(["planted", " words", " or", " none"], n=2):
            yield index, chunk if index == 0 else replace(chunk, text="fine")

    async def both(guard):
        pieces = guarded(source(), guard, num_samples=2, num_prompts=1, streams=True)
        return [piece async for piece in pieces]

    with a_guard(word_list=word_list, window_chars=0) as guard:
        pieces = asyncio.run(both(guard))
    assert outcome(pieces, 0)[::2] == ("", "content_filter")
    assert outcome(pieces, 1)[:3] == ("fine" * 4, [0, 1, 2, 3], "stop")
    assert pieces[0][1].prompt == REPORT


@pytest.mark.parametrize("trouble", ["hang", "die", "raise", "nonsense"])
@pytest.mark.parametrize("on_failure", ["end", "release"])
def test_a_scorer_that_fails_holds_up_nobody_and_the_policy_holds(trouble, on_failure):
    async def beside(guard):
        return await asyncio.gather(
            run(guard, ["a", f" {trouble}", " c"]), *(run(guard, ["x", "y", "z"]) for _ in range(4))
        )

    settings = {"scorer": f"{SCORERS}:Troubled", "timeout_s": 0.2, "on_failure": on_failure}
    with a_guard(**settings) as guard:
        found, *others = asyncio.run(beside(guard))
    assert all(outcome(other)[::2] == ("xyz", "stop") for other in others)
    text, _, reason, _ = outcome(found)
    if on_failure == "end":
        assert (text, reason, found[-1][1].stop_reason) == ("a", "content_filter", "guard_failed")
    else:
        assert (text, reason) == (f"a {trouble} c", "stop")
    assert guard.kinds.count("failed") == 1


@pytest.mark.parametrize(
    ("texts", "text", "reason"),
    [
        (["ab", "cd", " end"], "abcd", "told"),
        (["ab", "hold", "c"], "ab", "guard_held"),
        (["print", "ed"], "printed", None),
    ],
)
def test_a_scorer_ends_holds_and_prints(texts, text, reason):
    with a_guard(scorer=f"{SCORERS}:Troubled") as guard:
        pieces = asyncio.run(run(guard, texts))
    assert outcome(pieces)[0] == text
    assert pieces[-1][1].stop_reason == reason


@pytest.mark.parametrize(
    ("scorer", "problem"),
    [
        (f"{SCORERS}:broken", "RuntimeError: no weights"),
        (f"{SCORERS}:missing", "AttributeError"),
        ("no.such.module:x", "ModuleNotFoundError"),
        ("no-entry-point", "no package brings"),
        ("json:dumps", "TypeError"),
    ],
)
def test_a_scorer_that_cannot_be_made_is_a_sentence(scorer, problem):
    with a_guard(scorer=scorer) as guard, pytest.raises(SettingsError, match=problem):
        asyncio.run(guard.start())


@pytest.mark.parametrize(
    ("lines", "problem"),
    [([], "no entries"), (["# x", " "], "no entries"), (["regex:("], "no regex"),
     (["regex: a*"], "empty text")],
)  # fmt: skip
def test_a_list_that_cannot_be_read_is_a_sentence(lines, problem):
    with pytest.raises(SettingsError, match=problem):
        WordList(lines)


def test_a_pattern_that_never_ends_is_stopped(tmp_path):
    path = tmp_path / "list.txt"
    path.write_text("regex: (a+)+$b\n")
    with a_guard(word_list=str(path), timeout_s=0.2) as guard:
        pieces = asyncio.run(run(guard, ["fine", "a" * 40 + "c"]))
    assert outcome(pieces)[2] == "content_filter"
    assert guard.kinds[-1] == "failed"


def test_who_ends_the_scorer_lets_nothing_of_others_out(tmp_path):
    """The process that comes after it has seen nothing of what was asked with that."""
    path = tmp_path / "list.txt"
    path.write_text("planted words\nregex: (a+)+$b\n")

    async def beside(guard):
        await guard.start()
        bad = ["planted words, and much after them " + "x" * 200]
        return await asyncio.gather(run(guard, ["a" * 40 + "c"]), *(run(guard, bad) for _ in "123"))

    with a_guard(word_list=str(path), timeout_s=0.2) as guard:
        _, *others = asyncio.run(beside(guard))
    for pieces in others:
        assert "planted" not in outcome(pieces)[0]
        assert pieces[-1][1].stop_reason == "guard_list"


def test_who_leaves_before_the_scorer_is_asked_is_not_kept_by_it():
    async def main(guard):
        await guard.start()
        first = guard.open()
        first.text = "slow"
        busy = asyncio.create_task(guard.see(first, final=True))
        await asyncio.sleep(0.1)
        for _ in range(20):
            sample = guard.open()
            sample.text = "x" * 1000
            asking = asyncio.create_task(guard.see(sample, final=False))
            await asyncio.sleep(0)
            asking.cancel()
            guard.close_sample(sample)
        await busy
        return await run(guard, ["count"])

    with a_guard(scorer=f"{SCORERS}:Counting") as guard:
        assert asyncio.run(main(guard))[-1][1].stop_reason == "kept 0"
