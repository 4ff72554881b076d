import ast
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recipes.embedded import programs, questions

RESULTS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "fibonacci": ((10,), 55),
    "fibonacci_numbers": ((6,), [0, 1, 1, 2, 3, 5]),
    "factorial": ((5,), 120),
    "is_prime": ((91,), False),
    "primes_below": ((12,), [2, 3, 5, 7, 11]),
    "prime_factors": ((60,), [2, 2, 3, 5]),
    "greatest_common_divisor": ((12, 18), 6),
    "least_common_multiple": ((4, 6), 12),
    "is_even": ((3,), False),
    "is_odd": ((3,), True),
    "add": ((2, 3), 5),
    "multiply": ((2, 3), 6),
    "square": ((3,), 9),
    "power": ((2, 10), 1024),
    "absolute": ((-2,), 2),
    "clamp": ((7, 0, 5), 5),
    "mean": (([1, 2, 6],), 3),
    "median": (([4, 1, 3, 2],), 2.5),
    "variance": (([1, 3],), 1),
    "sum_list": (([1, 2, 3],), 6),
    "sum_digits": ((-123,), 6),
    "largest": (([3, 9, 2],), 9),
    "smallest": (([3, 9, 2],), 2),
    "second_largest": (([3, 9, 9, 2],), 3),
    "reverse_string": (("abc",), "cba"),
    "reverse_list": (([1, 2],), [2, 1]),
    "reverse_words": (("a b c",), "c b a"),
    "is_palindrome": (("Never odd or even",), True),
    "is_anagram": (("Listen", "silent"), True),
    "count_words": (("a  b\nc",), 3),
    "word_frequencies": (("a b A",), {"a": 2, "b": 1}),
    "most_common_word": (("a b a",), "a"),
    "count_vowels": (("Education",), 5),
    "count_letter": (("banana", "a"), 3),
    "longest_word": (("one three five",), "three"),
    "capitalize_words": (("a bad cat",), "A Bad Cat"),
    "remove_spaces": (("a b c",), "abc"),
    "remove_punctuation": (("Hi, you!",), "Hi you"),
    "extract_numbers": (("a 1, b -22",), [1, -22]),
    "is_number": (("1e3",), True),
    "caesar_cipher": (("Xyz!", 3), "Abc!"),
    "to_binary": ((10,), "1010"),
    "from_binary": (("1010",), 10),
    "remove_duplicates": (([2, 1, 2],), [2, 1]),
    "flatten": (([1, [2, [3]]],), [1, 2, 3]),
    "chunks": (([1, 2, 3], 2), [[1, 2], [3]]),
    "even_numbers": (([1, 2, 4],), [2, 4]),
    "squares": (([1, 2, 3],), [1, 4, 9]),
    "common_elements": (([1, 2, 3], [2, 3, 4]), [2, 3]),
    "rotate_list": (([1, 2, 3], 4), [2, 3, 1]),
    "is_sorted": (([1, 3, 2],), False),
    "merge_sorted": (([1, 4], [2, 3, 5]), [1, 2, 3, 4, 5]),
    "bubble_sort": (([3, 1, 2],), [1, 2, 3]),
    "insertion_sort": (([3, 1, 2],), [1, 2, 3]),
    "quick_sort": (([3, 1, 2, 3],), [1, 2, 3, 3]),
    "linear_search": (([5, 6], 6), 1),
    "binary_search": (([1, 3, 5, 7], 5), 2),
    "transpose": (([[1, 2], [3, 4]],), [[1, 3], [2, 4]]),
    "matrix_multiply": (([[1, 2]], [[3], [4]]), [[11]]),
    "dot_product": (([1, 2], [3, 4]), 11),
    "invert_dict": (({"a": 1},), {1: "a"}),
    "merge_dicts": (({"a": 1, "b": 1}, {"b": 2}), {"a": 1, "b": 2}),
    "sort_by_value": (({"a": 2, "b": 1},), {"b": 1, "a": 2}),
    "group_by_length": ((["a", "bb", "c"],), {1: ["a", "c"], 2: ["bb"]}),
    "celsius_to_fahrenheit": ((100,), 212),
    "fahrenheit_to_celsius": ((212,), 100),
    "circle_area": ((2,), 4 * math.pi),
    "distance": ((0, 0, 3, 4), 5),
    "is_leap_year": ((1900,), False),
    "fizzbuzz": ((5,), ["1", "2", "Fizz", "4", "Buzz"]),
    "apply_twice": ((lambda x: x + 1, 1), 3),
    "hanoi": ((3, "a", "b", "c"), 7),
    "breadth_first_search": (({1: [2, 3], 2: [4], 3: [4], 4: []}, 1), [1, 2, 3, 4]),
}
FILE_PROGRAMS = {"read_file", "write_file", "read_lines", "count_lines", "read_json", "write_json"}
OTHERS = {"countdown", "roll_dice", "list_files"}


def without_annotations() -> dict[str, Any]:
    """The programs as the model reads them."""
    source = "\n\n".join(
        ast.unparse(ast.fix_missing_locations(n)) for n in questions.program_nodes()
    )
    names: dict[str, Any] = dict(vars(programs))
    exec(source, names)
    return names


@pytest.mark.parametrize("made", [vars(programs), without_annotations()], ids=["typed", "bare"])
def test_programs_are_right(made: dict[str, Callable[..., Any]]) -> None:
    for name, (arguments, result) in RESULTS.items():
        assert made[name](*arguments) == result, name
    assert list(made["countdown"](3)) == [3, 2, 1]
    assert all(1 <= number <= 6 for number in made["roll_dice"](20))


def test_every_program_is_tested() -> None:
    functions = {n.name for n in questions.program_nodes() if isinstance(n, ast.FunctionDef)}
    assert functions == {*RESULTS, *FILE_PROGRAMS, *OTHERS}


def test_file_programs_read_what_they_write(tmp_path: Path) -> None:
    text, data = str(tmp_path / "a.txt"), str(tmp_path / "b.json")
    programs.write_file(text, "a\nb\n")
    programs.write_json(data, {"a": [1]})
    assert programs.read_file(text) == "a\nb\n"
    assert programs.read_lines(text) == ["a", "b"]
    assert programs.count_lines(text) == 2
    assert programs.read_json(data) == {"a": [1]}
    assert programs.list_files(str(tmp_path), ".txt") == ["a.txt"]


def test_classes_keep_their_order_and_their_balance() -> None:
    stack, queue = programs.Stack(), programs.Queue()
    for item in (1, 2):
        stack.push(item)
        queue.push(item)
    assert (stack.peek(), stack.pop(), queue.pop(), len(stack), len(queue)) == (2, 2, 1, 1, 1)
    assert not stack.is_empty()
    assert not queue.is_empty()
    assert programs.Point(0, 0).distance(programs.Point(3, 4)) == 5
    assert repr(programs.Point(1, 2)) == "Point(1, 2)"
    assert programs.Tally().increment() == 1
    account = programs.BankAccount(5)
    account.deposit(2)
    with pytest.raises(ValueError, match="money"):
        account.withdraw(8)


def test_questions_that_judge_the_model_are_not_taught() -> None:
    texts = [document.text for document in questions.conversations()]
    assert len(questions.asked()) == 20
    for question in questions.asked():
        assert not any(f"<|user|>\n{question}<|end|>" in text for text in texts)


def test_fenced_answers_are_python() -> None:
    for document in questions.conversations():
        for part in document.text.split("```python\n")[1:]:
            code = part.split("\n```")[0]
            assert code.startswith("python -m pip") or ast.parse(code)


def test_the_same_seed_gives_the_same_questions() -> None:
    assert list(questions.conversations()) == list(questions.conversations())
