"""Rewriting a template's syntax tree so that what the compiler inlines is paid for."""

from jinja2 import nodes, pass_context
from jinja2.runtime import Context

from ridgeline.text.template_budget import STATEMENT_COST, charge
from ridgeline.text.template_filters import CONCAT, SLICE, WEIGH

TICK = "%tick"
_BODIES = ("body", "else_")


@pass_context
def tick(_context: Context, units: int) -> None:
    """Pay for one statement and the literal text in it.

    It takes the context because Jinja then never folds the call into a constant.
    """
    charge(units)


def rewrite(template: nodes.Template) -> None:
    """Rewrite ``template`` (mutated): a tick before each statement, meters in expressions."""
    _rewrite_children(template)


def _rewrite_children(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            replaced = []
            for item in value:
                if not isinstance(item, nodes.Node):
                    replaced.append(item)
                    continue
                _rewrite_children(item)
                if name in _BODIES and isinstance(item, nodes.Stmt):
                    replaced.append(_tick(item))
                replaced.append(_metered(item))
            setattr(node, name, replaced)
        elif isinstance(value, nodes.Node):
            _rewrite_children(value)
            # The arg of a subscript that is a slice belongs to the subscript.
            setattr(node, name, _metered(value))


def _filter(node: nodes.Node | None, name: str, *args: nodes.Expr) -> nodes.Filter:
    made = nodes.Filter(node, name, list(args), [], None, None)
    made.set_lineno(node.lineno if node is not None else 1)
    return made


def _tick(statement: nodes.Node) -> nodes.Node:
    units = STATEMENT_COST
    if isinstance(statement, nodes.Output):
        units += sum(
            len(child.data) for child in statement.nodes if isinstance(child, nodes.TemplateData)
        )
    call = _filter(nodes.Const(units, lineno=statement.lineno), TICK)
    return nodes.ExprStmt(call, lineno=statement.lineno)


def _metered(node: nodes.Node) -> nodes.Node:
    """Return what stands in for ``node``; its children are rewritten already."""
    if isinstance(node, nodes.Concat):
        return _filter(nodes.List(node.nodes, lineno=node.lineno), CONCAT)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        bounds = (node.arg.start, node.arg.stop, node.arg.step)
        none = nodes.Const(None, lineno=node.lineno)
        return _filter(node.node, SLICE, *(bound or none for bound in bounds))
    if isinstance(node, nodes.For):
        # A loop with nothing in it still takes its time.
        node.body = node.body or [_tick(node)]
        node.test = _filter(node.test, WEIGH) if node.test is not None else None
    elif isinstance(node, nodes.Compare):
        node.expr = _filter(node.expr, WEIGH)
        for operand in node.ops:
            operand.expr = _filter(operand.expr, WEIGH)
    elif isinstance(node, nodes.Pair) and not isinstance(node.key, nodes.Const):
        node.key = _filter(node.key, WEIGH)
    return node
