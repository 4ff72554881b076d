"""Short whole functions as documents of their own, so that text may begin with ``def`` and end."""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from textwrap import dedent

from recipes.embedded.corpus import Document, is_table, parse

MIN_CHARS = 60
MAX_CHARS = 700
KEPT_PERCENT = {"library": 100, "tests": 15, "packages": 10}  # of those without a docstring
KEPT_PERCENT_DOCUMENTED = {"library": 100, "tests": 100, "packages": 25}


def _kept(code: str, kind: str, *, documented: bool) -> bool:
    percent = (KEPT_PERCENT_DOCUMENTED if documented else KEPT_PERCENT)[kind]
    return int.from_bytes(hashlib.sha256(code.encode()).digest()[:4], "big") % 100 < percent


def functions(documents: Iterable[Document]) -> Iterator[Document]:
    """Functions and methods of 60 to 700 characters, without indentation and decorators, each once.

    Of tests and packages a part is kept, chosen by a hash of the source.
    """
    seen: set[str] = set()
    for document in documents:
        tree = parse(document.text) if document.kind in KEPT_PERCENT else None
        lines = document.text.split("\n")
        for node in ast.walk(tree) if tree else ():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            code = dedent("\n".join(lines[node.lineno - 1 : node.end_lineno])) + "\n"
            if not MIN_CHARS <= len(code) <= MAX_CHARS or code in seen or is_table(code):
                continue
            seen.add(code)
            documented = ast.get_docstring(node) is not None
            if _kept(code, document.kind, documented=documented) and parse(code) is not None:
                path = f"{document.path}#{node.name}@{node.lineno}"
                yield Document(kind="functions", path=path, text=code)
