"""Tiles of products: the search, what it costs at most, and what is kept on disk of it."""

import json
import logging
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.executors.host_cuda import host_executor
from tests.kernels.triton.device import DEVICE  # before the first import of a kernel
from tests.tiny import CONFIG, Driver, tiny_executor, tiny_model
from triton.runtime.errors import OutOfResources, PTXASError

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.plan import ModelRole
from ridgeline.executors import create_executor
from ridgeline.executors.cuda import triton_kernels, tuning_cache, warming
from ridgeline.executors.cuda.host_device import HostDevice
from ridgeline.executors.cuda.opening import gpu_tuning
from ridgeline.executors.cuda.tuning import Tuning, _agree, representatives
from ridgeline.executors.cuda.tuning_cache import Tuned, TuningCache
from ridgeline.kernels.triton import LinearConfig, LinearConfigs, LinearKey

GUESS = LinearConfig(block_o=64, block_k=128, splits=4, num_warps=4, num_stages=4)
BEST = LinearConfig(block_o=128, block_k=64, splits=8, num_warps=8, num_stages=3)
KEY = LinearKey(
    format="int4", group=32, has_zeros=False, rows=256, columns=512, tokens=16, gated=True,
    dtype="bfloat16",
)  # fmt: skip
PROMPT = [3, 141, 59, 26, 53, 58, 97]


class Use:
    """A product whose time is the more, the more of its configuration is not the best's. ``last``
    is what ran last, and with what."""

    last = None
    error = OutOfResources(300_000, 232_448, "shared memory")

    def __init__(self, num_bytes=1000, best=BEST, fails=(), wrong=(), calls=1):
        self.num_bytes, self.best, self.fails, self.wrong = num_bytes, best, fails, wrong
        matrix = SimpleNamespace(unit=32, group=32, shape=(256, 512))
        self.calls = [SimpleNamespace(matrix=matrix)] * calls
        self.ran = []

    def guess(self):
        return GUESS

    def runner(self):
        use, out = self, torch.ones(2, 3)

        def run(config):
            use.ran.append(config)
            Use.last = use, config
            if config in use.fails:
                raise use.error
            out.fill_(1.0)
            if config in use.wrong:
                out[-1, -1] = 1.5

        def results(config):
            for _ in use.calls[:2]:
                run(config)
                yield out

        return SimpleNamespace(run=run, results=results, calls=self.calls)

    def seconds(self, config):
        names = LinearConfig.__dataclass_fields__
        far = sum(getattr(config, name) != getattr(self.best, name) for name in names)
        return 1e-5 * (1 + far)


class Bench:
    """The clock goes on by ``each_s`` for each configuration that is timed."""

    def __init__(self, each_s=1.0):
        self.each_s, self.now_s, self.timed = each_s, 0.0, []

    def clock(self):
        return self.now_s

    def timer(self, device, call, *, recorded):
        assert recorded
        call()
        use, config = Use.last
        self.now_s += self.each_s
        self.timed.append(config)
        return use.seconds(config) * len(use.calls)


def tuned(tmp_path, uses, bench=None, most_s=1e9):
    """What a start knows at its end, with what."""
    bench = bench or Bench()
    configs = LinearConfigs()

    tuning = Tuning(
        cache=TuningCache(folder=tmp_path), most_s=most_s, timer=bench.timer, clock=bench.clock
    )
    return tuning.run(HostDevice(), configs, uses), configs


def test_the_search_changes_one_respect_after_the_other(tmp_path):
    use = Use()
    found, configs = tuned(tmp_path, {KEY: use})
    assert found[KEY].config == BEST
    assert found[KEY].is_complete
    assert found[KEY].seconds == pytest.approx(1e-5)
    assert found[KEY].guess_seconds == pytest.approx(6e-5)
    assert configs._found == {KEY: BEST}
    assert len(set(use.ran)) <= 14, "and not every combination"


def test_the_time_of_a_use_is_that_of_one_of_its_calls(tmp_path):
    found, _ = tuned(tmp_path, {KEY: Use(calls=8)})
    assert found[KEY].seconds == pytest.approx(1e-5)


def test_a_guess_that_is_as_good_stays(tmp_path):
    class Flat(Use):
        def seconds(self, config):
            return 1e-5 if config == GUESS else 0.99e-5

    found, _ = tuned(tmp_path, {KEY: Flat()})
    assert found[KEY].config == GUESS


def test_what_fails_or_computes_something_else_is_not_used(tmp_path, caplog):
    wide = replace(GUESS, block_o=128, block_k=64, num_warps=8)
    use = Use(fails=[replace(GUESS, block_o=32)], wrong=[wide])
    found, _ = tuned(tmp_path, {KEY: use})
    assert found[KEY].config.block_o != 128 or found[KEY].config.num_warps != 8
    assert "is not that of others" in caplog.text
    assert found[KEY].is_complete


@pytest.mark.parametrize(
    "error", [PTXASError("registers"), RuntimeError("PassManager::run failed")], ids=repr
)
def test_whatever_the_compiler_refuses_is_not_used(tmp_path, error):
    use = Use(fails=[replace(GUESS, block_o=32, num_warps=2)])
    use.error = error
    found, _ = tuned(tmp_path, {KEY: use})
    assert found[KEY].config == BEST


def test_an_error_of_the_device_ends_the_search(tmp_path):
    use = Use(fails=[replace(GUESS, block_o=32, num_warps=2)])
    use.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory"):
        tuned(tmp_path, {KEY: use})


def test_a_guess_that_does_not_fit_leaves_its_product_out(tmp_path, caplog):
    other = KEY._replace(rows=2)
    found, configs = tuned(tmp_path, {KEY: Use(fails=[GUESS]), other: Use(10)})
    assert set(found) == set(configs._found) == {other}
    assert f"Products of {KEY.name} are not timed: out of resource" in caplog.text


def test_one_wrong_tile_of_a_large_product_is_seen():
    expected = torch.randn(2, 128_256, generator=torch.Generator().manual_seed(1)).bfloat16()
    assert _agree(expected * 1.004, expected)
    found = expected.clone()
    found[1, 64:96] = found[1, 96:128]
    assert (found - expected).norm() < 0.03 * expected.norm()
    assert not _agree(found, expected)
    found[1, 64:96] = float("nan")
    assert not _agree(found, expected)


def test_a_product_that_there_is_no_memory_to_time_is_left_out(tmp_path, caplog):
    class Large(Use):
        def runner(self):
            raise torch.OutOfMemoryError

    other = KEY._replace(rows=2)
    found, configs = tuned(tmp_path, {KEY: Large(), other: Use(10)})
    assert set(found) == set(configs._found) == {other}
    assert f"no memory left to time products of {KEY.name}" in caplog.text


def test_small_batches_and_large_matrices_come_first_until_the_time_is_over(tmp_path):
    uses = {
        KEY._replace(tokens=64, rows=1): Use(10**9),
        KEY._replace(rows=2): Use(10**3),
        KEY._replace(rows=3): Use(10**6),
    }
    bench = Bench()
    order = []
    for most_s in (1.0, 30.0, 1e9):
        found, configs = tuned(tmp_path, uses, bench, most_s)
        order.append([key.rows for key in found])
        assert set(configs._found) == set(found)
    assert order[0] == [3]
    assert order[1][:2] == [3, 2]
    assert order[2] == [3, 2, 1]
    assert all(each.is_complete for each in found.values())


def test_a_search_goes_on_where_it_ended(tmp_path):
    use, bench = Use(), Bench()
    axes = []
    for _ in range(12):
        before = bench.now_s
        found, _ = tuned(tmp_path, {KEY: use}, bench, most_s=6.0)
        assert bench.now_s - before <= 7.0
        axes.append(found[KEY].axes)
    assert axes[0] < 4
    assert axes == sorted(axes)
    assert found[KEY].config == BEST
    bench.timed.clear()
    tuned(tmp_path, {KEY: use}, bench)
    assert bench.timed == [], "what is known is not timed again"


def test_what_is_known_can_be_taken_without_a_look_at_the_model(tmp_path):
    tuned(tmp_path, {KEY: Use()})
    configs = LinearConfigs()
    Tuning(cache=TuningCache(folder=tmp_path), most_s=0.0).load(HostDevice(), configs)
    assert configs._found == {KEY: BEST}


def entry():
    return Tuned(config=BEST, seconds=1e-5, guess_seconds=2e-5, axes=4)


def damage(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_bytes(b"\xff\xfe\x00"),
        lambda path: damage(path, lambda data: data["header"].update(device="another")),
        lambda path: damage(path, lambda data: data.pop("tuned")),
        lambda path: damage(path, lambda data: data["tuned"][0]["config"].update(block_o=65)),
        lambda path: damage(path, lambda data: data["tuned"][0]["config"].update(splits=0)),
        lambda path: damage(path, lambda data: data["tuned"][0]["config"].update(num_warps="4")),
        lambda path: damage(path, lambda data: data["tuned"][0]["config"].pop("num_stages")),
        lambda path: damage(path, lambda data: data["tuned"][0].update(seconds=-1)),
        lambda path: damage(path, lambda data: data["tuned"][0].update(seconds=float("nan"))),
        lambda path: damage(path, lambda data: data["tuned"][0]["key"].update(rows="256")),
        lambda path: damage(path, lambda data: data["tuned"][0]["key"].update(more=1)),
    ],
)
def test_a_file_that_is_damaged_or_anothers_is_told_and_written_anew(tmp_path, caplog, spoil):
    cache = TuningCache(folder=tmp_path)
    cache.write("host", {KEY: entry()})
    assert cache.read("host") == {KEY: entry()}
    (path,) = tmp_path.iterdir()
    spoil(path)
    assert cache.read("host") == {}
    assert "are timed again" in caplog.text
    tuned(tmp_path, {KEY: Use()})
    assert cache.read("host")[KEY].config == BEST


def test_other_devices_and_other_kernels_have_files_of_their_own(tmp_path, monkeypatch):
    import triton

    cache = TuningCache(folder=tmp_path)
    cache.write("host", {KEY: entry()})
    assert cache.read("other") == {}
    with monkeypatch.context() as patch:
        patch.setattr(triton, "__version__", "0.0")
        assert cache.read("host") == {}
    with monkeypatch.context() as patch:
        patch.setattr(tuning_cache, "kernels_digest", lambda: "changed")
        assert cache.read("host") == {}
        cache.write("host", {})
    assert len(list(tmp_path.iterdir())) == 2
    assert cache.read("host") == {KEY: entry()}


def test_processes_that_tune_at_once_keep_what_the_others_have_found(tmp_path):
    cache, other = TuningCache(folder=tmp_path), KEY._replace(rows=2)
    less, slower = replace(entry(), axes=1), replace(entry(), seconds=2e-5)
    cache.write("host", {KEY: entry()})
    cache.write("host", {other: less})
    assert cache.read("host") == {KEY: entry(), other: less}
    cache.write("host", {KEY: slower, other: entry()})
    assert cache.read("host") == {KEY: entry(), other: entry()}


def test_a_folder_that_cannot_be_written_is_told(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    TuningCache(folder=file / "folder").write("host", {KEY: entry()})
    assert "The next start times products again" in caplog.text


def test_one_batch_stands_for_each_class():
    assert representatives([1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]) == (
        16, 32, 64, 128,
    )  # fmt: skip
    assert representatives([1, 2, 4, 6]) == (6,)
    assert representatives([16, 24, 200]) == (16, 24, 200)


def test_a_models_products_are_those_of_its_steps_and_steps_take_what_was_found(
    tmp_path, monkeypatch
):
    """The kernels of a GPU, interpreted; the timer likes one configuration."""
    liked = {"num_stages": 5}

    def timer(device, call, *, recorded):
        seen.clear()
        call()
        return 1e-5 if all(getattr(seen[-1], name) == v for name, v in liked.items()) else 1e-4

    seen, real = [], triton_kernels.kernels.linear

    def noting(x, matrix, out, *, config=None, **settings):
        seen.append(config)
        real(x, matrix, out, config=config, **settings)

    config = CONFIG | {"num_hidden_layers": 2, "intermediate_size": 64}
    model = tiny_model(config, dtype="float32")
    kernels = triton_kernels.TritonKernels(torch.device(DEVICE))
    monkeypatch.setattr("ridgeline.kernels.triton.tuning.linear", noting)
    monkeypatch.setattr(triton_kernels.kernels, "linear", noting)
    executor = tiny_executor(
        model=model,
        make=lambda models, size: host_executor(models, size, kernels=kernels, execution="eager"),
    )
    executor._on_device()
    own = executor._models[ModelRole.TARGET]
    with torch.inference_mode():
        own.tune(Tuning(cache=TuningCache(folder=tmp_path), most_s=1e9, timer=timer))
    keys = {(key.rows, key.columns, key.gated) for key in own.tuned}
    # q, k and v; their projection; gate and up; down; the head
    assert keys == {
        (80, 48, False), (48, 48, False), (128, 48, True), (48, 64, False), (151, 48, False),
    }  # fmt: skip
    assert {key.tokens for key in own.tuned} == {16}
    assert {each.config.num_stages for each in own.tuned.values()} == {5}
    assert executor.tuned_products() is own.tuned
    seen.clear()
    tokens = Driver(executor).decode(0, PROMPT, 3)
    assert {each.num_stages for each in seen if each is not None} == {5}
    expected = Driver(tiny_executor(model=model)).decode(0, PROMPT, 3)
    assert tokens == expected
    executor.close()


def test_the_host_in_the_place_of_a_gpu_times_nothing(tmp_path):
    tuning = Tuning(cache=TuningCache(folder=tmp_path))
    executor = tiny_executor(
        make=lambda models, size: host_executor(models, size, tuning=tuning, warm_up=True)
    )
    assert executor.tuned_products() == {}
    assert list(tmp_path.iterdir()) == []
    executor.close()


def test_products_are_tuned_before_steps_are_recorded(monkeypatch):
    order = []
    for name in ("tune", "warm_up"):
        noting = partial(lambda name, *_, **__: order.append(name), name)
        monkeypatch.setattr(f"ridgeline.executors.cuda.executor.{name}", noting)
    for settings in ({"tuning": object()}, {"warm_up": True}, {"tuning": 1, "warm_up": True}, {}):
        make = partial(host_executor, **settings)
        tiny_executor(make=make).close()
        order.append("")
    assert order == ["tune", "", "warm_up", "", "tune", "warm_up", "", ""]


@pytest.mark.parametrize(("kind", "times"), [("cuda", 1), ("cpu", 0)])
def test_only_a_gpus_time_is_taken(kind, times):
    taken = []
    device = SimpleNamespace(torch_device=SimpleNamespace(type=kind))
    warming.tune(device, [SimpleNamespace(tune=taken.append)], "how")
    assert taken == ["how"] * times


def test_the_setting(monkeypatch, tmp_path):
    assert gpu_tuning("off") is None
    assert gpu_tuning(str(tmp_path)).cache.folder == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert gpu_tuning("auto").cache.folder == tmp_path / "ridgeline" / "tuned"
    models = {ModelRole.TARGET: tiny_model()}
    for path in ("off", "auto"):
        create_executor(
            models, EngineConfig(executor="reference", block_tokens=4, tuning_cache_path=path)
        ).close()
    with pytest.raises(SettingsError, match="tuning_cache_path is of the cuda executor"):
        create_executor(
            models, EngineConfig(executor="reference", block_tokens=4, tuning_cache_path="/x")
        )


def test_known_products_are_logged(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    tuned(tmp_path, {KEY: Use()}, Bench(), most_s=3.0)
    assert "Products of 0 of 1 shapes are tuned; " in caplog.text
    assert "and the next start goes on" in caplog.text
