"""Prompts that end inside the last message, for the model to go on with it."""

from typing import Any

from ridgeline.core.errors import ChatTemplateError, InvalidRequestError

# transformers' tag; the space at its end shows whether the template trimmed the message.
_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def mark_continuation(messages: list[dict[str, Any]]) -> str:
    """Append the tag to the last message's text (mutated); return the text without it."""
    last = messages[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + _TAG
        return content
    if isinstance(content, list) and content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + _TAG
        return text
    raise InvalidRequestError("continue_final_message is set, but the final message has no text.")


def cut_continuation(rendered: str, final_text: str) -> str:
    """Cut the rendering at the tag; ChatTemplateError if the template dropped the message."""
    tag = _TAG.strip()
    if final_text.strip() not in rendered or tag not in rendered:
        raise ChatTemplateError(
            "The chat template does not keep the final message, so it cannot be continued."
        )
    end = rendered.rindex(tag)
    kept_spaces = rendered.startswith(_TAG, end)
    return rendered[:end] if kept_spaces else rendered[:end].rstrip()
