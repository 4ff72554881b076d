"""Events are lines, whatever is in them and however a client splits lines."""

import json

import pytest

from ridgeline.server.replies import event


@pytest.mark.parametrize("name", [None, "delta"])
def test_an_event_is_one_line_of_data(name):
    for code in [*range(0x100), *range(0x2000, 0x2070), 0xFEFF, 0x1F600]:
        value = {"text": f"a{chr(code)}b"}
        text = event(value, name).decode()
        lines = text.splitlines()
        assert text.endswith("\n\n")
        assert len(lines) == (2 if name is None else 3)
        assert json.loads(lines[-2].removeprefix("data: ")) == value
