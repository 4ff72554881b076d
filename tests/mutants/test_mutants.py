"""What the operators change, and what they leave as it is."""

import pytest
from tests.mutants.operators import mutants_of
from tests.mutants.running import put_mutant

SOURCE = '''
LIMIT: int = 3

class Pool:
    size: int = LIMIT

    def take(self, count: int = 1, *, name: str | None = None) -> int:
        """Take ``count``."""
        assert count > 0
        if count < self.size and name:
            self.size -= count
        else:
            raise ValueError(f"no {count + 1}" + " left")
        def later(): return [each for each in range(9) if each]
        return self.size
'''


@pytest.fixture
def mutants():
    return {mutant.name: mutant for mutant in mutants_of("pool.py", SOURCE, "/pool.py")}


def test_each_change_of_a_function_is_named_once(mutants):
    assert list(mutants) == [
        f"pool.py Pool.take: {change}"
        for change in (
            "`if count < self.size and name:` → `if not (count < self.size and name):`",
            "`count < self.size and name` → `count < self.size or name`",
            "`count < self.size` → `count <= self.size`",
            "`self.size -= count` → `self.size += count`",
            "`self.size -= count` → `pass`",
            "`raise ValueError(f'no {count + 1}' + ' left')` → `pass`",
            "`return [each for each in range(9) if each]` → `return None`",
            "`for each in range(9) if each` → `for each in range(9) if not each`",
            "`9` → `10`",
            "`return self.size` → `return None`",
        )
    ]


def test_a_function_has_the_code_of_its_mutant_and_then_only_of_the_next(mutants):
    space = {}
    exec(mutants["pool.py Pool.take: `9` → `10`"].original, space)
    pool = space["Pool"]()
    for change, answer, size in (
        ("`self.size -= count` → `self.size += count`", 5, 5),
        ("`return self.size` → `return None`", None, 3),
    ):
        put_mutant(mutants[f"pool.py Pool.take: {change}"], [space["Pool"].take])
        assert (pool.take(2, name="a"), pool.size) == (answer, size)


def test_a_mutant_of_a_function_that_is_not_there_is_refused(mutants):
    with pytest.raises(ValueError, match="no function"):
        put_mutant(mutants["pool.py Pool.take: `9` → `10`"], [])
