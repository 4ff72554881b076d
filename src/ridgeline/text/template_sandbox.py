"""The Jinja environment for chat templates: transformers' own, with a meter on every operation.

Jinja's sandbox keeps a template from reaching Python's internals, but not from looping for ever or
filling the memory. Every operation whose cost is not constant therefore pays into the thread's
`Budget` first. Operators, calls, filters and tests are overridden; what the compiler would inline
(concatenation, slices, comparisons, dictionary keys, and each statement) is rewritten in the syntax
tree. Calls are allowed by name, not refused by name.
"""

from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.utils import Cycler, Joiner

from ridgeline.text import template_budget
from ridgeline.text.template_budget import STATEMENT_COST, charge, weigh
from ridgeline.text.template_filters import guarded_filters, guarded_tests
from ridgeline.text.template_globals import (
    GenerationTag,
    TemplateDict,
    TemplateNamespace,
    raise_exception,
    strftime_now,
)
from ridgeline.text.template_methods import FormatCall, pay_method
from ridgeline.text.template_operators import binary
from ridgeline.text.template_rewrite import TICK, rewrite, tick

_CALLABLE_TYPES = (Macro, LoopContext, BlockReference, Joiner, FormatCall, TemplateDict, Undefined)
# Jinja hands these to Context.call beside the template's own arguments.
_JINJA_KEYWORDS = frozenset({"_loop_vars", "_block_vars"})
_METHOD_OWNERS = (LoopContext, Cycler, TemplateDict, GenerationTag)


class MeteredCodeGenerator(CodeGenerator):
    """Pays for each node, so that compiling ends in time as well."""

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Visit a node of the syntax tree."""
        charge(1)
        return super().visit(node, *args, **kwargs)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Renders chat templates as transformers does, within the budget of the thread."""

    code_generator_class = MeteredCodeGenerator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[GenerationTag, loopcontrols],
            finalize=_finalize,
        )
        del self.globals["lipsum"]
        self.globals["dict"] = TemplateDict()
        self.globals["namespace"] = TemplateNamespace
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now
        self._functions = {
            id(self.globals[name])
            for name in ("range", "cycler", "joiner", "namespace", "raise_exception")
        } | {id(strftime_now)}
        self.filters.clear()
        self.filters.update({**guarded_filters(), TICK: tick})
        self.tests.clear()
        self.tests.update(guarded_tests())

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        rewrite(source)
        return super()._generate(source, *args, **kwargs)

    def call_binop(
        self,
        context: Context,
        operator: str,
        left: Any,
        right: Any,
    ) -> Any:
        """Pay for an operator and compute it."""
        charge(template_budget.ELEMENT_COST)
        return binary(operator, left, right)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Look up an attribute or item; SecurityError at once for Python's own names."""
        if attribute.startswith("__"):
            raise SecurityError(f"access to attribute {attribute!r} is not allowed")
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Subscribe; a tuple as key is paid for, since its hash is not remembered."""
        if isinstance(argument, tuple):
            weigh(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> FormatCall | None:
        """Replace ``str.format`` and ``str.format_map`` where they are looked up."""
        owner, name = getattr(value, "__self__", None), getattr(value, "__name__", None)
        if isinstance(owner, str) and name in ("format", "format_map"):
            return FormatCall(self, owner, name == "format_map")
        return None

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        """Refuse a look at Python's internals at once, rather than when the result is used."""
        if not modifies_known_mutable(obj, attribute):
            raise SecurityError(f"access to attribute {attribute!r} is not allowed")
        return super().unsafe_undefined(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Pay for a call and make it; SecurityError for what is not on the list."""
        charge(STATEMENT_COST)
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, _CALLABLE_TYPES) or id(__obj) in __self._functions:
            if isinstance(__obj, TemplateDict):
                _weigh_pairs(args)
        elif isinstance(owner, _METHOD_OWNERS):
            for arg in args:
                weigh(arg)
        elif owner is not None and not callable(owner):
            own = {name: value for name, value in kwargs.items() if name not in _JINJA_KEYWORDS}
            args = pay_method(owner, __obj.__name__, args, own)
        else:
            raise SecurityError("calling this object is not allowed")
        return __context.call(__obj, *args, **kwargs)


def _weigh_pairs(args: tuple[Any, ...]) -> None:
    """The keys of ``dict([(key, value)])`` are hashed; those of ``dict({...})`` already were."""
    for arg in args:
        if not isinstance(arg, dict):
            weigh(arg)
        else:
            template_budget.weigh_flat(arg)


def _finalize(value: Any) -> Any:
    """Pay for what ``{{ value }}`` prints."""
    weigh(value)
    return value
