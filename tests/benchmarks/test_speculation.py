"""What is counted of a drafter is of one temperature and kind of text."""

from types import SimpleNamespace

from benchmarks.speculation import _by_temperature


class Engine:
    """Notes under which salts it is asked; each draft is accepted."""

    def __init__(self):
        self.asked = []

    def generate(self, texts, params, *, cache_salt):
        self.asked.append(cache_salt)
        sample = SimpleNamespace(token_ids=[1], num_drafted=[1], num_accepted=[1])
        return [SimpleNamespace(outputs=[sample]) for _ in texts]


def test_no_temperature_or_kind_of_text_is_drafted_with_what_another_said(capsys):
    off, on = Engine(), Engine()
    texts = {"code": ["a", "b"], "prose": ["c", "d"]}
    _by_temperature(off, on, texts, SimpleNamespace(tokens=4, rounds=1))
    assert len(set(on.asked)) == len(on.asked) == 2 * 3 * 3
    assert capsys.readouterr().out.count('"tokens_per_verification": 2.0') == 6
