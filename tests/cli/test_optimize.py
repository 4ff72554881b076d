"""``ridgeline optimize`` on real engines, with a budget of seconds."""

import json
from argparse import Namespace
from html import unescape
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from ridgeline.cli import optimize
from ridgeline.cli.config_file import apply_config_file
from ridgeline.cli.main import build_parser, main
from ridgeline.core.config import EngineConfig, with_overrides
from ridgeline.optimize import parse_quality


class _Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.outside, self.scripts = [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.outside += [found[name] for name in ("src", "href") if name in found]
        if tag == "script":
            self.scripts.append(found.get("type"))


def test_a_run_of_seconds_writes_what_it_says(calibrated, capsys, tmp_path):
    out, page, data = (tmp_path / name for name in ("best.yaml", "best.html", "best.json"))
    options = ["optimize", "--workload", "batch", "--budget", "10s", "--max-num-seqs", "32"]
    options += ["-o", str(out), "--html", str(page), "--json", str(data)]
    assert main(options) == 0
    printed = capsys.readouterr().out
    result = json.loads(data.read_text())
    assert " ".join(result["verdict"].split()[:2]) in printed
    assert result["winner"] == {} or result["ratio"]["low"] > 1.0
    assert "max_num_seqs" not in result["winner"]  # it was given
    assert result["sides"]["default"]["num_visits"] >= 1
    assert {"prefill", "decode"} == result["sides"]["default"]["utilization"].keys()
    assert _settings(out) == EngineConfig(max_num_seqs=32, **result["winner"])
    _check_page(page.read_text(), result)
    assert main(options) == 2  # and nothing is written over
    assert "is there already" in capsys.readouterr().err


def _settings(path):
    arguments = build_parser().parse_args(["serve", "--config", str(path)])
    apply_config_file(arguments)
    return with_overrides(EngineConfig(), **_engine(arguments))


def _engine(arguments: Namespace):
    names = EngineConfig.__dataclass_fields__
    return {name: found for name, found in vars(arguments).items() if name in names}


def _check_page(text, result):
    links = _Links()
    links.feed(text)
    assert (links.outside, links.scripts) == ([], ["application/json"])
    assert len(text) < 1_000_000
    drawings = text.split("<svg")[1:]
    assert len(drawings) >= 4
    for drawing in drawings:
        ElementTree.fromstring("<svg" + drawing.partition("</svg>")[0] + "</svg>")
    verdict, _, details = text.partition("The choice")  # what is read first
    assert result["commands"]["serve"] in unescape(verdict)
    assert all(note in unescape(verdict) for note in result["notes"])
    assert not any(note in unescape(details.partition("<script")[0]) for note in result["notes"])
    embedded = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(embedded) == result


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--budget", "1s"), "from 10s to 24h"),
        (("--quality", "kl<0.02"), "--quality is written"),
        (("--slo", "ttft"), "--slo is written"),
        (("--workload", "batch", "--rate", "2"), "no --rate"),
        (("--trace", "a", "--rate", "2"), "a trace has its own times"),
        (("--load-format", "dummy"), "--quality none"),
        (("-o", "no/such/folder/a.yaml"), "no such folder"),
        (("--html", ".", "--force"), "cannot be written"),
        (("--html", "-"), "are files"),
    ],
)
def test_what_cannot_be_is_one_error_before_anything_is_measured(
    calibrated, capsys, monkeypatch, tmp_path, options, says
):
    monkeypatch.chdir(tmp_path)
    try:
        assert main(["optimize", *options]) in (1, 2)
    except SystemExit as end:
        assert end.code == 2
    assert says in capsys.readouterr().err
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize("option", ["--trace", "--text"])
def test_files_are_read_before_a_machine_is_calibrated(capsys, monkeypatch, option):
    monkeypatch.setattr(optimize, "calibration_of", lambda *_, **__: pytest.fail("calibrates"))
    assert main(["optimize", option, "nowhere"]) == 2
    assert "nowhere cannot be read: No such file or directory." in capsys.readouterr().err


def test_where_nothing_may_win_a_report_is_written(calibrated, tmp_path):
    out, page = tmp_path / "best.yaml", tmp_path / "best.html"
    given = ("--no-enable-prefix-caching", "--kv-cache-dtype", "auto", "--speculation", "off")
    sizes = ("--max-num-seqs", "8", "--quantization", "none", "--text", str(tmp_path / "text"))
    (tmp_path / "text").write_text("the cat sat on the mat. " * 200)
    options = ["optimize", "--workload", "batch", "--budget", "10s", "--quality", "none"]
    assert main([*options, *given, *sizes, "-o", str(out), "--html", str(page)]) == 0
    again = out.read_text().splitlines()[1]
    assert "--no-enable-prefix-caching" in again
    assert f"--text {tmp_path / 'text'}" in again
    assert "</html>" in page.read_text()


def test_limits_of_quality_are_read_as_they_are_written():
    limits = parse_quality("kl<=0.02,top1>=0.9,ppl<=1.05")
    assert (limits.kl, limits.top1, limits.ppl) == (0.02, 0.9, 1.05)
    assert parse_quality(str(limits)) == limits
    assert not parse_quality("none").is_set
