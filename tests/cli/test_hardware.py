"""``ridgeline hardware``."""

import json

from ridgeline.cli.main import main


def run(capsys, *arguments):
    code = main(["hardware", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_catalogue_is_listed_in_100_columns(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    for name in ("h100", "a100-40", "wse-3", "edge-tpu", "jetson-agx-orin", "tpu-v4", "trainium"):
        assert f"\n{name} " in out


def test_all_of_a_machine_is_told_in_100_columns(capsys):
    for name in ("h100", "mi300x", "inferentia2", "wse-3"):
        _, out, _ = run(capsys, name)
        assert max(map(len, out.splitlines())) <= 100
    told = " ".join(run(capsys, "h100")[1].split())
    assert "order of magnitude of one all-reduce among" in told


def test_this_machine_is_offered_only_where_it_is_taken(capsys):
    for name in ("this", "h100-sxm"):
        code, _, err = run(capsys, name)
        assert code == 2
        assert "hoose one of a10, " in err
    assert "This machine, which `ridgeline ceilings` measures" in run(capsys, "this")[2]


def test_a_machine_without_a_price_says_so(capsys):
    _, out, _ = run(capsys, "mi300x")
    assert "no price: no source is known" in out
    assert "no price" not in run(capsys, "l4")[1]


def test_every_price_has_a_dated_source_or_says_that_it_has_none(capsys):
    devices = json.loads(run(capsys, "--json")[1])
    sources = {d["usd_per_hour"]["source"] for d in devices.values() if d["usd_per_hour"]}
    assert all("2026" in source or "undated" in source for source in sources)


def test_an_unknown_name_is_one_line(capsys):
    code, out, err = run(capsys, "abacus")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
