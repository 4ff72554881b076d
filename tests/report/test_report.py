"""Drawings and pages, without a browser."""

from xml.etree import ElementTree

import pytest

from ridgeline.report import Axes, Bar, Line, Mark, Page, Tile, cdf, plot, waterfall
from ridgeline.report.scales import Linear, Logarithmic


def drawing(text):
    return ElementTree.fromstring(text.partition("</svg>")[0] + "</svg>")


@pytest.mark.parametrize("value", [0.0, 3.0, 10.0])
def test_a_linear_scale_places_values_between_its_ends(value):
    scale = Linear(0.0, 10.0, 100.0, 0.0)
    assert scale.place(value) == 100.0 - 10 * value
    assert list(scale.ticks()) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]


def test_a_logarithmic_scale_has_round_ticks_and_equal_ratios():
    scale = Logarithmic(1.0, 1000.0, 0.0, 300.0)
    assert scale.place(10.0) == pytest.approx(100.0)
    assert scale.place(100.0) - scale.place(10.0) == pytest.approx(100.0)
    assert {1.0, 10.0, 100.0, 1000.0} <= {round(each, 9) for each in scale.ticks()}


def test_everything_that_is_drawn_is_inside_the_drawing():
    marks = [Mark(x=1, y=2, label="one", bar=(1.5, 2.5)), Mark(x=5, y=90, label="far right")]
    lines = [Line(points=[(0, 0), (6, 100)], label="line")]
    root = drawing(plot(Axes(x="x", y="y"), marks=marks, lines=lines, title="t"))
    width, height = (float(each) for each in root.attrib["viewBox"].split()[2:])
    circles = root.findall("circle")
    assert len(circles) == 2
    assert all(0 < float(c.attrib["cx"]) < width for c in circles)
    assert all(0 < float(c.attrib["cy"]) < height for c in circles)


def test_bars_of_a_waterfall_begin_where_the_one_before_ended():
    bars = [
        Bar(label="default", begin=0, end=1, text="1"),
        Bar(label="<int8>", begin=1, end=1.5, text="1.5", interval=(1.4, 1.6)),
    ]
    first, second = drawing(waterfall(bars, unit="times", title="t")).findall("rect")
    end = float(first.attrib["x"]) + float(first.attrib["width"])
    assert end == pytest.approx(float(second.attrib["x"]), abs=0.2)


def test_shares_of_few_values_are_left_out():
    assert cdf([("none", [], "a")], x="s", limit=None) == ""
    assert "polyline" in cdf([("some", [0.1, 0.2, 0.4], "a")], x="s", limit=0.3)


def test_text_of_others_does_not_become_part_of_the_page():
    page = Page(title="<b>", verdict="a & b", data={"text": "</script><script>alert(1)"})
    page.add_tiles([Tile(name="<i>", value="1")])
    page.add_table(("<u>",), [("<s>",)])
    text = page.to_html()
    assert not any(tag in text for tag in ("<b>", "<i>", "<u>", "<s>"))
    assert text.count("<script") == 1
    assert text.count("</script>") == 1
