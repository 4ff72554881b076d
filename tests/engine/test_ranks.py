"""One model on several processes: the tokens of one process, and what happens when one is lost."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest
from tests.conftest import VOCAB, write_tokenizer
from tests.equivalence.conftest import opener, write_pairs
from tests.tiny import CONFIG, EXPERTS
from tests.weights.gguf_export import write_checkpoint

from ridgeline import LLM, SamplingParams
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineError, SettingsError, WeightsMismatchError
from ridgeline.core.ops import MoE
from ridgeline.core.plan import ModelRole
from ridgeline.core.request import GenerateRequest
from ridgeline.core.structured_outputs import GrammarKind, StructuredOutputs
from ridgeline.engine.async_engine import AsyncEngine
from ridgeline.engine.observing import with_exchanges
from ridgeline.engine.stats import EngineStatus
from ridgeline.executors.distributed import executor as distributed
from ridgeline.executors.distributed.ranks import Silence
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.priced import priced_model
from ridgeline.kernels.cpu.library import native_kernels_run
from ridgeline.models import lower
from ridgeline.roofline.batch import make_batch
from ridgeline.roofline.op_cost import op_work
from ridgeline.roofline.work import total

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")

SAMPLED = SamplingParams(temperature=0.9, seed=3, max_tokens=24, n=2, frequency_penalty=0.3)
DIGITS = SamplingParams(
    temperature=1.0,
    seed=4,
    max_tokens=12,
    structured_outputs=StructuredOutputs(kind=GrammarKind.REGEX, source="[0-9]{8}"),
)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=4000, ignore_eos=True)
GOES_ON = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
NOTICED_S = 10.0


@pytest.fixture(scope="module")
def open_llm(tmp_path_factory):
    root = tmp_path_factory.mktemp("ranks")
    write_pairs(root)
    for name, config in (("experts", EXPERTS), ("experts-draft", CONFIG)):
        write_checkpoint(config | {"vocab_size": VOCAB}, root / name)
        write_tokenizer(root / name)
    return partial(opener(root, "cpu"), adapters={"tuned": str(root / "adapter")})


def _outputs(llm):
    """Prompts that share a prefix, sampled ones, one with a grammar and one with an adapter."""
    common = [5 + token % 90 for token in range(40)]
    prompts = [common + [7 * n % 90 + 5] * (3 + 9 * n) for n in range(5)]
    found = [each.outputs for each in llm.generate(prompts, SAMPLED)]
    found += [each.outputs for each in llm.generate(prompts[:2], DIGITS)]
    found += [each.outputs for each in llm.generate(prompts[:2], SAMPLED, adapter="tuned")]
    return [(sample.token_ids, sample.text) for outputs in found for sample in outputs]


@pytest.mark.parametrize(
    ("speculation", "settings", "layouts"),
    [
        (
            "off",
            {"max_num_batched_tokens": 24, "pool_tokens": 96, "dtype": "bfloat16"},
            [(1, 3), (2, 2)],
        ),
        ("ngram", {"quantization": "int8", "enable_prefix_caching": False}, [(2, 1)]),
        ("draft", {"quantization": "int4", "kv_cache_dtype": "int8"}, [(2, 1), (1, 2)]),
    ],
    ids=["chunks and preemption", "n-grams", "draft model"],
)
def test_ranks_give_the_tokens_of_one_process(open_llm, speculation, settings, layouts):
    with open_llm(speculation, max_model_len=160, **settings) as llm:
        expected = _outputs(llm)
    for tensor, stages in layouts:
        ranks = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
        with open_llm(speculation, max_model_len=160, **ranks, **settings) as llm:
            assert _outputs(llm) == expected
            executor, scheduler = llm._engine.executor, llm._engine.scheduler
            assert executor.num_ranks == tensor * stages
            assert "pool_tokens" not in settings or scheduler.num_preemptions > 0


@pytest.mark.parametrize(("speculation", "stages"), [("off", 2), ("ngram", 1)])
def test_ranks_that_share_experts_give_the_tokens_of_one_process(open_llm, speculation, stages):
    settings = {"max_num_batched_tokens": 24, "max_model_len": 160}
    with open_llm(speculation, pair="experts", pool_tokens=192, **settings) as llm:
        expected = _outputs(llm)
    # Both ranks of a stage have all of its KV.
    ranks = {"expert_parallel_size": 2, "pipeline_parallel_size": stages, "pool_tokens": 384}
    with open_llm(speculation, pair="experts", **ranks, **settings) as llm:
        assert _outputs(llm) == expected
        assert llm._engine.executor.num_ranks == 2 * stages
        assert llm._engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    ("speculation", "settings"),
    [
        ("off", {"pair": "experts", "max_num_batched_tokens": 24, "pool_tokens": 192}),
        ("ngram", {"quantization": "int4", "kv_cache_dtype": "int8"}),
    ],
    ids=["experts and preemption", "n-grams"],
)
def test_networks_in_a_process_of_their_own_give_the_tokens_of_one(open_llm, speculation, settings):
    with open_llm(speculation, max_model_len=160, **settings) as llm:
        expected = _outputs(llm)
    with open_llm(speculation, max_model_len=160, split_feed_forward=True, **settings) as llm:
        assert _outputs(llm) == expected
        executor, scheduler = llm._engine.executor, llm._engine.scheduler
        assert executor.num_ranks == 2
        assert "pool_tokens" not in settings or scheduler.num_preemptions > 0
        ops = lower(executor.spec())
        model = ExecutorModel(spec=executor.spec(), ops=ops, weights={}, dtype="float32")
        priced = with_exchanges(model, executor, ModelRole.TARGET)
    # To the networks and back in each layer, and the logits.
    assert len(priced.ops) == len(ops) + 2 * len(executor.spec().layers) + 1


def test_tokens_of_each_expert_are_counted_in_all_stages(open_llm):
    """By one process, and by two ranks in each of two stages."""
    found, skews = [], []
    for ranks in ({}, {"expert_parallel_size": 2, "pipeline_parallel_size": 2}):
        with open_llm("off", pair="experts", max_model_len=160, **ranks) as llm:
            llm.generate([[5 + token % 90 for token in range(40)]], GREEDY)
            time.sleep(1.0 if ranks else 0.0)  # they tell twice a second
            executor = llm._engine.executor
            found.append({name: each.tolist() for name, each in executor.expert_tokens().items()})
            skews.append(llm.roofline().experts)
    assert found[1] == found[0]
    assert {sum(counts) for counts in found[0].values()} == {2 * (40 + 5)}
    assert skews[1].skew == skews[0].skew > 1.0
    assert skews[1].rank_skew > skews[0].rank_skew == 1.0


def test_experts_on_more_ranks_than_matrices_give_the_tokens_of_one_process(open_llm):
    """The draft model has no experts, and its matrices are split as the target's are."""
    with open_llm("draft", pair="experts", max_model_len=160) as llm:
        expected = _outputs(llm)
    ranks = {"tensor_parallel_size": 2, "expert_parallel_size": 4}
    with open_llm("draft", pair="experts", max_model_len=160, **ranks) as llm:
        assert _outputs(llm) == expected
        assert llm._engine.executor.num_ranks == 4


def test_steps_are_priced_with_what_all_ranks_of_a_stage_compute(open_llm):
    with open_llm("off", pair="experts", expert_parallel_size=2) as llm:
        executor = llm._engine.executor
        ops = lower(executor.spec())
        model = ExecutorModel(spec=executor.spec(), ops=ops, weights={}, dtype="float32")
        priced = with_exchanges(model, executor, ModelRole.TARGET)
    num_mixtures = sum(isinstance(op, MoE) for op in ops)
    assert len(priced.ops) == 2 * len(ops) - num_mixtures
    batch, priced = make_batch([(0, 4)]), priced_model(priced, "cpu")
    work = total([op_work(op, batch, priced) for op in priced.ops])
    # A rank of two sends what two of five experts made: 4 tokens by 2 experts, in float32.
    row_bytes = 4 * executor.spec().hidden_size
    assert work.link_messages == num_mixtures
    assert work.link_bytes == pytest.approx(num_mixtures * 4 * 2 * row_bytes * 2 / 5)


def _gone(pids):
    """Whether none of these processes is left, and within the time they are given."""
    end_s = time.monotonic() + NOTICED_S
    while time.monotonic() < end_s:
        if not any(psutil.pid_exists(pid) and _runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("rank", "what", "layout"),
    [
        (0, signal.SIGKILL, "tensor_parallel_size"),
        (1, signal.SIGSTOP, "tensor_parallel_size"),
        (1, signal.SIGKILL, "pipeline_parallel_size"),
        (1, signal.SIGKILL, "expert_parallel_size"),
    ],
)
def test_a_rank_that_is_lost_ends_all_requests(open_llm, monkeypatch, rank, what, layout):
    # Shorter than the six seconds that it takes elsewhere.
    ranks = partial(distributed.Ranks, silence=Silence(serving_s=2.0))
    monkeypatch.setattr(distributed, "Ranks", lambda *args: ranks(*args[:3]))
    pair = "experts" if layout == "expert_parallel_size" else "full"
    with open_llm("off", pair=pair, **{layout: 2}) as llm:
        pids = llm._engine.executor.rank_pids
        streams = [llm.stream([9, 8, number], LONG) for number in range(3)]
        for stream in streams:
            next(stream)
        lost_s = time.monotonic()
        os.kill(pids[rank], what)
        for stream in streams:
            with pytest.raises(EngineError, match=f"Rank {rank} was lost"):
                for _ in stream:
                    pass
        assert time.monotonic() - lost_s < NOTICED_S
        assert _gone(pids)
        with pytest.raises(EngineError):
            llm.generate([[1, 2]], SAMPLED)
    assert _gone(pids)


def test_an_engine_is_restarted_when_a_rank_is_killed(tmp_path):
    write_pairs(tmp_path)
    config = EngineConfig(
        model=str(tmp_path / "full"), executor="cpu", tensor_parallel_size=2, max_num_seqs=4
    )

    async def main():
        engine = AsyncEngine(config)
        await engine.start()
        try:
            before, whole = await _text(engine), await _text(engine, GOES_ON)
            children = psutil.Process(engine.worker_pid).children(recursive=True)
            assert len(children) == 2
            seen = asyncio.Event()
            long = asyncio.create_task(_text(engine, GOES_ON, seen))
            await seen.wait()
            children[1].kill()
            assert await long == whole
            while engine.health().status is not EngineStatus.READY:
                await asyncio.sleep(0.05)
            assert await _text(engine) == before
            assert _gone([child.pid for child in children])
            last = psutil.Process(engine.worker_pid).children(recursive=True)
        finally:
            await engine.shutdown()
        assert _gone([child.pid for child in last])

    asyncio.run(asyncio.wait_for(main(), 60))


async def _text(engine, params=SAMPLED, seen=None):
    request = GenerateRequest(request_id="a", prompt="the cat sat", params=params)
    parts = []
    async for chunk in engine.generate(request):
        if chunk.index == 0:
            parts.append(chunk.text)
        if seen is not None:
            seen.set()
    return "".join(parts)


def test_ranks_end_with_a_driver_that_is_killed(open_llm, tmp_path):
    write_pairs(tmp_path)
    script = (
        "import sys, time\n"
        "from ridgeline import LLM\n"
        "llm = LLM(sys.argv[1], executor='cpu', tensor_parallel_size=2)\n"
        "print(*llm._engine.executor.rank_pids, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "full")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGSTOP)
        driver.kill()
    assert _gone(pids)


def test_what_cannot_be_spread_is_refused_before_a_rank_starts(open_llm):
    with pytest.raises(SettingsError, match="4 ranks do not share its 6 heads"):
        open_llm("off", tensor_parallel_size=4)
    with pytest.raises(SettingsError, match="llama model has no experts; lower expert_parallel"):
        open_llm("off", expert_parallel_size=2)
    with pytest.raises(SettingsError, match="5 experts in a layer, fewer than 6 ranks"):
        open_llm("off", pair="experts", expert_parallel_size=6)
    with pytest.raises(SettingsError, match="must be a multiple of tensor_parallel_size"):
        open_llm("off", pair="experts", expert_parallel_size=3, tensor_parallel_size=2)
    with pytest.raises(SettingsError, match="tensor_parallel_size must be between 1 and 64"):
        EngineConfig(tensor_parallel_size=0)


def test_what_a_rank_raises_is_raised_by_its_driver(tmp_path):
    write_pairs(tmp_path)
    config = tmp_path / "full" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"intermediate_size": 82}))
    with pytest.raises(WeightsMismatchError, match="gate_proj"):
        LLM(str(tmp_path / "full"), executor="cpu", tensor_parallel_size=2)
