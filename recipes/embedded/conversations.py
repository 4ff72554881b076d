"""Chat-shaped documents made from the standard library's own docstrings, sources and topics."""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from recipes.embedded.corpus import Document, builtin_docs, is_held_out, parse

SYSTEM_PROMPT = "You are a helpful assistant for Python programmers."
MAX_ANSWER_CHARS = 1600

GREETINGS = (
    ("Hello", "Hello! Ask me about Python's standard library."),
    ("Hi", "Hello! What would you like to know about Python?"),
    ("Hi there!", "Hello! Ask me what a function does, or ask me to write one."),
    ("Who are you?", "I am a very small model, trained on Python's standard library."),
    ("What can you do?", "I can describe functions of Python's standard library and write code."),
    ("Thank you", "You are welcome."),
    ("What is Python?", "Python is an interpreted, object-oriented programming language."),
    ("Goodbye", "Goodbye!"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A question and its answer."""

    user: str
    assistant: str


def render(turns: list[Turn], *, system: str | None = None) -> str:
    """The text that the chat template makes of the turns (without the first special token)."""
    head = f"<|system|>\n{system}<|end|>\n" if system else ""
    body = "".join(
        f"<|user|>\n{turn.user}<|end|>\n<|assistant|>\n{turn.assistant}<|end|>\n" for turn in turns
    )
    return head + body


def _choose(key: str, options: int) -> int:
    return hashlib.sha256(key.encode()).digest()[0] % options


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


def _shorten(text: str) -> str:
    """Whole paragraphs of ``text`` up to the longest answer."""
    kept = ""
    for paragraph in text.split("\n\n"):
        if kept and len(kept) + len(paragraph) > MAX_ANSWER_CHARS:
            break
        kept += ("\n\n" if kept else "") + paragraph
    return kept[:MAX_ANSWER_CHARS]


def _first_sentence(doc: str) -> str:
    return " ".join(doc.split("\n\n")[0].split()).rstrip(".") + "."


def _about(name: str, doc: str) -> Turn:
    questions = (
        f"What does {name} do?",
        f"What does `{name}` do?",
        f"Explain {name}.",
        f"What is {name}?",
    )
    return Turn(user=questions[_choose(name, len(questions))], assistant=_shorten(doc))


def _without_docstring(node: ast.FunctionDef) -> str:
    bare = ast.FunctionDef(**{**vars(node), "body": node.body[1:]})
    return ast.unparse(bare)


def _source_of(node: ast.FunctionDef, lines: list[str]) -> str:
    """The function's lines (``ast.get_source_segment`` splits the whole file at every call)."""
    return "\n".join(lines[node.lineno - 1 : node.end_lineno])


def _function_turns(module: str, node: ast.FunctionDef, lines: list[str]) -> Iterator[Turn]:
    doc, code = ast.get_docstring(node), _source_of(node, lines)
    if not doc or not code or len(doc) < 20 or node.name.startswith("__"):
        return
    signature = f"def {node.name}({ast.unparse(node.args)})"
    yield _about(f"{module}.{node.name}", doc)
    if len(code) > MAX_ANSWER_CHARS or node.col_offset:
        return
    wish = _first_sentence(doc)
    questions = (
        f"Write `{signature}`: {wish}",
        f"Write a Python function `{node.name}({ast.unparse(node.args)})`. {wish}",
        f"Write a function in Python: {wish}",
    )
    question = questions[_choose(code, len(questions))]
    yield Turn(user=question, assistant=_fenced(code))
    if len(node.body) > 1 and _choose(signature, 4) == 0:
        question = "Write a docstring for this function:\n" + _fenced(_without_docstring(node))
        yield Turn(user=question, assistant=_shorten(doc))


def _module_turns(source: Document) -> list[Turn]:
    tree = parse(source.text)
    if tree is None:
        return []
    module = source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    turns: list[Turn] = []
    lines = source.text.split("\n")
    head = ast.get_docstring(tree)
    if head and len(head) > 40:
        turns.append(_about(f"the {module} module", head))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            turns += _function_turns(module, node, lines)
        elif isinstance(node, ast.ClassDef):
            doc = ast.get_docstring(node)
            if doc:
                turns.append(_about(f"{module}.{node.name}", doc))
            for child in node.body:
                if isinstance(child, ast.FunctionDef):
                    turns += _function_turns(f"{module}.{node.name}", child, lines)
    return turns


def _grouped(path: str, turns: list[Turn]) -> Iterator[Document]:
    """Conversations of one turn, sometimes two or three, sometimes with a system message."""
    start = 0
    while start < len(turns):
        key = f"{path}#chat{start}"
        count = (1, 1, 1, 2, 3)[_choose(key, 5)]
        system = SYSTEM_PROMPT if _choose(key + "s", 4) == 0 else None
        text = render(turns[start : start + count], system=system)
        yield Document(kind="chat", path=f"{path}#chat{start}", text=text)
        start += count


def conversations(training: list[Document]) -> list[Document]:
    """Chats about the training documents alone."""
    chats: list[Document] = []
    for document in training:
        if document.kind == "library":
            chats += _grouped(document.path, _module_turns(document))
        elif document.kind == "topics":
            name = document.path.partition("#")[2]
            chats += _grouped(document.path, [_about(name.lower(), document.text.strip())])
    for path, name, doc in builtin_docs():
        if not is_held_out(path):
            chats += _grouped(f"{path}.{name}", [_about(name, doc)])
    chats += _grouped("greetings", [Turn(user=user, assistant=reply) for user, reply in GREETINGS])
    chats += [
        Document(kind="chat", path=f"greetings#{i}", text=render([Turn(user=u, assistant=a)]))
        for i, (u, a) in enumerate(GREETINGS)
    ]
    return chats


def snippets(training: list[Document]) -> list[Document]:
    """Single functions of the library as documents, so that text may begin with ``def``."""
    found: list[Document] = []
    for document in training:
        tree = parse(document.text) if document.kind == "library" else None
        lines = document.text.split("\n")
        for node in tree.body if tree else []:
            if not isinstance(node, ast.FunctionDef):
                continue
            code = _source_of(node, lines)
            if 120 < len(code) < MAX_ANSWER_CHARS:
                path = f"{document.path}#{node.lineno}"
                found.append(Document(kind="snippets", path=path, text=code + "\n"))
    return found
