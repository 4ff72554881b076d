"""Small changes of a Python file, each of which some test should notice."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_UNCHANGED = ("annotation", "returns", "decorator_list", "bases")
_MAX_CHARS = 70


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A change of one function in a file of ``src/ridgeline``.

    ``name`` says it, and stays while the function does; ``code`` compiles the changed file.
    """

    path: str
    scope: str
    name: str
    original: CodeType
    code: Callable[[], CodeType]


def mutants_of(path: str, text: str, file: str) -> list[Mutant]:
    """Every change that the operators make in functions, in the order of the lines.

    Comparisons, arithmetic and logic become their neighbours, numbers grow, conditions turn
    around, results become None, statements vanish. Types, assertions and messages stay.
    """
    tree = ast.parse(text)
    original = compile(tree, file, "exec", dont_inherit=True)
    seen = Counter[str]()
    found = []
    for site in list(_sites(tree, "", within=False)):
        name = f"{path} {site.scope}: `{_shown(site.old)}` → `{_shown(site.new)}`"
        seen[name] += 1
        if seen[name] > 1:
            name += f" ({seen[name]})"

        def code(site: _Site = site) -> CodeType:
            site.place(ast.fix_missing_locations(ast.copy_location(site.new, site.old)))
            try:
                return compile(tree, file, "exec", dont_inherit=True)
            finally:
                site.place(site.old)

        found.append(Mutant(path=path, scope=site.scope, name=name, original=original, code=code))
    return found


@dataclass(frozen=True)
class _Site:
    """``place`` puts the old or the new node where the old one is, in function ``scope``."""

    scope: str
    old: ast.AST
    new: ast.AST
    place: Callable[[ast.AST], None]


def _sites(node: ast.AST, scope: str, within: bool) -> Iterator[_Site]:
    """Of a node's children, and theirs; ``within`` a function, ``scope`` is its qualified name."""
    for field, value in ast.iter_fields(node):
        for index, child in enumerate(value if isinstance(value, list) else [value]):
            if field in _UNCHANGED or not isinstance(child, ast.AST) or _stays(child):
                continue

            def place(new: ast.AST, value=value, field=field, index=index) -> None:
                if isinstance(value, list):
                    value[index] = new
                else:
                    setattr(node, field, new)

            if within:
                yield from (_Site(scope, child, new, place) for new in _instead_of(child))
            is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            inner = scope
            if not within and (is_function or isinstance(child, ast.ClassDef)):
                inner = f"{scope}.{child.name}".lstrip(".")
            if not isinstance(child, ast.Raise):
                yield from _sites(child, inner, within or is_function)


def _stays(node: ast.AST) -> bool:
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.arguments() | ast.FunctionDef(name="__repr__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="_log")))):
            return True
        case ast.BinOp(left=left, right=right):  # types in code, and text that is put together
            return any(
                isinstance(side, ast.JoinedStr)
                or (isinstance(side, ast.Constant) and isinstance(side.value, str | bytes | None))
                for side in (left, right)
            )
    return False


def _instead_of(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(left=left, ops=ops, comparators=others):
            for at, op in enumerate(ops):
                yield ast.Compare(left, [*ops[:at], _SWAPPED[type(op)](), *ops[at + 1 :]], others)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SWAPPED:
            yield ast.BinOp(left, _SWAPPED[type(op)](), right)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(_SWAPPED[type(op)](), values)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield ast.Constant(value + 1)
        case ast.Constant(value=float() as value):
            yield ast.Constant(value * 2 or 1.0)
        case ast.If(test=test, body=body, orelse=orelse):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, orelse)
        case ast.comprehension(ifs=[test, *others]):
            negated = [ast.UnaryOp(ast.Not(), test), *others]
            yield ast.comprehension(node.target, node.iter, negated, node.is_async)
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))
        case ast.AugAssign(target=target, op=op, value=value):
            if type(op) in _SWAPPED:
                yield ast.AugAssign(target, _SWAPPED[type(op)](), value)
            yield ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield ast.Pass()
        case ast.Break() | ast.Continue():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()


def _shown(node: ast.AST) -> str:
    """The first line, without what stands in a block."""
    line = ast.unparse(node).strip().partition("\n")[0]
    return line if len(line) <= _MAX_CHARS else f"{line[:_MAX_CHARS]}…"
