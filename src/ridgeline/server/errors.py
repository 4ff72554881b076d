"""What went wrong, as HTTP says it: a status, and a body in the shape of the route's family."""

import enum
import math
import re
from typing import Any

from ridgeline.core.errors import (
    ContextLengthError,
    CorruptFileError,
    EngineError,
    EngineUnavailableError,
    MachineError,
    NotFiniteError,
    NoTokenError,
    OverloadedError,
    RequestError,
    UnsupportedModelError,
)

_MAX_MESSAGE_CHARS = 500
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_OF_TOKEN = re.compile(r"Token id \d+ in (\w+_\w+) ")
_FIELDS = ("n", "temperature", "seed", "stop", "logprobs", "dimensions")
_RETRY_AFTER_S = 1
THREAD_UNSUPPORTED = "thread_unsupported_request"  # Anthropic's clients then go on without one

_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiFamily(enum.Enum):
    """Whose interface a route belongs to, and so the shape of its errors."""

    OPENAI = "openai"
    ANTHROPIC = "anthropic"
    OLLAMA = "ollama"


def family_of(path: str) -> ApiFamily:
    """The family of a path, whether it has a route or not."""
    if path.startswith("/api/"):
        return ApiFamily.OLLAMA
    return ApiFamily.ANTHROPIC if path.startswith("/v1/messages") else ApiFamily.OPENAI


class ApiError(Exception):
    """Ends a request with ``status``. ``param`` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _CONTROL.sub(" ", message)[:_MAX_MESSAGE_CHARS]
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self, family: ApiFamily, request_id: str) -> dict[str, Any]:
        """The error as the clients of that family read it."""
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        if family is ApiFamily.ANTHROPIC:
            kind = _ANTHROPIC_TYPES.get(self.status, default)
            error: dict[str, Any] = {"type": kind, "message": self.message}
            if self.code == THREAD_UNSUPPORTED:
                error["details"] = {"error_code": self.code, "unsupported": [self.param]}
            return {"type": "error", "error": error, "request_id": request_id}
        if family is ApiFamily.OLLAMA:
            return {"error": self.message}
        return {
            "error": {
                "message": self.message,
                "type": _OPENAI_TYPES.get(self.status, default),
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def summary(self) -> str:
        """For logs: the message, but of a mistake of the caller the code or type, since messages
        quote what was sent."""
        if self.status >= 500:
            return self.message
        return self.code or _OPENAI_TYPES.get(self.status, "invalid_request_error")

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        headers = []
        if self.status in (408, 413):  # the rest of the body is not read
            headers.append((b"connection", b"close"))
        if self.retry_after_s is not None:
            seconds = max(1, math.ceil(self.retry_after_s))
            headers.append((b"retry-after", str(seconds).encode()))
        if self.status == 401:
            headers.append((b"www-authenticate", b'Bearer, Basic realm="ridgeline"'))
        return headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The caller's mistake; ``param`` names the field."""
    return ApiError(400, message, param=param, code=code)


def to_api_error(error: Exception, prompt_field: str) -> ApiError:
    """What to tell the caller; details of what broke inside stay inside.

    ``prompt_field``: where the request has what the model reads.
    """
    match error:
        case ApiError():
            return error
        case ContextLengthError():
            return bad_request(str(error), prompt_field, "context_length_exceeded")
        case RequestError():
            return bad_request(str(error), named_field(str(error)))
        case EngineUnavailableError():
            return ApiError(503, str(error), code="unavailable", retry_after_s=_RETRY_AFTER_S)
        case OverloadedError(retry_after_s=seconds):
            return ApiError(503, str(error), code="overloaded", retry_after_s=seconds)
        case UnsupportedModelError():  # the model does not do what the route is for
            return bad_request(str(error), "model", "model_not_supported")
        case CorruptFileError():  # what it has stored itself
            return ApiError(500, str(error))
        case MachineError():
            return ApiError(503, "The server lacks resources.", retry_after_s=_RETRY_AFTER_S)
        case NoTokenError() | NotFiniteError():
            return ApiError(500, str(error))
        case EngineError():
            return ApiError(500, "The engine failed while it worked on the request.")
    return ApiError(500, "The server failed while it worked on the request.")


def named_field(message: str) -> str | None:
    """The field that a message of the engine's begins with, or whose token id it is about."""
    if (of_token := _OF_TOKEN.match(message)) is not None:
        return of_token.group(1)
    word = message.split(" ", 1)[0]
    return word if "_" in word or word in _FIELDS else None
