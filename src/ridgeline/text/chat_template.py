"""Rendering conversations by a model's chat template."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError, UndefinedError

from ridgeline.core.errors import ChatTemplateError, InvalidRequestError
from ridgeline.text.chat_messages import (
    check_messages,
    check_objects,
    join_text_parts,
    plain,
    size_of,
)
from ridgeline.text.continuation import cut_continuation, mark_continuation
from ridgeline.text.template_budget import Budget, BudgetExceeded, spending
from ridgeline.text.template_globals import TemplateRaised
from ridgeline.text.template_sandbox import ChatSandbox
from ridgeline.text.tokenizer import Tokenizer

_MAX_SOURCE_CHARS = 1 << 16
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_MESSAGE_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class RenderLimits:
    """What one rendering may cost.

    ``seconds`` is CPU time of the rendering thread. ``units`` (about one character read or written
    each) grow by ``units_per_char`` with the conversation. ``output_chars`` is the prompt's length.
    """

    seconds: float = 0.5
    units: int = 16 << 20
    units_per_char: int = 32
    output_chars: int = 16 << 20


class ChatTemplate:
    """One or several named templates of a model; immutable, safe to share between threads.

    Raises ChatTemplateError if a template does not compile. ``special_tokens`` (``bos_token``, …)
    are variables in the template.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        sources = {"default": source} if isinstance(source, str) else dict(source)
        self._named = not isinstance(source, str)
        self._special_tokens = dict(special_tokens or {})
        self._limits = limits or RenderLimits()
        self._templates = {name: self._compile(text) for name, text in sources.items()}

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """Return the template of a tokenizer's folder, None if it has none."""
        if tokenizer.chat_template is None:
            return None
        return cls(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        template_name: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt for a conversation, as transformers' ``apply_chat_template`` does.

        Content parts reach a template that iterates over content, and are joined for one that
        takes strings. Without ``template_name`` the template is "tool_use" where there are tools
        and such a template, else "default". Raises InvalidRequestError for what the caller did
        wrong, ChatTemplateError where the template raises or exceeds its limits.
        """
        name = self._choose(template_name, has_tools=tools is not None)
        extra = self._check_extra(chat_template_kwargs)
        variables: dict[str, Any] = {
            "messages": check_messages(messages),
            "tools": check_objects(tools, "tools"),
            "documents": check_objects(documents, "documents"),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        template, takes_parts = self._templates[name]
        if not takes_parts:
            join_text_parts(variables["messages"])
        final = None
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message and add_generation_prompt exclude each other."
                )
            final = mark_continuation(variables["messages"])
        text = self._run(template, {**variables, **self._special_tokens, **extra})
        return text if final is None else cut_continuation(text, final)

    def _choose(self, name: str | None, *, has_tools: bool) -> str:
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._templates else "default"
        elif not self._named and name != "default":
            raise InvalidRequestError("The model has one chat template, without a name.")
        if name not in self._templates:
            names = ", ".join(sorted(self._templates))[:_MESSAGE_CHARS]
            raise ChatTemplateError(f"The model has no such chat template; it has: {names}.")
        return name

    def _check_extra(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        checked: dict[str, Any] = plain(dict(extra or {}), "chat_template_kwargs")
        if reserved := _RESERVED & checked.keys():
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}."
            )
        return checked

    def _compile(self, source: str) -> tuple[Template, bool]:
        if len(source) > _MAX_SOURCE_CHARS:
            raise ChatTemplateError("The chat template is longer than 64 Ki characters.")
        with _refusals(), spending(Budget(self._limits.units, self._limits.seconds)):
            tree = _sandbox().parse(source)
            takes_parts = _takes_parts(tree)
            return _sandbox().from_string(tree), takes_parts

    def _run(self, template: Template, variables: dict[str, Any]) -> str:
        limits = self._limits
        units = limits.units + limits.units_per_char * size_of(list(variables.values()))
        pieces: list[str] = []
        length = 0
        with _refusals(), spending(Budget(units, limits.seconds)):
            for piece in template.generate(variables):
                length += len(piece)
                if length > limits.output_chars:
                    raise BudgetExceeded
                pieces.append(piece)
        return "".join(pieces)


@functools.cache
def _sandbox() -> ChatSandbox:
    return ChatSandbox()


class _refusals:  # noqa: N801 - used as a context manager, like contextlib's
    """Turn whatever a template raises into a ChatTemplateError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):
            return
        if isinstance(error, BudgetExceeded | MemoryError | RecursionError):
            text = "The chat template exceeds its limit of time, memory or recursion."
        elif isinstance(error, TemplateRaised):
            text = f"The chat template refuses the conversation: {_printable(error)}"
        elif isinstance(error, TemplateSyntaxError):
            text = f"The chat template does not compile (line {error.lineno}): {_printable(error)}"
        elif isinstance(error, SecurityError | UndefinedError):
            text = f"The chat template failed: {_printable(error)}"
        else:
            # Other exceptions may quote the conversation.
            text = f"The chat template failed ({type(error).__name__})."
        raise ChatTemplateError(text) from None


def _printable(error: TemplateError) -> str:
    text = (error.message or type(error).__name__)[:_MESSAGE_CHARS]
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def _takes_parts(tree: nodes.Template) -> bool:
    """Say whether a template iterates over content, as one that knows content parts does."""
    return any(
        (isinstance(node, nodes.Getattr) and node.attr == "content")
        or (isinstance(node, nodes.Getitem) and getattr(node.arg, "value", None) == "content")
        or (isinstance(node, nodes.Name) and node.name == "content")
        for loop in tree.find_all(nodes.For)
        for node in [loop.iter, *loop.iter.find_all((nodes.Getattr, nodes.Getitem, nodes.Name))]
    )
