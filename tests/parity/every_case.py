"""The cases of all families together."""

from tests.parity.cases import CASES as FIRST_CASES
from tests.parity.cases import TELLING as FIRST_TELLING
from tests.parity.dense_cases import DENSE_CASES, DENSE_TELLING
from tests.parity.moe_cases import MOE_CASES, MOE_TELLING

CASES = [*FIRST_CASES, *DENSE_CASES, *MOE_CASES]

# Together these set every field of a spec that a family can set.
TELLING = (*FIRST_TELLING, *DENSE_TELLING, *MOE_TELLING)
