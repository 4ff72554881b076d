"""Workloads, the HTTP client, and runs against a real engine."""

import asyncio
import contextlib
import itertools
import json
import random
import time

import pytest

from ridgeline.bench import energy
from ridgeline.bench.serve.http_target import HttpTarget
from ridgeline.bench.serve.runner import run_closed_loop, run_open_loop
from ridgeline.bench.serve.session import Arrivals, _watched
from ridgeline.bench.serve.targets import EngineTarget, Piece
from ridgeline.bench.serve.workload import Workload, parse_length, read_trace
from ridgeline.cli import main
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import InvalidRequestError, NetworkError
from ridgeline.engine.async_engine import AsyncEngine


def workload(**fields):
    base = {"num_conversations": 20, "input_length": parse_length("uniform:3:9")}
    return Workload(**base | {"output_length": parse_length("4")} | fields)


def test_the_same_seed_gives_the_same_requests_at_every_rate():
    slow, fast = (list(workload(rate=rate).conversations()) for rate in (1.0, 10.0))
    assert [c.turns for c in slow] == [c.turns for c in fast]
    assert [c.at_s for c in slow] == pytest.approx([10 * c.at_s for c in fast])
    assert [c.turns for c in workload(seed=1).conversations()] != [c.turns for c in slow]


def test_arrivals_are_poisson():
    gaps = workload(num_conversations=4000, rate=5.0)
    times = [conversation.at_s for conversation in gaps.conversations()]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.06)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert deviation == pytest.approx(mean, rel=0.1)  # of the exponential


def test_prefixes_are_shared_and_turns_are_new():
    conversations = list(workload(prefix_tokens=8, num_prefixes=2, num_turns=3).conversations())
    assert len({c.turns[0].new_token_ids[:8] for c in conversations}) == 2
    assert len({c.turns[0].new_token_ids[8:] for c in conversations}) == 20
    assert all(len(c.turns) == 3 for c in conversations)


@pytest.mark.parametrize(
    ("text", "low", "high", "mean"),
    [
        ("128", 128, 128, 128),
        ("uniform:10:20", 10, 20, 15),
        ("lognormal:100:0.5:1000", 1, 1000, 100 * 1.1331),  # the mean is median · exp(σ²/2)
        ("bimodal:10:1000:0.1", 10, 1000, 109),
    ],
)
def test_lengths(text, low, high, mean):
    rng, length = random.Random(0), parse_length(text)
    values = [length(rng) for _ in range(20_000)]
    assert low <= min(values) <= max(values) <= high
    assert sum(values) / len(values) == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("text", ["", "0", "-3", "uniform:9:3", "uniform:0:3", "normal:1:2", "1.5"])
def test_lengths_that_make_no_sense(text):
    with pytest.raises(ValueError, match=r"expected|at least"):
        parse_length(text)


def test_traces_are_read_and_mistakes_are_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"at_s": 1.5, "prompt_tokens": 6, "output_tokens": 2, "prefix": "a", "prefix_tokens": 4},
        {"at_s": 0.5, "prompt_tokens": 5, "output_tokens": 3, "prefix": "a", "prefix_tokens": 4},
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    first, second = read_trace(path, vocab=range(10, 99))
    assert (first.at_s, second.at_s) == (0.5, 1.5)
    assert first.turns[0].new_token_ids[:4] == second.turns[0].new_token_ids[:4]
    assert first.turns[0].max_tokens == 3
    for line in ("{", '{"at_s": 1}', "[]", json.dumps(lines[0] | {"prompt_tokens": 0})):
        path.write_text(line)
        with pytest.raises(InvalidRequestError, match="request 1"):
            read_trace(path, vocab=range(10, 99))
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        read_trace(tmp_path / "none", vocab=range(10, 99))


class SlowTarget:
    """Takes a while for each request, one at a time: what is sent meanwhile waits."""

    def __init__(self, seconds):
        self.seconds, self.lock = seconds, asyncio.Lock()
        self.in_progress = self.most = 0

    async def stream(self, token_ids, max_tokens):
        self.in_progress += 1
        self.most = max(self.most, self.in_progress)
        async with self.lock:
            await asyncio.sleep(self.seconds)
        yield Piece(num_tokens=max_tokens)
        self.in_progress -= 1


def test_an_open_loop_does_not_wait_for_answers_and_counts_from_the_schedule():
    async def main():
        target = SlowTarget(0.05)
        conversations = list(workload(num_conversations=8, rate=1000.0).conversations())
        return target.most, await run_open_loop(target, conversations), target.most

    before, traces, most = asyncio.run(main())
    assert (before, most) == (0, 8)
    ttfts = sorted(trace.ttft_s for trace in traces)
    assert ttfts[-1] >= 0.05 * 8 - 0.02  # the last one waited for all the others


def test_a_closed_loop_keeps_to_its_concurrency():
    async def main():
        target = SlowTarget(0.001)
        conversations = list(workload().conversations())
        traces = await run_closed_loop(target, conversations, concurrency=3)
        return target.most, traces

    most, traces = asyncio.run(main())
    assert most == 3
    assert len(traces) == 20
    assert all(trace.error is None for trace in traces)


def test_conversations_on_an_engine_find_their_history_in_the_cache(model_folder):
    async def main():
        config = EngineConfig(
            model=str(model_folder), executor="reference", dtype="float64", block_tokens=4
        )
        async with AsyncEngine(config, in_process=True) as engine:
            conversations = workload(num_conversations=3, num_turns=3, vocab=range(10, 200))
            return await run_open_loop(EngineTarget(engine), conversations.conversations())

    traces = asyncio.run(main())
    assert len(traces) == 9
    for trace in traces:
        assert trace.error is None
        assert trace.num_output_tokens == 4
        assert trace.queue_s >= 0
    for user in range(3):
        first, second, third = (trace for trace in traces if trace.user == user)
        assert first.num_cached_tokens == 0
        assert 0 < second.num_cached_tokens < third.num_cached_tokens


@contextlib.asynccontextmanager
async def http_server(answer):
    """A server of one scripted answer; yields its URL and the requests that it got."""
    requests = []

    async def handle(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        requests.append((head, await reader.readexactly(length)))
        await answer(writer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield f"http://127.0.0.1:{port}/v1", requests


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunked(*parts):
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def stream_from(*writes):
    async def answer(writer):
        for data in writes:
            writer.write(data)
            await writer.drain()
            await asyncio.sleep(0.01)

    async def main():
        async with http_server(answer) as (url, requests):
            target = HttpTarget(url, model="m", api_key="secret")
            return [piece async for piece in target.stream((5, 6), 3)], requests

    return asyncio.run(main())


def test_the_http_client_reads_streams_however_they_are_cut():
    texts = [event(choices=[{"text": "a"}]), event(choices=[{"text": ""}])]
    usage = {"completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    last = event(choices=[], usage=usage) + b"data: [DONE]\n\n"
    data = chunked(texts[0][:7], texts[0][7:], texts[1] + last) + b"0\r\n\r\n"
    for cut in (1, 40, 60, len(data) - 3):
        pieces, requests = stream_from(data[:cut], data[cut:])
        assert [piece.num_tokens for piece in pieces] == [1, 0, 2]
        assert pieces[-1].num_cached_tokens == 2
        head, body = requests[0]
        assert b"Authorization: Bearer secret" in head
        assert head.startswith(b"POST /v1/completions HTTP/1.1")
        assert json.loads(body)["prompt"] == [5, 6]


def test_continuous_usage_counts_the_tokens_of_each_chunk():
    def one(total, token_ids):
        choice = {"text": "x", "token_ids": token_ids}
        return event(choices=[choice], usage={"completion_tokens": total})

    pieces, _ = stream_from(chunked(one(1, [7]), one(3, [8, 9])) + b"0\r\n\r\n")
    assert [(piece.num_tokens, piece.token_ids) for piece in pieces] == [(1, (7,)), (2, (8, 9))]


def test_reasoning_and_calls_of_tools_are_not_shown_to_the_user():
    def delta(**fields):
        return event(choices=[{"delta": fields}])

    calls = delta(tool_calls=[{"index": 0, "function": {"name": "f"}}])
    data = delta(reasoning="a") + delta(reasoning_content="b") + calls + delta(content="c")
    pieces, _ = stream_from(chunked(data) + b"0\r\n\r\n")
    assert [piece.is_shown for piece in pieces] == [False, False, False, True]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy", "429 Too Many: busy"),
        (b"", "without an answer"),
        (chunked(event(choices=[])), "cut short"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "cut short"),
    ],
)
def test_errors_of_the_server_are_errors(answer, message):
    with pytest.raises(NetworkError, match=message):
        stream_from(answer)


def test_energy_is_read_while_a_load_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(energy, "_RAPL", tmp_path)
    monkeypatch.setattr(energy, "_read_gpus", lambda: None)
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    (zone / "energy_uj").write_text("1000000")

    async def run():
        (zone / "energy_uj").write_text("3500000")
        return ["a trace"]

    traces, spent = asyncio.run(_watched(run))
    assert traces == ["a trace"]
    assert spent.energy == energy.Energy(joules=2.5, source="rapl", valid=True)
    assert 0 <= spent.processors_busy <= 1
    assert spent.gpus_busy is None


def test_nobody_listens():
    async def main():
        target = HttpTarget("http://127.0.0.1:1", model="m")
        return await run_closed_loop(target, list(workload().conversations())[:2], concurrency=1)

    traces = asyncio.run(main())
    assert all("NetworkError" in trace.error for trace in traces)
    with pytest.raises(InvalidRequestError, match="not an http"):
        HttpTarget("ftp://x", model="m")
    with pytest.raises(InvalidRequestError, match="ports are 1 to 65535"):
        HttpTarget("http://x:99999", model="m")


def test_the_command_reports_in_json_and_plots(model_folder, tmp_path, capsys):
    began_s = time.monotonic()
    arguments = ["bench", "serve", str(model_folder), "--executor", "reference", "--in-process"]
    arguments += ["--dtype", "float64"]
    arguments += ["--num-requests", "6", "--input-len", "8", "--output-len", "5", "--json"]
    arguments += ["--rate", "50,100", "--ttft-slo", "60000", "--slo", "tpot=60"]
    arguments += ["--usd-per-hour", "2", "--plots", str(tmp_path)]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert [point["load"]["rate"] for point in report["points"]] == [50, 100]
    for point in report["points"]:
        assert point["num_failed"] == 0
        assert point["good_share"] == 1
        assert point["slo"] == {"ttft_s": 60.0, "tpot_s": 60.0, "end_to_end_s": None}
        assert point["rpm"]["offered"] == pytest.approx(60 * point["request_rate"])
        assert point["cost"]["usd_per_1k_good"] > 0
        assert point["cost"]["usd_per_1m_by_phase"]["output"] > 0
        assert point["time_to_publish_s"]["count"] <= 6
        # Every step of this load is in, and no step of another one.
        assert point["utilization"]["prefill"]["tokens"] == 6 * 8
        assert point["utilization"]["decode"]["tokens"] == 6 * 4
        assert 0 <= point["busy"]["processors"] <= 1
        assert point["ttft_s"]["count"] == 6
        assert 0 < point["wall_s"] < time.monotonic() - began_s
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"latency-throughput.svg", "ttft-input-length.svg", "occupancy.svg"}
    for name in names:  # matplotlib writes texts as comments before their outlines
        drawn = (tmp_path / name).read_text()
        assert all(f"<!-- {Arrivals(rate=rate).label} -->" in drawn for rate in (50, 100))


def test_the_table_of_many_loads_is_no_wider_than_100_columns(model_folder, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    arguments = ["bench", "serve", str(model_folder), "--executor", "reference", "--in-process"]
    arguments += ["--num-requests", "12", "--input-len", "8", "--output-len", "3", "--warmup", "0"]
    assert main([*arguments, "--concurrency", "1,2,3,4,5,6,7,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = lines[1 : lines.index(next(line for line in lines if line.startswith("p99")))]
    assert max(map(len, figures)) <= 100
    assert sum(line.count("at once") for line in figures if line[0] == " ") == 8
    assert sum(line.startswith("TTFT p50") for line in figures) >= 2


def test_what_failed_and_what_cannot_be_written_is_said(model_folder, tmp_path, capsys):
    arguments = ["bench", "serve", str(model_folder), "--executor", "reference", "--in-process"]
    arguments += ["--num-requests", "1", "--output-len", "2", "--warmup", "0"]
    assert main([*arguments, "--input-len", "99999"]) == 1
    assert "has 99999 tokens" in capsys.readouterr().out
    taken = tmp_path / "file"
    taken.touch()
    assert main([*arguments, "--input-len", "8", "--plots", str(taken)]) == 1
    captured = capsys.readouterr()
    assert "TTFT" in captured.out
    assert f"{taken} cannot be written" in captured.err


def test_mistakes_on_the_command_line(capsys):
    for arguments in (["--num-requests", "0"], ["--turns", "0"], ["--trace", "/nowhere"]):
        assert main(["bench", "serve", "--in-process", *arguments]) == 2
        assert "error:" in capsys.readouterr().err
    for wrong in (["--rate", "0"], ["--ttft-slo", "nan"], ["--e2e-slo=-5"], ["--tpot-slo", "0"]):
        with pytest.raises(SystemExit):
            main(["bench", "serve", "--num-requests", "0", *wrong])
