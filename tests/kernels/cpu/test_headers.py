"""Numbers that Python repeats are those of the C++ headers, which a compiler does not compare."""

import ctypes
import re

import numpy as np
import pytest
from tests.kernels.cpu import levels

from ridgeline.executors.cpu.pricing import native_kernels
from ridgeline.executors.cpu.roles import FACTOR_COLUMNS
from ridgeline.executors.cpu.traits import KV_SUB_BLOCK
from ridgeline.kernels.cpu import library, matrix, structs

HEADERS = levels.SOURCES.parent / "cpu"


def text(header: str) -> str:
    return (HEADERS / header).read_text()


def constant(header: str, name: str) -> int:
    found = re.search(rf"\b{name} = (\d+)\b", text(header))
    assert found, f"{header} has no {name}"
    return int(found[1])


@pytest.mark.parametrize(
    ("header", "name", "value"),
    [
        ("matrix.h", "kTileRows", matrix.TILE_ROWS),
        ("matrix.h", "kLargestFactor", matrix._LARGEST_FACTOR),
        ("matrix.h", "kBlockColumns", FACTOR_COLUMNS),
        ("kv_cache.h", "kSubTokens", KV_SUB_BLOCK),
    ],
)
def test_constants(header, name, value):
    assert constant(header, name) == value


def test_the_version():
    (version,) = re.findall(r"#define RL_ABI_VERSION (\d+)", text("ridgeline_cpu.h"))
    assert int(version) == library.ABI_VERSION


@pytest.mark.parametrize(
    ("enum", "prefix"),
    [
        (structs.RlFormat, ""),
        (structs.RlBuffer, ""),
        (structs.RlSpanKind, "SPAN_"),
        (structs.RlPart, "PART_"),
    ],
)
def test_enumerations(enum, prefix):
    named = dict(re.findall(r"\bRL_([A-Z0-9_]+) = (-?\d+)", text("ridgeline_cpu.h")))
    found = {each.name: int(named[prefix + each.name]) for each in enum}
    assert found == {each.name: each.value for each in enum}


FIELDS = {
    f"rl_{name.lower()}": kind for name, kind in vars(structs).items() if isinstance(kind, np.dtype)
} | {
    re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind.__name__).lower(): kind
    for kind in ctypes.Structure.__subclasses__()
    if kind.__module__ == structs.__name__
}
C_TYPES = {"int32_t": 4, "uint32_t": 4, "float": 4, "int64_t": 8, "uint64_t": 8, "pointer": 8}


@pytest.mark.parametrize("name", FIELDS)
def test_structs(name):
    """Names in their order, and sizes: of numbers, pointers and structs in structs."""
    header = re.sub(r"/\*.*?\*/", "", text("ridgeline_cpu.h"), flags=re.DOTALL)
    body = re.search(rf"typedef struct {{([^}}]*)}} {name};", header)
    assert body
    wanted = []
    for declaration in body[1].split(";"):
        if words := re.findall(r"\w+|\*", declaration):
            kind = "pointer" if "*" in words else next(w for w in words if w != "const")
            size = C_TYPES.get(kind) or ctypes.sizeof(FIELDS[kind])
            names = re.findall(r"(\w+)\s*(?:,|$)", declaration.strip())
            wanted += [(each, size) for each in names]
    python = FIELDS[name]
    if isinstance(python, np.dtype):
        found = [(each, python[each].itemsize) for each in python.names]
    else:
        found = [(each, ctypes.sizeof(kind)) for each, kind in python._fields_]
    assert found == wanted


@pytest.mark.parametrize(
    ("level", "lanes", "registers"),
    [("generic", 4, 16), ("avx2", 8, 16), ("avx512", 16, 32), ("neondot", 4, 32)],
)
def test_the_prices_know_how_many_tokens_and_rows_kernels_take(
    level, lanes, registers, monkeypatch
):
    values = {"W": lanes, "kRegisters": registers}

    def chosen(header: str, name: str) -> int:
        """Of an initializer such as ``W == 16 ? 12 : W == 8 || kRegisters == 32 ? 6 : 2``."""
        found = re.search(rf"\b{name} = ([^;]*);", text(header))
        assert found
        *cases, last = found[1].split(":")
        for case in cases:
            condition, value = case.split("?")
            if any(values[name] == int(n) for name, n in re.findall(r"(\w+) == (\d+)", condition)):
                return int(value)
        return int(last)

    monkeypatch.setattr("ridgeline.executors.cpu.pricing.chosen_level", lambda: level)
    monkeypatch.setattr("ridgeline.executors.cpu.pricing.native_kernels_run", lambda: True)
    kernels = native_kernels()
    assert kernels.panel_tokens == chosen("activations.h", "kPanelTokens")
    assert kernels.attention_rows == chosen("attention_tiles.h", "kTileRowsMax")
