"""The cases of all families together."""

from tests.parity.cases import CASES as FIRST_CASES
from tests.parity.cases import TELLING as FIRST_TELLING
from tests.parity.dense_cases import DENSE_CASES, DENSE_TELLING
from tests.parity.moe_cases import MOE_CASES, MOE_TELLING
from tests.parity.new_dense_cases import NEW_DENSE_CASES, NEW_DENSE_TELLING
from tests.parity.new_moe_cases import NEW_MOE_CASES, NEW_MOE_TELLING
from tests.parity.state_cases import STATE_CASES, STATE_TELLING

CASES = [
    *FIRST_CASES, *DENSE_CASES, *MOE_CASES, *NEW_DENSE_CASES, *NEW_MOE_CASES, *STATE_CASES
]  # fmt: skip

# Together these set every field of a spec that a family can set.
TELLING = (
    *FIRST_TELLING, *DENSE_TELLING, *MOE_TELLING, *NEW_DENSE_TELLING, *NEW_MOE_TELLING,
    *STATE_TELLING,
)  # fmt: skip
