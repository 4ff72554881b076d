"""What somebody sees who asks a command for help, and what may be typed instead of long names."""

import argparse
import os
import re
import shlex
import subprocess
import sys

import pytest

from ridgeline.cli import examples, other_programs
from ridgeline.cli.main import _BENCHES, COMMANDS, GROUPS, build_parser, main
from ridgeline.roofline.catalogue import load_catalogue

NAMES = [name for name in COMMANDS if not name.startswith("bench-")]
NAMES += [name.replace("bench-", "bench ") for name in COMMANDS if name.startswith("bench-")]


@pytest.mark.parametrize("command", NAMES)
def test_every_help_ends_with_examples_that_parse(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out.partition("examples:\n")[2].splitlines()
    lines = [line.strip() for line in shown]
    assert lines == list(examples.EXAMPLES[command.replace(" ", "-")])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("generate --speculation eagle3 -p x", "--speculation eagle3 needs --draft-model, a draf"),
        ("generate --speculation eagle4 -p x", "--speculation must be one of off, "),
        ("generate --launcher ray -tp 2 -p x", "-tp or --expert-parallel-size alone share one "),
        ("generate -tp 4 -p x", "Leave -tp out."),
        ("quantize embedded -o OUT --bits-per-weight 5 --bits 5", "and not with --bits."),
        ("generate --launcher ray -tp 2 -p x", "one machine: set --workers, and --pipeline-"),
        ("convert embedded -o OUT --kv-heads 3", "--kv-heads must be a divisor of the 2 KV heads"),
        ("convert embedded -o OUT --kv-heads 0", "--kv-heads and --window from 1 on, and --share"),
        ("convert embedded -o OUT --full-every 2", "--full-every goes with --window, and"),
        ("convert embedded -o OUT --window 9 --full-every 6", "--full-every 6 names no layer of"),
        ("distill embedded -o OUT --learning-rate -1", "--learning-rate is -1.0"),
        ("plan -tp 7 --shape llama-3.2-1b --hardware l4 --count 4", "-tp 7 does not divide 4 dev"),
    ],
)
def test_an_error_names_options_as_they_were_typed(words, text, capsys, tmp_path):
    assert main([word.replace("OUT", f"{tmp_path}/window_x") for word in words.split()]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert text in shown
    assert shown.count("error: ") == 1


def test_names_within_paths_and_values_stay_as_they_are():
    parser = build_parser()
    said = "There is no folder '/a/draft_model/x', 'kv_cache_dtype' or draft_model.json."
    assert parser.in_options(said, ["generate"]) == said
    assert parser.in_options(said, []) == said


@pytest.mark.parametrize("line", [line for each in examples.EXAMPLES.values() for line in each])
def test_examples_are_command_lines(line):
    words = shlex.split(line)[1:]
    if words[0] == "bench" and words[1] in _BENCHES:
        words[:2] = ["-".join(words[:2])]
    assert callable(build_parser().parse_args(words).run)


def test_machines_of_examples_are_in_the_catalogue():
    lines = " ".join(line for each in examples.EXAMPLES.values() for line in each)
    names = ",".join(re.findall(r"--hardware (\S+)", lines)).split(",")
    assert len(names) >= 3
    for name in names:
        load_catalogue(None).device(name)


def parsed(*words):
    return build_parser().parse_args(["generate", *words])


def test_short_options():
    given = parsed("-m", "owner/name", "-p", "text", "-n", "3")
    assert (given.model, given.prompt, given.max_tokens) == ("owner/name", "text", 3)
    assert parsed("owner/name").model == "owner/name"
    assert parsed().model is None


def test_an_option_takes_numbers_or_the_word_that_is_no_number(capsys):
    assert parsed("--segment-reuse", "all").segment_reuse == "all"
    assert parsed("--segment-reuse", "16").segment_reuse == 16
    with pytest.raises(SystemExit):
        parsed("--segment-reuse", "some")
    assert "expected a whole number" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("serve", "-c", "4096"), "no option -c: here it is --max-model-len"),
        (("serve", "-ngl", "99"), "no option -ngl: layers are not moved"),
        (("serve", "--trust-remote-code"), "no code of a model is ever run"),
        (("convert", "a", "b", "--format", "gguf", "--type", "q4_0"), "here it is --gguf-type"),
        (("rerank", "-q", "x", "-c", "9"), "no option -c: here it is --max-model-len"),
        (("rerank", "-q", "x", "-np", "9"), "no option -np: here it is --max-num-seqs"),
        (("serve", "-p", "80"), "no option -p: here it is --port"),
        (("serve", "--cpu-offload-gb", "4"), "--weights-memory-bytes is what stays in memory"),
        (("generate", "qwen", "why is it so"), "argument why is it so; a prompt is given as -p"),
        (("serve", "--temp", "0.2"), "no option --temp: requests say how they are sampled"),
        (("generate", "--temp", "0.2"), "no option --temp: here it is --temperature"),
        (("serve", "--reload"), "no option --reload (see"),
        (("tune", "-c", "9"), "no option -c (see"),
        (("ps",), "no command ps: the `/api/ps` of a running server"),
        (("cp", "a", "b"), "no command cp: `ridgeline pull MODEL --alias NAME`"),
        (("create", "x", "-f", "Modelfile"), "no command create: there are no Modelfiles"),
        (("generate", "-ngl", "99"), "no option -ngl: layers are not moved"),  # not -n
        (("-ngl", "99"), "no option -ngl: layers are not moved"),
        (("plan", "--shape", "gpt2", "-ep", "4"), "no option -ep (see"),  # not MODEL 4
        (("bench", "throughput"), "no command bench throughput: `ridgeline bench --batch 32`"),
    ],
)
def test_what_other_programs_call_it_is_answered_with_our_name(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


# What guides of these programs use most.
BEST_KNOWN = {
    "serve": (
        # llama-server
        "-m -c -n -t -b -ub -ngl -fa -np -cb -ctk -ctv -md -hf -hff -a --host --port --api-key "
        "--temp --top-k --top-p --min-p --mlock --no-mmap --numa --jinja --chat-template-file "
        "--embeddings --reranking --metrics --slots --lora --rope-scaling --mmproj --alias -sm -ts "
        "--n-cpu-moe --reasoning-format --draft-max --cache-reuse --slot-save-path --no-webui "
        # vllm serve
        "--model --dtype --max-model-len --gpu-memory-utilization --tensor-parallel-size "
        "--pipeline-parallel-size --data-parallel-size --enable-expert-parallel --quantization "
        "--served-model-name --trust-remote-code --enforce-eager --max-num-seqs --tokenizer "
        "--max-num-batched-tokens --enable-prefix-caching --no-enable-prefix-caching --seed "
        "--kv-cache-dtype --enable-auto-tool-choice --tool-call-parser --reasoning-parser "
        "--chat-template --swap-space --cpu-offload-gb --block-size --download-dir --revision "
        "--load-format --enable-lora --lora-modules --speculative-config --disable-log-requests "
        "--enable-chunked-prefill --limit-mm-per-prompt --guided-decoding-backend --hf-overrides "
        "--generation-config --distributed-executor-backend --task --runner --compilation-config"
    ),
    "generate": (  # llama-cli
        "-m -p -n -c -t -f -s -b -ngl -fa -e -i -cnv -no-cnv --temp --top-k --top-p --min-p "
        "--repeat-penalty --repeat-last-n --mirostat --color --grammar --json-schema -j --mlock "
        "--no-mmap --ignore-eos --keep --no-display-prompt -hf --lora -md --samplers -v --seed"
    ),
    # ollama
    "run": "--verbose --format --think --hidethinking --keepalive --nowordwrap --insecure",
}


@pytest.mark.parametrize("command", BEST_KNOWN)
def test_the_best_known_options_of_others_are_taken_or_answered(command):
    parser = build_parser(command)._subparsers._group_actions[0].choices[command]
    parser.load_options()
    known = frozenset(parser._option_string_actions)
    words = BEST_KNOWN[command].split()
    assert not [w for w in words if w not in known and not other_programs.meant_option(w, known)]


def test_our_names_for_what_others_have_are_there():
    known = build_parser().parse_args(["serve"]).settings_parser._option_string_actions
    everything = {
        option
        for _, parser in commands_of(build_parser())
        for option in parser._option_string_actions
    }
    assert other_programs._SAMPLING | set(other_programs._NAMES) <= everything
    assert not other_programs._OPTIONS.keys() & set(known)
    told = " ".join(other_programs._TOLD)
    assert set(re.findall(r"`ridgeline ([a-z-]+)", told)) <= {*COMMANDS, "--version"}
    assert set(re.findall(r" (--[a-z-]+)", told)) <= {*everything, "--version"}
    assert max(map(len, other_programs._TOLD)) < 120
    assert not other_programs.COMMANDS.keys() & set(COMMANDS)
    told = " ".join([*other_programs.COMMANDS.values(), *other_programs.BENCH_COMMANDS.values()])
    assert set(re.findall(r"`ridgeline ([a-z]+)", told)) <= set(COMMANDS)


@pytest.mark.parametrize("option", ["-p", "-e", "-d"])
def test_a_short_option_is_not_taken_for_the_beginning_of_another(option, capsys):
    with pytest.raises(SystemExit):
        main(["rerank", "-q", "x", option, "text"])
    assert f"there is no option {option}" in capsys.readouterr().err


def test_help_lists_commands_in_groups(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if re.fullmatch(r"  [a-z].*:", line)] == [
        f"  {title}:" for title in GROUPS
    ]
    assert "    bench serve  measure" in shown
    assert shown.index("run a model:") < shown.index("serve a model") < shown.index("pull ")


def commands_of(parser, name=""):
    """Parsers of commands and of theirs, with their options."""
    parser.load_options()
    if parser._subparsers is None:
        yield name, parser
    else:
        for word, each in parser._subparsers._group_actions[0].choices.items():
            yield from commands_of(each, f"{name} {word}")


def test_help_names_the_default_of_each_option_that_has_one():
    unnamed = []
    for name, parser in commands_of(build_parser()):
        shown = parser._get_formatter()
        for action in parser._actions:
            is_flag = isinstance(action.default, bool)
            if is_flag or action.default in (None, argparse.SUPPRESS, []):
                continue
            if "default" not in shown._get_help_string(action):
                unnamed.append(f"{name} {action.option_strings or action.dest}")
    assert not unnamed


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("bench --help", "sequences of a decode step; empty for none; default: 1,8,32"),
        ("bench serve --help", "DIST as --input-len; default: 64"),
        ("serve --help", "port to listen on; default: 8000"),
        ("serve --help-all", "tokens in one KV block; default: 16"),
        ("serve --help-all", "most that the folder may hold; default: 10GiB"),
        ("serve --help-all", "priority (that of a server)"),
        ("serve --help-all", "reuse the KV of prefixes that were computed before; default: on"),
        ("generate --help", "0 is greedy; default: 1 "),
        (
            "generate --help",
            "sampling, where the model's generation_config.json says nothing else:",
        ),
    ],
)
def test_defaults_stand_as_they_are_typed(line, told, capsys):
    with pytest.raises(SystemExit):
        main(line.split())
    assert told in " ".join(capsys.readouterr().out.split())


def test_the_format_of_weights_is_among_the_common_options(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    assert "--quantization" in capsys.readouterr().out


def test_threads_are_the_processors_that_computing_uses():
    program = (
        "from ridgeline.cli.main import build_parser\n"
        "from ridgeline.core.host import usable_cores\n"
        "build_parser().parse_args(['generate', '-t', '1'])\n"
        "print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n"


def test_more_threads_than_processors_are_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        parsed("-t", str(os.cpu_count() + 1))
    assert ended.value.code == 2
    assert "the processors there are" in capsys.readouterr().err


def test_settings_come_from_the_environment(model_folder, capsys, monkeypatch):
    monkeypatch.setenv("RIDGELINE_MODEL", str(model_folder))
    monkeypatch.setenv("RIDGELINE_MAX_TOKENS", "2")
    monkeypatch.setenv("RIDGELINE_DTYPE", "")  # passed on, and not set
    monkeypatch.setenv("RIDGELINE_ENABLE_PREFIX_CACHING", "false")
    assert main(["generate", "-p", "the cat", "--json"]) == 0
    assert '"length"' in capsys.readouterr().out
    assert main(["generate", "-p", "the cat", "--json", "-n", "3"]) == 0
    assert '"prompt_tokens"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("RIDGELINE_MAX_TOKENS", "few", "RIDGELINE_MAX_TOKENS: 'few' is not possible"),
        ("RIDGELINE_ENABLE_PREFIX_CACHING", "maybe", "expected true or false"),
        ("RIDGELINE_MAX_TOKEN", "2", "did you mean 'RIDGELINE_MAX_TOKENS'"),
    ],
)
def test_a_mistake_in_the_environment_is_one_sentence(capsys, monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    assert main(["generate", "-p", "the cat"]) == 2
    assert words in capsys.readouterr().err


def test_what_container_platforms_put_into_the_environment_is_no_setting(monkeypatch):
    """Kubernetes names the address of a service "ridgeline" so, and Docker links did."""
    from ridgeline.cli.environment import apply_environment

    monkeypatch.setenv("RIDGELINE_PORT", "tcp://10.0.0.1:80")
    monkeypatch.setenv("RIDGELINE_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("RIDGELINE_PORT_80_TCP_PROTO", "tcp")
    arguments = build_parser().parse_args(["serve"])
    apply_environment(arguments)
    assert not hasattr(arguments, "port")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_of_a_shell_has_every_command(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "collect-env" in script
    assert "--served-model-name" in script
