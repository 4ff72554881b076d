"""``--config FILE.yaml``: what it sets, what goes before it, and what it refuses."""

import argparse
import json
from pathlib import Path

import pytest

from ridgeline.cli import main
from ridgeline.cli.config_file import apply_config_file
from ridgeline.cli.main import build_parser
from ridgeline.cli.options import engine_settings, given_settings, sampling_params
from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.server.config import ServerConfig


def parse(tmp_path, text, *words) -> argparse.Namespace:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    command, *rest = words
    arguments = build_parser().parse_args([command, "--config", str(path), *rest])
    apply_config_file(arguments)
    return arguments


def test_every_kind_of_setting(tmp_path):
    text = """
        model: some/model
        max-model-len: 512
        dtype: bfloat16
        enable_prefix_caching: false
        kv_cache_memory_bytes: 2GB
        adapters: {sql: folder}
        tenant_weights: {a: 2}
        port: 8080
        api_key: [one, two]
    """
    arguments = parse(tmp_path, text, "serve")
    assert arguments.model == "some/model"
    settings = engine_settings(arguments)
    assert settings == {
        "max_model_len": 512,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 2 * 10**9,
        "adapters": {"sql": "folder"},
        "tenant_weights": {"a": "2"},
    }
    server = ServerConfig(**given_settings(arguments, ServerConfig))
    assert server.port == 8080
    assert list(server.api_key) == ["one", "two"]


def test_settings_mean_what_the_same_options_mean(tmp_path):
    text = "tenant_weights: {a: 2}\nnum_speculative_tokens: 3\nkv_ttl_s: 1.5\nseed: 7\n"
    words = ("--tenant-weights", "a=2", "--num-speculative-tokens", "3", "--kv-ttl-s", "1.5")
    plain = build_parser().parse_args(["serve", *words, "--seed", "7"])
    assert engine_settings(parse(tmp_path, text, "serve")) == engine_settings(plain)


def test_the_command_line_goes_before(tmp_path):
    text = "model: a\nmax_num_seqs: 3\nstop: [x]\ntemperature: 0.5\ndtype: float32\n"
    arguments = parse(tmp_path, text, "generate", "b", "--max-num-seqs", "9", "--stop", "y")
    assert arguments.model == "b"
    assert engine_settings(arguments) == {"max_num_seqs": 9, "dtype": "float32"}
    params = sampling_params(arguments)
    assert (params.temperature, list(params.stop)) == (0.5, ["y"])


def test_a_command_runs_with_it(model_folder, tmp_path, capsys):
    path = tmp_path / "settings.yaml"
    path.write_text(f"model: {model_folder}\nexecutor: reference\nmax_tokens: 3\n")
    assert main(["generate", "--config", str(path), "--prompt", "the", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_model_length: 5", "did you mean 'max_model_len'"),
        ("prompt: hello", "no setting 'prompt'"),
        ("port: 80", "no setting 'port'"),  # of serve, and this is generate
        ("max_model_len: many", "max_model_len: 'many' is not possible: expected a whole number."),
        ("max_model_len: true", "is not possible"),
        ("offline: 1", "offline: 1 is not possible"),
        ("dtype: null", "is not possible"),
        ("dtype: [a, b]", "is not possible"),
        ("model: {a: b}", "is not possible: expected one value"),
        ("- 1", "must hold lines of a name and its value"),
        ("seed: 1\na: [1\nb: 2", ", line 3, is not YAML: expected ',' or ']', but got ':'."),
        ("a: \0", "not YAML"),
        ("a: 2024-14-41", "not YAML: a value is none of its type's."),
        ("[" * 5000, "not YAML"),
        ("logit_bias: {1: 2024-01-01}", "is not possible"),
        ("max_num_seqs: 1\nmax-num-seqs: 2", ", line 2: 'max-num-seqs' is there twice."),
        ("adapters: {a: x, a: y}", ", line 1: 'a' is there twice."),
    ],
)
def test_mistakes_are_one_sentence(tmp_path, capsys, text, words):
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    assert main(["generate", "--config", str(path), "--prompt", "x"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert str(path) in error
    assert error.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file without an end")
def test_a_file_without_an_end(capsys):
    assert main(["generate", "--config", "/dev/full", "--prompt", "x"]) == 2
    assert "it is no such file" in capsys.readouterr().err


def test_a_file_that_is_not_there(capsys):
    assert main(["generate", "--config", "/nowhere.yaml", "--prompt", "x"]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_unset_settings_are_the_defaults(tmp_path):
    assert engine_settings(parse(tmp_path, "", "generate")) == {}
    assert EngineConfig(**engine_settings(parse(tmp_path, "dtype: auto", "chat"))) == EngineConfig()


@pytest.mark.parametrize("name", ["api_key", "admin_api_key", "kv_redis_url"])
@pytest.mark.parametrize(
    "value",
    [
        *("{swordfish: 1}", "[{a: swordfish}]", "*swordfish", "!!int swordfish", "{a: swordfish"),
        *('!!int "swordfish\'s"', "!!float swordfish", "!!bool swordfish", "!!timestamp swordfish"),
    ],
)
def test_no_secret_is_shown(tmp_path, capsys, name, value):
    path = tmp_path / "settings.yaml"
    path.write_text(f"{name}: {value}\n")
    assert main(["serve", "--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert "swordfish" not in error
    assert str(path) in error


def test_what_is_printed_of_a_server_has_no_key():
    config = ServerConfig(api_key=("swordfish",), admin_api_key="swordfish")
    assert "swordfish" not in repr(config)
    for url in (
        "ftp://me:swordfish@router",
        "http://me:sword/swordfish@router",
        "http://swordfish@r",
    ):
        with pytest.raises(SettingsError) as caught:
            ServerConfig(join=(url,), router_key_file="key", api_key=("key",))
        assert "swordfish" not in str(caught.value)
