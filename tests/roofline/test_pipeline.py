"""Where a pipeline cuts a model."""

import random
from itertools import combinations, pairwise

import pytest

from ridgeline.roofline.pipeline import stage_borders


@pytest.mark.parametrize("seed", range(6))
def test_no_other_cut_has_a_cheaper_dearest_stage(seed):
    """Of all into stages with a layer at least; one layer costs more than all stages beside it."""
    rng = random.Random(seed)
    costs = [rng.choice([0, 1, 2, 3, 30]) for _ in range(rng.randint(3, 8))]
    for num_stages in range(1, len(costs) + 1):
        cuts = [
            (0, *inner, len(costs)) for inner in combinations(range(1, len(costs)), num_stages - 1)
        ]
        dearest = {cut: max(sum(costs[a:b]) for a, b in pairwise(cut)) for cut in cuts}
        assert dearest[stage_borders(costs, num_stages)] == min(dearest.values())
