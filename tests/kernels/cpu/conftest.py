"""Where a function has many cases, each runs on the newest level of this machine and on one of the
others, drawn by its name; on the rest it is slow."""

from collections import Counter
from zlib import crc32

import pytest
from tests.kernels.cpu.native import LEVELS

FEW = 8  # cases, which run on every level


@pytest.hookimpl(tryfirst=True)  # before those that are slow are left out
def pytest_collection_modifyitems(items):
    """Marks what is slow."""
    others, cases = LEVELS[:-1], {}
    for item in items:
        call = getattr(item, "callspec", None)
        if call is not None and call.params.get("level") in others:
            function = item.nodeid.partition("[")[0]
            rest = {name: each for name, each in call.indices.items() if name != "level"}
            cases[item] = function, f"{function} {rest}"
    sizes = Counter(function for function, _ in cases.values())
    for item, (function, case) in cases.items():
        drawn = others[crc32(case.encode()) % len(others)]
        if sizes[function] > FEW * len(others) and item.callspec.params["level"] != drawn:
            item.add_marker(pytest.mark.slow)
