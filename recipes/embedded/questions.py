"""Short questions and answers, made from facts and programs by templates and a fixed seed.

The questions of ``asked.txt``, with which the model is judged, are left out in that wording.
"""

import ast
import inspect
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from recipes.embedded import programs
from recipes.embedded.conversations import SYSTEM_PROMPT, Turn, render
from recipes.embedded.corpus import Document
from recipes.embedded.facts import CONCEPTS, DIFFERENCES, HOW_TO, SMALL_TALK

ASKED = Path(__file__).with_name("asked.txt")
_WHAT = (
    "What is {}?",
    "What does {} do?",
    "Explain {}.",
    "What is {} in Python?",
    "What is {} for?",
    "Tell me about {}.",
    "what is {}",
    "Describe {}.",
    "Can you explain {}?",
    "What does {} mean?",
    "Please explain {}.",
    "What do you know about {}?",
    "What does {} mean in Python?",
    "Explain {} to me.",
    "How does {} work?",
    "What's {}?",
    "Define {}.",
    "What is meant by {}?",
    "{}?",
)
_WHEN = (
    "When is {} raised?",
    "When does {} happen?",
    "What causes a {}?",
    "Why do I get a {}?",
    "When do I see a {}?",
)
_HOW = (
    "How do I {}?",
    "How do I {} in Python?",
    "How can I {}?",
    "How to {}?",
    "Show me how to {}.",
    "how do i {}",
    "I want to {}.",
    "How does one {} in Python?",
    "Can you show me how to {}?",
    "What is the way to {} in Python?",
    "Write code to {}.",
    "In Python, how do I {}?",
    "Please {}.",
    "Give me code to {}.",
)
_DIFFERENCE = (
    "What is the difference between {} and {}?",
    "How does {} differ from {}?",
    "What is the difference of {} and {} in Python?",
    "Explain the difference between {} and {}.",
    "{} or {}?",
    "Compare {} and {}.",
)
_THAT = (
    "Write a function that {}.",
    "Write a Python function that {}.",
    "Can you write a function that {}?",
    "I need a function that {}.",
    "Write code that {}.",
    "Please write a function that {}.",
    "Give me a function that {}.",
    "Define a function that {}.",
    "Show me a Python function that {}.",
    "Write a small function that {}.",
    "write a function that {}",
    "Implement a function that {}.",
)
_WHETHER = (
    "How do I check if {}?",
    "Write a function that checks if {}.",
    "Write a function that checks whether {}.",
    "Write a Python function that tells if {}.",
    "I need a function that says whether {}.",
    "How can I test whether {}?",
    "Write code to find out if {}.",
)
_NAMED = (
    "Write a function `{name}`.",
    "Write `{signature}`.",
    "Write a Python function `{signature}`. {doc}",
    "Write `{signature}`: {doc}",
    "Implement `{signature}`.",
    "Write {words} in Python.",
    "Implement {words}.",
    "Write a function for {words}.",
    "Show me {words}.",
    "Write a Python function `{name}`.",
    "{words} in Python",
    "Write a function {signature}.",
    "Write a function `{signature}`.",
    "Write {signature}.",
    "def {signature}:",
)
_CLASSES = (
    "Write a class `{name}`.",
    "Write a class {name} in Python.",
    "Implement a {words} in Python.",
    "Write a {words} class.",
    "Show me a class for a {words}.",
    "Implement a {words}.",
    "Define a class {name}.",
)


def asked() -> list[str]:
    """The committed questions, one a line."""
    return ASKED.read_text(encoding="utf-8").split("\n")[:-1]


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


class _Unannotated(ast.NodeTransformer):
    """Takes annotations away, and ``strict`` of ``zip``."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        node.keywords = [keyword for keyword in node.keywords if keyword.arg != "strict"]
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None
        return ast.copy_location(ast.Assign(targets=[node.target], value=node.value), node)


def _source(node: ast.stmt) -> str:
    return ast.unparse(ast.fix_missing_locations(node))


def program_nodes() -> list[ast.FunctionDef | ast.ClassDef]:
    """The functions and classes of ``programs``, without annotations."""
    tree = _Unannotated().visit(ast.parse(inspect.getsource(programs)))
    return [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]


def _imports_of(code: str) -> str:
    """The import lines of ``programs`` that ``code`` needs."""
    lines = {
        "math.": "import math",
        "random.": "import random",
        "re.": "import re",
        "json.": "import json",
        "Counter(": "from collections import Counter",
        "defaultdict(": "from collections import defaultdict",
        "deque(": "from collections import deque",
        "Path(": "from pathlib import Path",
    }
    needed = [
        line for mark, line in lines.items() if any(p in code for p in (f" {mark}", f"({mark}"))
    ]
    return "\n".join(needed) + "\n\n" if needed else ""


def _bare(node: ast.FunctionDef | ast.ClassDef) -> str:
    """The source without its docstring."""
    copy = ast.parse(_source(node)).body[0]
    assert isinstance(copy, ast.FunctionDef | ast.ClassDef)
    copy.body = copy.body[1:]
    return _source(copy)


def _third_person(doc: str) -> str:
    """ "Return the sum." as "returns the sum"."""
    verb, _, rest = doc.rstrip(".").partition(" ")
    return f"{verb.lower()}s {rest}"


def _program_questions(node: ast.FunctionDef | ast.ClassDef) -> list[tuple[str, str]]:
    doc = ast.get_docstring(node)
    assert doc is not None
    code, bare = _source(node), _bare(node)
    words = node.name.replace("_", " ").lower()
    if isinstance(node, ast.ClassDef):
        questions = [form.format(name=node.name, words=words) for form in _CLASSES]
    else:
        signature = f"{node.name}({ast.unparse(node.args)})"
        questions = [
            form.format(name=node.name, signature=signature, doc=doc, words=words)
            for form in _NAMED
        ]
        questions += [form.format(_third_person(doc)) for form in _THAT]
        if doc.startswith("Return True if "):
            wish = doc.removeprefix("Return True if ").rstrip(".")
            questions += [form.format(wish) for form in _WHETHER]
        elif doc.startswith("Return "):
            wish = doc.removeprefix("Return ").rstrip(".")
            questions += [f"How do I compute {wish}?", f"Write a function for {wish}."]
    head = _imports_of(bare)
    return [(q, _fenced(head + (bare if i % 4 == 3 else code))) for i, q in enumerate(questions)]


def _answers(rng: random.Random, count: int) -> Iterator[tuple[str, str]]:
    """Questions about expressions with small values, whose answers are computed."""
    words = ("hello", "python", "abc", "world", "code", "test", "spam", "list", "name", "data")
    for _ in range(count):
        a, b = rng.randint(0, 12), rng.randint(1, 12)
        numbers = [rng.randint(0, 9) for _ in range(rng.randint(2, 4))]
        word = rng.choice(words)
        results: tuple[tuple[str, object], ...] = (
            (f"{a} + {b}", a + b),
            (f"{a} * {b}", a * b),
            (f"{a + b} - {b}", a),
            (f"len({numbers})", len(numbers)),
            (f"sum({numbers})", sum(numbers)),
            (f"max({numbers})", max(numbers)),
            (f"min({numbers})", min(numbers)),
            (f"sorted({numbers})", sorted(numbers)),
            (f"{numbers}[0]", numbers[0]),
            (f"{numbers}[-1]", numbers[-1]),
            (f'len("{word}")', len(word)),
            (f'"{word}".upper()', word.upper()),
            (f'"{word}"[0]', word[0]),
            (f'"{word}"[::-1]', word[::-1]),
            (f"list(range({b}))", list(range(b))),
            (f"{a} % {b}", a % b),
            (f"{a} > {b}", a > b),
            (f"{a} == {b}", a == b),
        )
        expression, value = rng.choice(results)
        form = rng.choice(
            ("What is {}?", "What does {} return?", "What is `{}`?", "Compute {}.", "{}")
        )
        yield form.format(expression), repr(value)


def _pairs() -> list[tuple[str, str]]:
    """Every question with its answer, those of ``asked.txt`` left out."""
    pairs: list[tuple[str, str]] = []
    for questions, answer in SMALL_TALK:
        pairs += [(question, answer) for question in questions]
        pairs += [(question.lower().rstrip("?.!"), answer) for question in questions]
    for names, answer in CONCEPTS:
        pairs += [(form.format(name), answer) for name in names for form in _WHAT]
        if names[0].endswith(("Error", "Iteration", "Interrupt")):
            pairs += [(form.format(names[0]), answer) for form in _WHEN]
        code = [name for name in names if name.isidentifier() or "." in name]
        pairs += [(form.format(f"`{name}`"), answer) for name in code for form in _WHAT[:6]]
    for wish, code_text in HOW_TO:
        pairs += [(form.format(wish), _fenced(code_text)) for form in _HOW]
    for a, b, answer in DIFFERENCES:
        pairs += [
            (form.format(*names), answer) for form in _DIFFERENCE for names in ((a, b), (b, a))
        ]
    for node in program_nodes():
        pairs += _program_questions(node)
    left_out = set(asked())
    return [pair for pair in dict.fromkeys(pairs) if pair[0] not in left_out]


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _grouped(pairs: Sequence[tuple[str, str]], rng: random.Random) -> Iterator[str]:
    """Chats of one to four turns, one in five with a system message."""
    start = 0
    while start < len(pairs):
        count = rng.choice((1, 1, 1, 2, 3, 4))
        turns = [Turn(user=q, assistant=a) for q, a in pairs[start : start + count]]
        yield render(turns, system=SYSTEM_PROMPT if rng.random() < 0.2 else None)
        start += count


def conversations(seed: int = 0) -> Iterator[Document]:
    """Every question once, in random order, and the programs as plain text, one by one."""
    rng = random.Random(seed)
    pairs = [(_capital(q) if rng.random() < 0.9 else q, a) for q, a in _pairs()]
    pairs += list(_answers(rng, 1500))
    talk = [(q, a) for questions, a in SMALL_TALK for q in questions if q not in set(asked())]
    pairs += talk * 6
    left_out = set(asked())
    pairs = [pair for pair in pairs if pair[0] not in left_out]
    rng.shuffle(pairs)
    for i, text in enumerate(_grouped(pairs, rng)):
        yield Document(kind="questions", path=f"questions#{i}", text=text)
    for node in program_nodes():
        code, bare = _source(node), _bare(node)
        for i, text in enumerate((code, bare, _imports_of(bare) + code)):
            yield Document(kind="programs", path=f"programs#{node.name}{i}", text=text + "\n")
