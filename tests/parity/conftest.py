import functools

import pytest
from tests.parity.oracle import make_oracle


@pytest.fixture(scope="session")
def oracle_of(tmp_path_factory):
    """The oracle of a case, made once."""

    @functools.cache
    def make(case_id):
        from tests.parity.cases import CASES

        case = next(case for case in CASES if case.id == case_id)
        return make_oracle(case, tmp_path_factory.mktemp(case.id))

    return make
