"""What the output of ``/v1/responses`` is made of."""

from typing import Any

from ridgeline.server.ids import new_id
from ridgeline.server.schemas.chat import ChosenLogprob


class OutputItem:
    """One item of the output: reasoning, the message, or a call."""

    def __init__(self, kind: str, index: int, *, call_id: str = "", name: str = "") -> None:
        prefix = {"reasoning": "rs_", "message": "msg_", "function_call": "fc_"}[kind]
        self.kind, self.index, self.id = kind, index, new_id(prefix)
        self.call_id, self.name = call_id, name
        self.status = "in_progress"
        self.text = ""
        self.logprobs: list[ChosenLogprob] = []

    def json(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        if self.kind == "reasoning":
            content = [{"type": "reasoning_text", "text": self.text}] if self.text else []
            return {
                "id": self.id,
                "type": "reasoning",
                "status": self.status,
                "summary": [],
                "content": content,
            }
        if self.kind == "function_call":
            return {
                "id": self.id,
                "type": "function_call",
                "status": self.status,
                "call_id": self.call_id,
                "name": self.name,
                "arguments": self.text,
            }
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "status": self.status,
            "content": [] if self.status == "in_progress" else [self.part()],
        }

    def part(self) -> dict[str, Any]:
        """The content of a message as it is now."""
        return {
            "type": "output_text",
            "text": self.text,
            "annotations": [],
            "logprobs": list(self.logprobs),
        }

    @property
    def place(self) -> dict[str, Any]:
        """How events name its content."""
        return {"item_id": self.id, "output_index": self.index, "content_index": 0}
