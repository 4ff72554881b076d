from pathlib import Path

import pytest
from tests.tiny import CONFIG

from ridgeline.core.config import EngineConfig, resolve, with_overrides
from ridgeline.core.errors import OutOfMemoryError, SettingsError
from ridgeline.core.formats import FLOAT32, NumberFormat, float_format
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.models import describe

BLOCK_BYTES = (16 * 3 * 2 * 2 * 8 * 4,)  # 16 tokens × 3 layers × K and V × 2 heads × 8 × float32


def resolved(free_bytes=10**9, **settings):
    return resolve(
        EngineConfig(**settings),
        spec=describe(CONFIG).spec,
        executor="reference",
        dtype="float32",
        block_bytes=BLOCK_BYTES,
        free_bytes=free_bytes,
    )


def test_the_context_is_the_models_own_and_the_pool_no_larger_than_useful():
    config = resolved()
    assert config.max_model_len == 256
    assert config.num_blocks == (64 * 256 // 16,)


def test_the_cache_has_the_models_type_unless_told_otherwise():
    assert resolved().kv_cache_dtype == "float32"
    assert resolved(kv_cache_dtype="int8").kv_cache_dtype == "int8"


def test_formats_have_short_names_and_none_is_the_checkpoints_own():
    config = EngineConfig(kv_cache_dtype="bf16", quantization="none")
    assert (config.kv_cache_dtype, config.quantization) == ("bfloat16", None)


def test_the_context_is_clipped_to_memory():
    config = resolved(kv_cache_memory_bytes=5 * BLOCK_BYTES[0] + 7)
    assert config.num_blocks == (5,)
    assert config.max_model_len == 80
    assert config.kv_cache_bytes == 5 * BLOCK_BYTES[0]


def test_what_was_asked_for_and_does_not_fit_is_an_error_with_numbers():
    with pytest.raises(OutOfMemoryError, match="200 tokens needs 79,872 bytes"):
        resolved(max_model_len=200, kv_cache_memory_bytes=70_000)
    with pytest.raises(OutOfMemoryError):
        resolved(kv_cache_memory_bytes=1)


def test_overrides_return_a_new_object():
    config = EngineConfig()
    assert with_overrides(config, seed=4).seed == 4
    assert config.seed == 0
    with pytest.raises(SettingsError, match="no setting 'sede'; did you mean 'seed'"):
        with_overrides(config, sede=4)


def test_paths_may_be_paths():
    path = Path("some") / "folder"
    config = EngineConfig(model=path, kv_disk_tier_path=path, adapters={"a": path})
    assert config.model == config.kv_disk_tier_path == config.adapters["a"] == str(path)


def test_numbers_may_come_as_text():
    names = ("batch_window_s", "decode_replay_s", "tpot_slo_s", "kv_ttl_s")
    texts = dict.fromkeys((*names, "gpu_memory_utilization"), "0.25")
    config = EngineConfig(**texts, batching="dynamic")
    assert [getattr(config, name) for name in (*names, "gpu_memory_utilization")] == [0.25] * 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be true or false"),
        ({"offline": "yes"}, "offline must be true or false"),
        ({"strict": 0}, "strict must be true or false"),
        ({"adapters": ["a"]}, "adapters must map"),
        ({"adapters": {"a": 5}}, "adapters of 'a' must be text"),
        ({"adapters": {5: "a"}}, "adapters must map names to texts"),
        ({"tenant_weights": 5}, "tenant_weights must map"),
        ({"dtype": 16}, "dtype must be text"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype must be text"),
        ({"draft_model": "small"}, "draft_model has no effect without speculation draft or"),
        (
            {"draft_model": "small", "speculation": "ngram"},
            "draft_model has no effect without speculation",
        ),
        ({"draft_quantization": "int4"}, "draft_quantization has no effect without"),
        ({"reuse_kv": False, "speculation": "ngram"}, "speculation has no effect without reuse_kv"),
        ({"reuse_kv": False, "batching": "static"}, "batching has no effect without reuse_kv"),
        ({"verification": "rejection"}, "verification has no effect without speculation"),
        (
            {"kv_ram_tier_bytes": 1, "enable_prefix_caching": False},
            "kv_ram_tier_bytes has no effect without enable_prefix_caching",
        ),
        (
            {"packed_cache_bytes": 1, "packed_cache_path": "off"},
            "packed_cache_bytes has no effect without packed_cache_path",
        ),
        ({"max_num_seqs": 1.0}, "max_num_seqs must be a whole number"),
        ({"seed": -1}, "seed must be between 0"),
        ({"gpu_memory_utilization": 2}, "utilization must be greater than 0 and at most 1"),
        ({"kv_ttl_s": 0}, "kv_ttl_s must be greater than 0"),
        ({"decode_replay_s": "soon"}, "decode_replay_s must be a number"),
        ({"speculation": "maybe"}, "speculation must be one of off, ngram"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype must be one of auto"),
        ({"draft_quantization": "int5", "speculation": "draft"}, "cannot be quantized to 'int5'"),
        ({"dtype": "fp8"}, "fp8 is what weights are quantized to: --quantization fp8"),
        ({"quantization": "q4_k_m"}, "that is quantized already is read from it"),
        ({"draft_quantization": None}, "draft_quantization must be text"),
        ({"num_speculative_tokens": 7}, "no effect without speculation"),
        (
            {"speculation": "draft", "draft_shape": "tree", "verification": "rejection"},
            "draft_shape has no effect without verification='exact'",
        ),
        ({"kv_disk_tier_bytes": 5}, "no effect without kv_disk_tier_path"),
        ({"tenant_weights": {"a": 2}}, "no effect without scheduling_policy fair"),
        ({"batch_window_s": 0.5}, "no effect without batching dynamic"),
    ],
)
def test_what_would_mean_something_else_or_nothing_is_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        EngineConfig(**settings)


def test_true_bytes_of_formats():
    assert FLOAT32.num_bytes((3, 5)) == 60
    int4 = NumberFormat(name="int4", bits=4, is_float=False, group_size=64, scale_bits=16)
    assert int4.bits_per_element(2048) == 4.25
    assert int4.is_quantized
    per_row = NumberFormat(name="int8", bits=8, is_float=False, scale_bits=32, zero_bits=8)
    assert per_row.num_bytes((10, 100)) == 10 * (100 + 5)


@pytest.mark.parametrize("name", ["torch.bfloat16", "bf16", "bfloat16"])
def test_format_names(name):
    assert float_format(name).name == "bfloat16"


def test_rank_coordinates_are_a_bijection():
    layout = ParallelLayout(tensor=2, context=3, pipeline=2, data=2, expert=4)
    coordinates = [layout.coordinates(rank) for rank in range(layout.num_ranks)]
    assert len(set(coordinates)) == 24
    assert coordinates[1] == (1, 0, 0, 0)
    with pytest.raises(SettingsError):
        ParallelLayout(tensor=2, expert=3)
    with pytest.raises(SettingsError):
        ParallelLayout(tensor=0)
