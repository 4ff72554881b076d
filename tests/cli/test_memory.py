"""``ridgeline memory``: the published figures that docs/planning.md names, by its commands."""

import json

import pytest

from ridgeline.cli.main import main


def run(capsys, text):
    code = main(["memory", *text.split()])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_name_that_is_nothing_is_told_what_it_could_be(capsys):
    """Not that a download failed, of which nobody spoke."""
    for name in ("nosuch", "llama-3.1-9b"):
        code, out, err = run(capsys, name)
        assert (code, out) == (1, "")
        assert err.startswith(
            f"error: There is no folder or shape '{name}'; give a folder, a config.json"
        )
        assert "download" not in err
        assert err.count("\n") == 1
    assert "llama-3.1-8b" in err


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ("llama-2-13b --batch 32 --context 2048", "53.69 GB  32 × 2,048 tokens"),
        ("palm-540b-mha --batch 512 --context 2048", "3.04 TB  512 × 2,048 tokens"),
        ("llama-3.1-70b --context 4096", "1.34 GB  1 × 4,096 tokens"),
        ("llama-3.1-70b", "weights        141.11 GB  in bfloat16"),
        ("--parameters 70e9 --bits 16", "140.00 GB"),
    ],
)
def test_published_figures(capsys, options, printed):
    code, out, _ = run(capsys, options)
    assert code == 0
    assert printed in out


def test_seven_billion_parameters_at_every_published_width(capsys):
    out = run(capsys, "--parameters 7e9 --bits 16,8,4,4.5,3,1.58,1.6875")[1]
    sizes = [line.split(": ")[1] for line in out.splitlines()]
    assert sizes == ["14.00 GB", "7.00 GB", "3.50 GB", "3.94 GB", "2.62 GB", "1.38 GB", "1.48 GB"]


@pytest.mark.parametrize(
    ("shape", "kinds"),
    [
        ("llama-2-7b", ["MHA"]),
        ("llama-3.1-8b", ["GQA"]),
        ("gemma-2b", ["MQA"]),
        ("deepseek-v2-lite", ["MLA"]),
        ("gemma-2-2b", ["GQA", "GQA"]),
    ],
)
def test_each_kind_of_attention_is_named(capsys, shape, kinds):
    groups = json.loads(run(capsys, f"{shape} --json")[1])["kv_groups"]
    assert [group["kind"] for group in groups] == kinds


def test_windows_sharing_and_formats_make_the_cache_smaller(capsys):
    def kv(options):
        return json.loads(run(capsys, f"{options} --json")[1])["kv_bytes"]

    assert kv("mistral-7b --context 8192") == kv("mistral-7b --context 4096")
    whole = kv("llama-2-7b --context 8192")
    assert kv("llama-2-7b --context 8192 --kv-shared-by 2") == whole / 2
    assert whole / 2 < kv("llama-2-7b --context 8192 --kv-cache-dtype int8") < 0.52 * whole


def test_a_longer_step_has_larger_activations(capsys):
    def active(options):
        return json.loads(run(capsys, f"llama-3.1-8b {options} --json")[1])["activation_bytes"]

    assert active("--tokens 4096") == pytest.approx(2 * active("--tokens 2048"), rel=0.01)
    assert active("--batch 5000") > active("--batch 1")


@pytest.mark.parametrize(
    "options",
    [
        "--parameters 7e9 llama-2-7b",
        "--parameters 7e9 --context 5",
        "--parameters 0",
        "--parameters 7e9 --bits many",
        "llama-2-7b --bits 4",
        "llama-2-7b --batch 0",
        "llama-2-7b --quantization bfloat16",
    ],
)
def test_mistakes_are_one_line(capsys, options):
    code, out, err = run(capsys, options)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1


def test_what_is_quantized_on_load_takes_what_the_executor_takes(capsys):
    """8B in int4: layers 3.93 GB, a head of six bits and an embedding of eight."""
    text = "llama-3.1-8b --quantization int4"
    assert (
        "weights          4.77 GB  in int4, as the cpu executor holds them" in run(capsys, text)[1]
    )
    text = "llama-3.1-8b --quantization fp8"
    assert (
        "weights          8.56 GB  in fp8, as the cuda executor holds them" in run(capsys, text)[1]
    )
