import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest

from ridgeline.cli.main import build_parser, main
from ridgeline.cli.options import num_bytes
from ridgeline.core.config import EngineConfig
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.executors import executor_names
from ridgeline.kernels.cpu.library import chosen_level
from ridgeline.kernels.gpu import missing_for_gpu
from ridgeline.roofline.calibration import calibration_path, save, typical
from ridgeline.roofline.catalogue import load_catalogue


def run(capsys, *arguments):
    code = main([*map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def generate(capsys, folder, *arguments):
    return run(capsys, "generate", folder, "--prompt", "the cat", *arguments)


def test_json_is_one_object_and_repeats(model_folder, capsys):
    options = ("--max-tokens", 8, "--temperature", 0, "--json")
    code, out, err = generate(capsys, model_folder, *options)
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["prompt_tokens"] == 2
    assert len(result["token_ids"]) == 8
    assert result["finish_reason"] == "length"
    assert result["timing"]["ttft_s"] > 0
    assert result["timing"]["tpot_s"] > 0
    again = json.loads(generate(capsys, model_folder, *options)[1])
    assert result["roofline"]["decode"]["tokens"] >= 7
    measured = {"timing": None, "roofline": None}
    assert {**again, **measured} == {**result, **measured}


def test_text_follows_the_prompt_and_timing_goes_to_stderr(model_folder, capsys):
    options = ("--max-tokens", 8, "--temperature", 0)
    code, out, err = generate(capsys, model_folder, *options)
    expected = json.loads(generate(capsys, model_folder, *options, "--json")[1])["text"]
    assert code == 0
    assert out == f"the cat{expected}\n"
    assert "TTFT" in err
    assert "tok/s" in err


def test_what_was_drafted_stands_beside_the_timing(model_folder, capsys):
    options = ("--max-tokens", 32, "--temperature", 0)
    assert "drafted" not in generate(capsys, model_folder, *options)[2]
    err = generate(capsys, model_folder, *options, "--speculation", "ngram")[2]
    accepted, drafted = map(int, re.search(r"(\d+) of (\d+) drafted tokens accepted", err).groups())
    assert 0 <= accepted <= drafted > 0


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_model_that_gives_no_token_is_an_error(damaged_folder, capsys, options):
    code, out, err = generate(capsys, damaged_folder, *options)
    assert code == 1
    assert "error: No token was possible: the logits are not finite" in err
    assert not options or json.loads(out)["finish_reason"] == "error"


def test_several_samples(model_folder, capsys):
    options = ("--n", 3, "--seed", 5, "--max-tokens", 4, "--json", "--logprobs", 1)
    result = json.loads(generate(capsys, model_folder, *options)[1])
    assert len(result["samples"]) == 3
    assert result["samples"][0]["text"] == result["text"]
    assert len(result["logprobs"]) == 4


def test_a_seed_on_the_command_line_repeats_the_text(model_folder, capsys):
    options = ("--max-tokens", 8, "--temperature", 2, "--json")
    texts = [
        json.loads(generate(capsys, model_folder, *options, "--seed", seed)[1])["text"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_prompt_from_a_file_or_standard_input(model_folder, capsys, tmp_path, monkeypatch):
    options = ("generate", model_folder, "--max-tokens", 4, "--temperature", 0, "--json")
    path = tmp_path / "prompt.txt"
    path.write_text("the cat")
    by_file = json.loads(run(capsys, *options, "--prompt-file", path)[1])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"the cat")))
    by_stdin = json.loads(run(capsys, *options)[1])
    by_flag = json.loads(run(capsys, *options, "--prompt", "the cat")[1])
    assert by_file["text"] == by_stdin["text"] == by_flag["text"]


@pytest.mark.parametrize("n", [1, 2])
def test_logprobs_are_a_table_without_json(model_folder, capsys, n):
    options = ("--max-tokens", 3, "--temperature", 0, "--logprobs", 2, "--n", n)
    found = json.loads(generate(capsys, model_folder, *options, "--json")[1])
    out = generate(capsys, model_folder, *options, "--prompt-logprobs", 0)[1]
    assert "prompt" in out
    assert out.count("likeliest") == 1 + n
    for entry in found["logprobs"]:
        assert out.count(f"{entry['logprob']:.4f}") >= n


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("2GB", 2 * 10**9), ("2gb", 2 * 10**9), ("1.5 GiB", 3 * 2**29),
     ("2G", 2**31), ("10kB", 10_000), ("7B", 7), ("0.1TB", 10**11)],
)  # fmt: skip
def test_sizes_have_units(text, expected):
    assert num_bytes(text) == expected
    parser = build_parser()
    arguments = parser.parse_args(["generate", "--kv-cache-memory-bytes", text])
    assert arguments.kv_cache_memory_bytes == expected


BAD_COMMAND_LINES = [
    *(
        (["--kv-cache-memory-bytes", text], "--kv-cache-memory-bytes")
        for text in ("2XB", "-1", "1e9", "GB", "2 G B", "", "2.GB")
    ),
    (["--temperature", "-1"], "temperature"),
    (["--temperature", "nan"], "temperature"),
    (["--top-p", "0"], "--top-p"),
    (["--max-tokens", "0"], "--max-tokens"),
    (["--max-tokens", "1.5"], "--max-tokens"),
    (["--n", "1000000"], "n must be"),
    (["--logit-bias", "[1]"], "--logit-bias"),
    (["--logit-bias", '{"5": 1000}'], "--logit-bias"),
    (["--logit-bias", '{"99999": 1}'], "99999"),
    (["--stop", ""], "stop"),
    (["--max-model-len", "100000"], "--max-model-len"),
    (["--dtype", "int7"], "int7"),
    (["--executor", "abacus"], "abacus"),
    (["--no-such-option"], "there is no option --no-such-option (see ridgeline generate --help)"),
    (["--temprature=1"], "no option --temprature; did you mean --temperature? (see ridgeline gen"),
    (["one-more"], "unexpected argument one-more"),
    (["--seed", "abc"], "--seed: expected a whole number"),
    (["--temperature", "hot"], "--temperature: expected a number"),
    (["--stop-token-ids", "x"], "--stop-token-ids: expected a whole number"),
    (["--prompt-file", "/no/such/file"], "--prompt-file"),
    (["--prompt-ids", "1"], "--prompt-ids"),
]


@pytest.mark.parametrize(("options", "named"), BAD_COMMAND_LINES, ids=lambda v: " ".join(v or []))
def test_bad_command_lines_are_one_sentence_and_code_2(model_folder, capsys, options, named):
    try:
        code, out, err = generate(capsys, model_folder, *options)
    except SystemExit as stop:  # argparse
        code, captured = stop.code, capsys.readouterr()
        out, err = captured.out, captured.err
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none", "cannot be read: No such file or directory."),
        (".", "cannot be read: Is a directory."),
        ("binary", "is not UTF-8 text."),
    ],
)
def test_a_prompt_file_that_is_none_is_named_with_the_reason(capsys, tmp_path, name, reason):
    (tmp_path / "binary").write_bytes(b"\x7fELF\xff")
    code, _, err = run(capsys, "generate", "--prompt-file", tmp_path / name)
    assert code == 2
    assert err == f"error: {tmp_path / name} {reason}\n"


def damage(folder, kind):
    """Break a copy of the model folder in one way."""
    weights, config = folder / "model.safetensors", folder / "config.json"
    match kind:
        case "no folder":
            shutil.rmtree(folder)
        case "no config":
            config.unlink()
        case "config is not JSON":
            config.write_text("{")
        case "unknown architecture":
            config.write_text(json.dumps({"model_type": "perceptron"}))
        case "no weights":
            weights.unlink()
        case "truncated weights":
            weights.write_bytes(weights.read_bytes()[:-100])
        case "corrupted header":
            weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
        case "other shape":
            config.write_text(config.read_text().replace('"hidden_size": 48', '"hidden_size": 60'))
        case "broken tokenizer":
            (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
        case "no tokenizer":
            (folder / "tokenizer.json").unlink()
            (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("no folder", 1), ("no config", 1), ("config is not JSON", 1), ("unknown architecture", 1),
        ("no weights", 1), ("truncated weights", 1), ("corrupted header", 1), ("other shape", 1),
        ("broken tokenizer", 1), ("no tokenizer", 2),
    ],
)  # fmt: skip
def test_bad_models_are_one_sentence(model_folder, tmp_path, capsys, kind, code):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    damage(folder, kind)
    actual, out, err = generate(capsys, folder)
    lines = [line for line in err.splitlines() if not line.startswith("WARNING")]
    assert (actual, out) == (code, "")
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert len(lines[0]) < 1000


@pytest.mark.parametrize("options", [(), ("--json",), ("--n", 2)])
def test_an_output_that_the_context_ends_is_said(model_folder, capsys, options):
    options = ("--max-model-len", 32, "--ignore-eos", *options)
    said = "The context of 32 tokens is full"
    assert said in generate(capsys, model_folder, *options)[2]
    limited = generate(capsys, model_folder, *options, "--max-tokens", 31)[2]
    assert f"{said}: the output ends there, before --max-tokens 31." in limited
    assert said not in generate(capsys, model_folder, *options, "--max-tokens", 30)[2]


def test_without_a_tokenizer_there_are_only_ids(model_folder, tmp_path, capsys):
    shutil.copytree(model_folder, folder := tmp_path / "model")
    damage(folder, "no tokenizer")
    code, _, err = generate(capsys, folder)
    assert code == 2
    assert f"{folder} has no tokenizer; give the prompt as token ids: --prompt-ids 1,2,3." in err
    options = ("generate", folder, "--prompt-ids", "1,2", "--max-tokens", 3, "--temperature", 0)
    code, one, _ = run(capsys, *options)
    assert code == 0
    assert len([int(token) for token in one.split(",")]) == 3
    assert run(capsys, *options, "--n", 2)[:2] == (0, f"[0] {one}[1] {one}")


def test_prompt_longer_than_the_context(model_folder, capsys):
    code, _, err = run(capsys, "generate", model_folder, "--prompt", "x " * 500)
    assert code == 2
    assert "the context holds 256" in err


def test_a_prompt_that_is_not_utf_8(model_folder, capsys):
    code, out, err = run(capsys, "generate", model_folder, "--prompt", "a\udcff")
    assert (code, out) == (2, "")
    assert "stands for a byte that was not UTF-8" in err


def test_a_broken_chat_template_is_in_the_way_of_chats_only(model_folder, tmp_path, capsys):
    shutil.copytree(model_folder, folder := tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% if %}")
    code, _, err = generate(capsys, folder, "--max-tokens", 2)
    assert (code, "template" in err) == (0, False)
    asked_for = ("generate", model_folder, "--prompt", "a", "--chat-template", "{% if %}")
    for command in (("chat", folder), asked_for):
        code, out, err = run(capsys, *command)
        assert (code, out) == (2, "")
        assert err.startswith("error: The chat template does not compile: ")


def test_a_chat_template_that_raises(model_folder, capsys):
    template = "{{ raise_exception('roles must alternate') }}"
    code, _, err = run(capsys, "chat", model_folder, "--chat-template", template)
    assert code == 2
    assert "roles must alternate" in err


def test_closed_output_ends_quietly(model_folder):
    """`ridgeline generate … | head -c 1` leaves no traceback."""
    command = [sys.executable, "-m", "ridgeline", "generate", str(model_folder), "--prompt", "a"]
    process = subprocess.Popen(
        [*command, "--max-tokens", "200", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    process.stdout.read(1)
    process.stdout.close()
    assert b"Traceback" not in process.stderr.read()
    process.wait(300)


def test_every_setting_is_an_option_and_help_fits_a_screen(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    short = capsys.readouterr().out
    assert len(short.splitlines()) <= 60
    with pytest.raises(SystemExit):
        main(["generate", "--help-all"])
    full = capsys.readouterr().out
    fields = {*EngineConfig.__dataclass_fields__, *SamplingParams.__dataclass_fields__} - {"model"}
    for field in fields:
        assert "--" + field.replace("_", "-") in full, field


def test_the_set_of_commands_is_what_the_docs_say():
    (commands,) = build_parser()._subparsers._group_actions
    assert set(commands.choices) == {
        "batch", "bench", "bench-figures", "bench-ladder", "bench-links", "bench-serve", "cascade",
        "ceilings", "chat", "collect-env", "completion", "convert", "cost", "distill", "embed",
        "eval", "fleet", "generate", "hardware", "imatrix", "list", "memory", "optimize", "plan",
        "probe", "profile", "prune", "pull", "quantize", "rank", "rerank", "rm", "roofline",
        "route", "run", "serve", "show", "train-adapter", "tune", "worker",
    }  # fmt: skip


def test_collect_env(capsys, monkeypatch):
    code, out, _ = run(capsys, "collect-env", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["packages"]["torch"].startswith("2.")
    assert set(facts["executors"]) == set(executor_names())
    assert facts["executors"]["reference"] == facts["executors"]["cpu"] == "runs"
    assert facts["executors"]["cuda"] == (missing_for_gpu() or "runs")
    assert facts["cpu_level"] == chosen_level()
    assert facts["cpu_level"] in facts["cpu_levels"]
    assert facts["cpu_ops_by_reference"] == []
    assert facts["flash_attention"] == "not installed"
    assert "llama" in facts["model_types"]
    code, out, _ = run(capsys, "collect-env")
    assert "llama" in out
    monkeypatch.setenv("RIDGELINE_CPU_LEVEL", "none")
    code, out, _ = run(capsys, "collect-env", "--json")
    assert code == 0
    facts = json.loads(out)
    assert "'none' cannot run here" in facts["cpu_level"]
    assert facts["executors"]["cpu"] == facts["cpu_level"]


def test_collect_env_answers_whatever_is_kept_for_a_level_that_does_not_run(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    measured = replace(load_catalogue().device("l4").ceilings(), measured=True)
    save(msgspec.structs.replace(typical(measured), executor="cpu"), calibration_path("cpu"))
    monkeypatch.setenv("RIDGELINE_CPU_LEVEL", "none")
    code, out, _ = run(capsys, "collect-env", "--json")
    assert code == 0
    assert "'none' cannot run here" in json.loads(out)["step_seconds"]


def test_token_ids_as_prompt(model_folder, capsys):
    options = ("generate", model_folder, "--max-tokens", 4, "--temperature", 0, "--json")
    ids = json.loads(run(capsys, *options, "--prompt-ids", "256,257")[1])
    assert ids["prompt_tokens"] == 2
    code, out, _ = run(capsys, *options[:-1], "--prompt-ids", "256,257")
    assert (code, out) == (0, ids["text"] + "\n")
    with pytest.raises(SystemExit):
        main([*map(str, options), "--prompt-ids", "1,x"])


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_locale_without_utf_8(model_folder, encoding):
    """What it cannot show is a question mark, and JSON is whole in any encoding."""
    command = [sys.executable, "-m", "ridgeline", "generate", str(model_folder)]
    command += ["--prompt", "a → b"]
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    limits = ("--max-tokens", "2", "--temperature", "0")
    text = subprocess.run([*command, *limits], env=env, capture_output=True, check=True).stdout
    assert text.decode(encoding).startswith("a ? b")
    shown = subprocess.run([*command, *limits, "--json"], env=env, capture_output=True, check=True)
    plain = subprocess.run([*command, *limits, "--json"], capture_output=True, check=True)
    assert json.loads(shown.stdout)["text"] == json.loads(plain.stdout)["text"]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_standard_input_that_is_closed(model_folder, capsys, monkeypatch, command):
    monkeypatch.setattr(sys, "stdin", None)
    code, _, err = run(capsys, command, model_folder)
    assert code == (2 if command == "generate" else 0)
    assert "Traceback" not in err


def test_a_full_disk_is_one_sentence(model_folder):
    command = [sys.executable, "-m", "ridgeline", "generate", str(model_folder), "--prompt", "a"]
    with open("/dev/full", "w") as full:
        process = subprocess.run(
            [*command, "--max-tokens", "2"], stdout=full, stderr=subprocess.PIPE, check=False
        )
    assert process.returncode == 1
    assert b"Traceback" not in process.stderr
    assert b"cannot be written" in process.stderr


def test_beams_are_printed_best_first(model_folder, capsys):
    options = ("--beams", 3, "--max-tokens", 5, "--ignore-eos", "--logprobs", 1)
    result = json.loads(generate(capsys, model_folder, *options, "--json")[1])
    sums = [sum(entry["logprob"] for entry in sample["logprobs"]) for sample in result["samples"]]
    assert len(sums) == 3
    assert sums == sorted(sums, reverse=True)
    greedy = ("--temperature", 0, "--max-tokens", 5, "--ignore-eos", "--logprobs", 0, "--json")
    (_, out, _) = generate(capsys, model_folder, *greedy)
    assert sums[0] >= sum(entry["logprob"] for entry in json.loads(out)["logprobs"]) - 1e-6
    code, out, _ = generate(capsys, model_folder, *options[:5])
    assert code == 0
    assert out.splitlines()[0] == f"[0] the cat{result['text']}"
    shorter = generate(capsys, model_folder, "--beams", 2, "--length-penalty", -2, "--json")
    assert shorter[0] == 0


def test_minus_one_token_is_no_limit(model_folder, capsys):
    options = ("--json", "--temperature", 0, "--max-model-len", 24)
    plain = json.loads(generate(capsys, model_folder, *options)[1])
    code, out, _ = generate(capsys, model_folder, *options, "-n", -1)
    assert (code, json.loads(out)["token_ids"]) == (0, plain["token_ids"])
    assert generate(capsys, model_folder, *options, "-n", -2)[0] == 2


def test_the_best_of_more_samples(model_folder, capsys):
    options = ("--seed", 5, "--max-tokens", 4, "--ignore-eos", "--json", "--temperature", 2)
    drawn = json.loads(generate(capsys, model_folder, *options, "--n", 6, "--logprobs", 0)[1])
    best = json.loads(generate(capsys, model_folder, *options, "--best-of", 6, "--n", 2)[1])

    def mean(sample):
        return sum(entry["logprob"] for entry in sample["logprobs"])

    ranked = sorted(drawn["samples"], key=mean, reverse=True)
    assert [each["text"] for each in best["samples"]] == [each["text"] for each in ranked[:2]]
    assert "logprobs" not in best
    code, out, _ = generate(capsys, model_folder, *options[:5], "--temperature", 2, "--best-of", 6)
    assert (code, out.splitlines()[0]) == (0, f"[0] the cat{best['text']}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--beams", 65), "--beams must be between 1 and 64"),
        (("--beams", 2, "--temperature", 1), "--temperature has no part in a beam search"),
        (("--beams", 2, "--best-of", 3), "--best-of has no part in a beam search"),
        (("--length-penalty", 1), "--length-penalty needs --beams"),
        (("--best-of", 2, "--n", 3), "--best-of must be at least --n"),
    ],
)
def test_beams_and_draws_exclude_each_other(model_folder, capsys, options, message):
    code, _, err = generate(capsys, model_folder, *options)
    assert code == 2
    assert message in err
