"""Stages that a Ray cluster's nodes compute, and what happens when one of these is lost."""

import json
import time
from pathlib import Path

import pytest
from tests.conftest import VOCAB, write_tokenizer
from tests.engine.test_machines import _tokens
from tests.equivalence.conftest import opener, write_pairs
from tests.reliability.process import ServeProcess, free_port
from tests.tiny import CONFIG
from tests.weights.gguf_export import write_checkpoint

from ridgeline.core.errors import NetworkError, SettingsError
from ridgeline.core.ray_cluster import check_ray
from ridgeline.kernels.cpu.library import native_kernels_run

pytestmark = pytest.mark.skipif(not native_kernels_run(), reason="the cpu executor does not run")
NOTICED_S = 10.0
RANK = "ridgeline.engine.rank_main"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("ray")
    write_pairs(root)
    config = CONFIG | {"vocab_size": VOCAB, "max_position_embeddings": 8192}
    write_checkpoint(config, root / "long")
    write_tokenizer(root / "long")
    return root


@pytest.fixture(scope="module")
def nodes():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'ridgeline[ray]'")
    from tests.ray_nodes import ray_nodes

    with ray_nodes(3) as found:
        yield found


def test_ray_has_nothing_to_start_without_workers(folder):
    with pytest.raises(SettingsError, match="set `workers`, and pipeline_parallel_size"):
        opener(folder, "cpu")("off", launcher="ray", tensor_parallel_size=2)


@pytest.mark.parametrize(
    "setting",
    [{"split_feed_forward": True}, {"context_parallel_size": 2}],
    ids=lambda each: next(iter(each)),
)
def test_ray_has_nothing_to_start_where_processes_share_one_machine(folder, setting):
    (name,) = setting
    with pytest.raises(SettingsError, match=f"the processes of {name} share one machine: leave"):
        opener(folder, "cpu")("off", launcher="ray", **setting)


def test_a_setting_of_ray_alone_is_refused_without_it():
    from ridgeline.core.config import EngineConfig

    with pytest.raises(SettingsError, match="ray_cpus has no effect without launcher ray"):
        EngineConfig(model="embedded", ray_cpus=2)


def test_where_ray_is_not_installed_that_is_said(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SettingsError, match=r"pip install 'ridgeline\[ray\]'"):
        check_ray()


@pytest.mark.slow
def test_a_cluster_without_enough_nodes_is_not_waited_for_for_ever(folder, nodes):
    address, _ = nodes
    with pytest.raises(NetworkError, match="did not have 1 nodes beside this one with 2 free"):
        _open(folder, address, ray_cpus=2, worker_wait_s=1.0)


@pytest.mark.slow
def test_stages_on_a_node_of_ray_give_the_tokens_of_one_process(folder, nodes):
    """Two ranks there, and two here."""
    address, others = nodes
    with opener(folder, "cpu")("off", max_model_len=160) as llm:
        expected = _tokens(llm)
    with _open(folder, address, tensor_parallel_size=2) as llm:
        assert _tokens(llm) == expected
        executor = llm._engine.executor
        assert (len(executor.rank_pids), executor.num_ranks) == (2, 4)
        assert [node.runs(RANK) for node in others].count(True) == 1
    deadline_s = time.monotonic() + NOTICED_S
    while any(node.runs(RANK) for node in others):
        assert time.monotonic() < deadline_s, "the ranks did not end with their driver"
        time.sleep(0.1)


def _open(folder, address, **more):
    settings = {"pipeline_parallel_size": 2, "workers": 1, "max_model_len": 160} | more
    at = f"127.0.0.1:{free_port()}"
    return opener(folder, "cpu")(
        "off", launcher="ray", ray_address=address, worker_address=at, **settings
    )


@pytest.mark.slow
def test_a_node_that_is_lost_is_noticed_and_another_takes_its_stages(folder, nodes, tmp_path):
    """The stream that it computes goes on on another node, with the same tokens."""
    address, others = nodes
    server = ServeProcess(
        folder / "long", tmp_path / "data", "-tp", "2", "-pp", "2", "--workers", "1",
        "--launcher", "ray", "--ray-address", address, "--worker-address", "127.0.0.1:0",
    )  # fmt: skip
    try:
        server.wait_ready(120)
        with server.client() as client:
            expected = "".join(_texts(client))
            lost = next(node for node in others if node.runs(RANK))
            texts = _texts(client)
            found = [next(texts)]
            begin_s = time.monotonic()
            lost.kill()
            while "The engine process is lost" not in Path(server.log.name).read_text():
                assert time.monotonic() - begin_s < NOTICED_S
                time.sleep(0.05)
            assert "".join([*found, *texts]) == expected
            assert next(node for node in others if node is not lost).runs(RANK)
    finally:
        server.close()


def _texts(client):
    body = {"prompt": [5, 6, 7], "max_tokens": 300, "ignore_eos": True, "temperature": 0.9}
    body |= {"seed": 3, "stream": True}
    with client.stream("POST", "/v1/completions", json=body, timeout=200) as answer:
        for line in answer.iter_lines():
            if '"text"' in line:
                yield json.loads(line.removeprefix("data: "))["choices"][0]["text"]
