"""Rendering conversations by a model's chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.core.errors import ChatTemplateError, InvalidRequestError
from ridgeline.text.chat_messages import (
    check_messages,
    check_objects,
    developers_are_system,
    join_text_parts,
    plain,
)
from ridgeline.text.continuation import cut_continuation, mark_continuation
from ridgeline.text.template_process import RenderLimits, template_process
from ridgeline.text.tokenizer import Tokenizer

_MAX_SOURCE_CHARS = 1 << 16
_MAX_LISTED_CHARS = 200
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


class ChatTemplate:
    """One or several named templates of a model, safe to share between threads.

    Nothing is compiled before it is needed: a model whose template is broken still completes text.
    ``special_tokens`` (``bos_token``, …) are variables in the template.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str] | None = None,
        limits: RenderLimits | None = None,
    ) -> None:
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._takes_parts: dict[str, bool] = {}  # of those that were compiled
        self._named = not isinstance(source, str)
        self._special_tokens = dict(special_tokens or {})
        self._process = template_process(limits or RenderLimits())

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """Return the template of a tokenizer's folder, None if it has none."""
        if tokenizer.chat_template is None:
            return None
        return cls(tokenizer.chat_template, special_tokens=tokenizer.special_tokens)

    @property
    def source(self) -> str:
        """The text of every template, from which one can tell what outputs look like."""
        return "\n".join(self._sources.values())

    def compile(self) -> None:
        """Raise ChatTemplateError if a template does not compile."""
        for name in self._sources:
            self._compiled(name)

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
        takes strings. The role "developer" is "system" to a template that does not name it. Without
        ``template_name`` the template is "tool_use" where there are tools and such a template, else
        "default". Raises InvalidRequestError for what the caller did wrong, ChatTemplateError where
        the template raises or exceeds its limits.
        """
        name = self._choose(template_name, has_tools=tools is not None)
        extra = self._check_extra(chat_template_kwargs)
        variables: dict[str, Any] = {
            "messages": check_messages(messages),
            "tools": check_objects(tools, "tools"),
            "documents": check_objects(documents, "documents"),
            "add_generation_prompt": bool(add_generation_prompt),
        }
        source = self._compiled(name)
        if "developer" not in source:
            developers_are_system(variables["messages"])
        if not self._takes_parts[name]:
            join_text_parts(variables["messages"])
        final = None
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message and add_generation_prompt exclude each other."
                )
            final = mark_continuation(variables["messages"])
        text = self._process.render(source, {**variables, **self._special_tokens, **extra})
        return text if final is None else cut_continuation(text, final)

    def _compiled(self, name: str) -> str:
        source = self._sources[name]
        if name not in self._takes_parts:
            if len(source) > _MAX_SOURCE_CHARS:
                raise ChatTemplateError("The chat template is longer than 64 Ki characters.")
            self._takes_parts[name] = self._process.takes_parts(source)
        return source

    def _choose(self, name: str | None, *, has_tools: bool) -> str:
        if name is None:
            name = "tool_use" if has_tools and "tool_use" in self._sources else "default"
        elif not self._named and name != "default":
            raise InvalidRequestError("The model has one chat template, without a name.")
        if name not in self._sources:
            names = ", ".join(sorted(self._sources))[:_MAX_LISTED_CHARS]
            raise ChatTemplateError(f"The model has no such chat template; it has: {names}.")
        return name

    def _check_extra(self, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        checked: dict[str, Any] = plain(dict(extra or {}), "chat_template_kwargs")
        if reserved := _RESERVED & checked.keys():
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}."
            )
        return checked
