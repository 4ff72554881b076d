"""Drawings: labels that can be read, the ridge, and no interval that says nothing."""

from dataclasses import replace
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest

from ridgeline.bench.plot_labels import POINTS_PER_INCH, place_labels
from ridgeline.cli.display import predicted_range
from ridgeline.cli.roofline_chart import Roof, draw_svg, draw_text
from ridgeline.roofline.explain import RooflinePoint
from ridgeline.roofline.predict import Bound

ROOF = Roof(label="measured roof", bytes_per_s=1e10, peak=2e11)
POINT = RooflinePoint(
    name="decode B=1 C=512", phase="decode", tokens=1, context=512, intensity=2.0,
    flops_per_s=1e10, roof_flops_per_s=2e10, seconds=1.0, low_s=0.8, high_s=1.2,
    bound=Bound.MEMORY,
)  # fmt: skip


def overlap(one, other):
    return one.x0 < other.x1 and other.x0 < one.x1 and one.y0 < other.y1 and other.y0 < one.y1


@pytest.mark.parametrize("seed", range(4))
def test_labels_of_a_crowd_lie_apart_and_inside_the_axes(seed):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.transforms import Bbox

    rng = np.random.default_rng(seed)
    places = [(10**x, 10 ** (x + 9)) for x in rng.normal(1, 0.3, 40)]
    places += [(1e-1, 1e8), (1e3, 1e12)]  # in corners
    figure = Figure(figsize=(8, 5.5), dpi=POINTS_PER_INCH, layout="constrained")
    axes = figure.subplots()
    axes.loglog(*zip(*places, strict=True), "o", markersize=5)
    axes.set(xlim=(0.09, 1.1e3), ylim=(0.9e8, 1.1e12))
    roof = [(0.09, 1e9), (1e3, 1e13)]
    labels = [(f"B={number} C=2048", place) for number, place in enumerate(places)]
    texts = place_labels(figure, axes, labels, lines=[roof])
    assert [text.get_text() for text in texts] == [label for label, _ in labels]
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    boxes = [text.get_window_extent(renderer) for text in texts]
    for box in boxes:
        assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1
        assert axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
    assert not any(overlap(one, other) for one, other in combinations(boxes, 2))
    for x, y in axes.transData.transform(places):
        marker = Bbox([[x - 2.5, y - 2.5], [x + 2.5, y + 2.5]])
        assert not any(overlap(marker, box) for box in boxes)
    for share in np.linspace(0, 1, 200):
        x, y = axes.transData.transform([10 ** (np.log10(p) + share * np.log10(q / p))
                                         for p, q in zip(*roof, strict=True)])  # fmt: skip
        assert not any(box.x0 < x < box.x1 and box.y0 < y < box.y1 for box in boxes)


def texts_of(path):
    """matplotlib writes each text as a comment before its outlines."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    tree = ElementTree.parse(path, parser)
    return [each.text.strip() for each in tree.iter(ElementTree.Comment)]


def test_a_drawing_marks_the_ridge_of_each_roof_and_labels_every_point(tmp_path):
    points = [replace(POINT, name=f"decode B={n} C=512", intensity=2.0 * n) for n in (1, 2, 3)]
    beside = Roof(label="datasheet of X", bytes_per_s=1e11, peak=1e13)
    draw_svg(points, tmp_path / "a.svg", ROOF, beside, title="a model")
    texts = texts_of(tmp_path / "a.svg")
    assert {"measured roof, ridge at 20.0 FLOPs/byte", "datasheet of X, ridge at 100.0 FLOPs/byte",
            "decode, 80% interval", *(f"B={n} C=512" for n in (1, 2, 3))} <= set(texts)  # fmt: skip


LEVELS = {"L1": 0.5, "L2": 2.0, "L3": 5.0, "DRAM": 20.0}


def test_a_drawing_has_a_ridge_for_each_level_of_memory(tmp_path):
    """The same figures as the sentence and the JSON: advice for data in a cache is another."""
    roof = replace(ROOF, ridges=LEVELS)
    draw_svg([POINT], tmp_path / "a.svg", roof, title="a model")
    texts = set(texts_of(tmp_path / "a.svg"))
    assert {"L1, ridge at 0.5", "L2, ridge at 2", "L3, ridge at 5"} <= texts
    assert not any(each.startswith("DRAM") for each in texts)  # it is the roof's own
    drawn = draw_text([POINT], roof).splitlines()
    assert drawn[-1].endswith("1 L1 0.5, 2 L2 2, 3 L3 5, D DRAM 20")
    (top,) = (line for line in drawn if "1" in line.partition("|")[2] and "D" in line)
    assert [each for each in top.partition("|")[2] if each not in " /-"] == ["1", "2", "3", "D"]


def test_an_interval_that_says_nothing_is_not_drawn_or_printed(tmp_path):
    draw_svg([replace(POINT, low_s=0.1, high_s=10.0)], tmp_path / "a.svg", ROOF, title="a model")
    assert "decode, error unknown" in texts_of(tmp_path / "a.svg")
    assert predicted_range(0.1, 10.0, ".1f") == "error unknown"
    assert predicted_range(0.8, 1.2, ".1f") == "0.8 to 1.2"
