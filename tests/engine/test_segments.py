"""Where documents are found in a prompt."""

import time

import pytest

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.kv_reuse import MAX_SEGMENTS
from ridgeline.engine.segments import find_segments


def test_each_document_is_where_it_first_stands_by_itself():
    prompt = [9, 1, 2, 1, 2, 3, 7, 1, 2]
    found = find_segments(prompt, [(1, 2, 3), (1, 2), (1, 2), (9,)], None)
    assert found == [(3, 6), (1, 3), (7, 9), (0, 1)]
    for missing in [(2, 9)], [(8,)], [(1, 2)] * 4:
        with pytest.raises(InvalidRequestError, match=rf"segments\[{len(missing) - 1}\] is not"):
            find_segments(prompt, missing, None)


@pytest.mark.parametrize("token", [0, 256])
def test_as_many_documents_as_may_be_are_found_in_a_moment(token):
    begin_s = time.process_time()
    found = find_segments([token] * 100_000, [(token,)] * MAX_SEGMENTS, None)
    assert found == [(place, place + 1) for place in range(MAX_SEGMENTS)]
    assert time.process_time() - begin_s < 3
