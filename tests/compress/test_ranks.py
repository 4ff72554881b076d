"""Training over ranks: what comes out is one process's, and no rank holds the model."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file as load_arrays
from tests.cli.test_imports import WITHOUT_TORCH, run
from tests.compress.folders import SMALL, write_folder
from tests.compress.rank_worker import do
from tests.compress.test_distilling import QUICK, opened
from tests.reliability.process import free_port

from ridgeline.cli import main
from ridgeline.compress.quantize import quantize
from ridgeline.compress.recipe import Recipe
from ridgeline.kernels.tensors import as_tensor
from ridgeline.quant import QuantizedTensor

RECIPE = replace(
    QUICK, steps=8, step_tokens=128, micro_batch_tokens=32, window_tokens=32, learning_rate=1e-3
)
KINDS = ("healed", "codes", "ternary", "adapter", "one rank, then several", "several, then one")


@pytest.fixture(scope="module", params=[(2, 6), pytest.param((4, 20), marks=pytest.mark.slow)])
def runs(request, tmp_path_factory):
    """Runs of so many steps by one process and by ranks: two folders, and what each rank held."""
    count, steps = request.param
    path = tmp_path_factory.mktemp("ranks")
    odd = SMALL | {"hidden_size": 65, "intermediate_size": 95, "head_dim": 16}
    write_folder(path / "teacher", odd)
    write_folder(path / "student", odd, seed=1)
    model = opened(write_folder(path / "model", SMALL | {"tie_word_embeddings": True}))
    quantize(model, path / "codes", Recipe(method="rtn"), None)

    def job(number, kind):
        student, teacher = {
            "codes": ("codes", "model"), "ternary": ("model", "model"), "adapter": ("model", None)
        }.get(kind, ("student", "teacher"))  # fmt: skip
        return {
            "student": str(path / student),
            "teacher": teacher and str(path / teacher),
            "recipe": asdict(replace(RECIPE, steps=steps, ternary=kind == "ternary")),
            "out": str(path / number / kind),
        }

    for number in ("one", "several"):
        (path / number).mkdir()
    jobs = {kind: job("several", kind) for kind in KINDS}
    resumed, stopped = KINDS[-2:]
    do(jobs[resumed] | {"stops": True})
    jobs[resumed]["resumes"] = jobs[stopped]["stops"] = True
    (path / "jobs.json").write_text(json.dumps(list(jobs.values())))
    held = _run_ranks(path / "jobs.json", count)
    do(jobs[stopped] | {"stops": False, "resumes": True})
    for kind in KINDS[:4]:
        do(job("one", kind))
    for kind in KINDS[4:]:
        (path / "one" / kind).symlink_to(path / "one" / "healed")
    return path / "one", path / "several", held


def _run_ranks(jobs, count):
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.compress.rank_worker", jobs],
            stdout=subprocess.PIPE,
            env=os.environ | {
                "RANK": str(number), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
            },
        )
        for number in range(count)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * count
    return [json.loads(output) for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_make_what_one_process_makes(runs, kind):
    folders = [path / kind for path in runs[:2]]
    notes = [
        json.loads((folder / "ridgeline-manifest.json").read_text())["shards"][-1]["notes"]
        for folder in folders
    ]
    for name in ("first", "last"):
        assert notes[0][name] == pytest.approx(notes[1][name], abs=1e-4)
    assert notes[0]["last"] != notes[0]["first"]
    assert {file.name for file in folders[0].iterdir()} == {
        file.name for file in folders[1].iterdir()
    }
    if kind == "adapter":
        one, several = (load_arrays(folder / "adapter_model.safetensors") for folder in folders)
        for name, values in one.items():
            np.testing.assert_allclose(several[name], values, atol=2e-4)
        return
    one, several = (dict(opened(folder).stored.items()) for folder in folders)
    for name, weight in one.items():
        if isinstance(weight, QuantizedTensor):
            assert (weight.codes == several[name].codes).mean() >= 0.999
            np.testing.assert_allclose(several[name].scales, weight.scales, rtol=1e-2)
        else:
            pair = as_tensor(several[name]).float(), as_tensor(weight).float()
            assert (pair[0] - pair[1]).abs().max() <= 2**-7 * max(1.0, pair[1].abs().max())


def test_each_rank_holds_its_share_of_weights_and_sums(runs):
    """Weights and the two sums of Adam, float32: 12 bytes a trained parameter over the ranks."""
    _, several, held = runs
    weights = dict(opened(several / "healed").stored.items())
    whole = 12 * sum(weight.size for weight in weights.values())
    healed = [rank[0] for rank in held]
    assert sum(healed) == whole
    assert max(healed) <= 1.03 * whole / len(held)


@pytest.mark.parametrize("killed", ["second rank", "by Ctrl-C"])
def test_an_end_of_one_rank_or_of_all_is_told_once(killed, tmp_path):
    folder = write_folder(tmp_path / "model", SMALL)
    words = ["distill", str(folder), "-o", str(tmp_path / "out"), "--steps", "100000", "--ranks",
             "2", "--step-tokens", "128", "--micro-batch-tokens", "64", "--window-tokens", "64",
             "--no-quality"]  # fmt: skip
    launcher = subprocess.Popen(
        [sys.executable, "-m", "ridgeline", *words],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        metrics = tmp_path / "out" / ".ridgeline-state" / "metrics.jsonl"
        while not metrics.exists():
            assert launcher.poll() is None
            time.sleep(0.05)
        ranks = psutil.Process(launcher.pid).children()
        if killed == "by Ctrl-C":
            os.killpg(launcher.pid, signal.SIGINT)
        else:
            (second,) = (rank for rank in ranks if rank.environ()["RANK"] == "1")
            second.send_signal(signal.SIGKILL)
        errors = launcher.communicate(timeout=60)[1]
    finally:
        launcher.kill()
    told = [line for line in errors.splitlines() if not line.startswith("step ")]
    if killed == "by Ctrl-C":
        assert launcher.returncode == 130
        assert told == [f"Stopped; --resume goes on with {tmp_path / 'out'}."]
    else:
        assert launcher.returncode == 1
        assert told == ["error: Rank 1 of the training: it was ended by SIGKILL. What was saved "
                        "can be gone on with by --resume."]  # fmt: skip
    assert not any(rank.is_running() for rank in ranks)


def test_what_ranks_cannot_do_is_refused_before_they_start(tmp_path, capsys):
    words = ["distill", str(tmp_path / "none"), "-o", str(tmp_path / "out"), "--ranks"]
    for ranks, what in (("0", "--ranks is 0"), ("-1", "--ranks is -1"),
                        ("3", "3 ranks do not share the 2 micro-batches of a step")):  # fmt: skip
        assert main([*words, ranks]) == 2
        assert what in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    done = run(*words, "2", before=WITHOUT_TORCH)
    assert done.returncode == 1
    assert done.stderr.startswith("error: This command needs torch: pip install")
