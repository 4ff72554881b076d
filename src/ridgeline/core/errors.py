"""The exceptions that Ridgeline raises on purpose.

::

    RidgelineError
    ├── SettingsError        a setting is out of bounds, unknown, or contradicts another
    ├── RequestError         the caller asked for something that cannot be done
    │   ├── InvalidRequestError      a value is out of bounds, or values contradict each other
    │   ├── ContextLengthError       the prompt (plus output) does not fit the context
    │   └── ChatTemplateError        the template raised, looped, or is missing
    ├── ModelFileError       the model on disk is missing, damaged or not supported
    │   ├── ModelNotFoundError       no such folder, file or repository
    │   ├── CorruptFileError         a file contradicts its own header, or is cut short
    │   ├── UnsupportedModelError    a well-formed model that needs what Ridgeline lacks
    │   ├── WeightsMismatchError     tensors missing, left over, or of another shape
    │   └── TokenizerError           the tokenizer is missing or unusable
    ├── MachineError         the machine lacks memory, disk, a device or the network
    │   ├── OutOfMemoryError
    │   ├── DiskError
    │   ├── NetworkError
    │   └── MissingDependencyError   an optional package is not installed; names the extra
    ├── OverloadedError      more is waiting than the queue takes; try again later
    └── EngineError          something broke inside; the request is not to blame
        ├── NotFiniteError           the model computed what is infinite or not a number
        ├── NoTokenError             a step left no token to take
        └── EngineUnavailableError   it starts, restarts, drains or has stopped; try again later

``str(error)`` is one sentence for the person who ran the command; it never carries prompt text.
``exit_code`` is what the command line ends with: 2 for the caller's mistakes, 1 for the rest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ridgeline.core.request import RequestOutput


class RidgelineError(Exception):
    """Base of every error raised on purpose."""

    exit_code = 1


class SettingsError(RidgelineError, ValueError):
    """A setting of the engine or the server is out of bounds, unknown, or contradicts another."""

    exit_code = 2


class RequestError(RidgelineError):
    """What the caller asked for cannot be done."""

    exit_code = 2


class InvalidRequestError(RequestError, ValueError):
    """A value is out of bounds, or values contradict each other."""


class ContextLengthError(RequestError):
    """The request needs more tokens than the context or the KV pool holds."""


class ChatTemplateError(RequestError):
    """The chat template raised, ran too long, produced too much, or is missing."""


class ModelFileError(RidgelineError):
    """The model on disk is missing, damaged or not supported."""


class ModelNotFoundError(ModelFileError):
    """There is no model under that name or path."""


class CorruptFileError(ModelFileError):
    """A file contradicts its own header or is cut short."""


class UnsupportedModelError(ModelFileError):
    """The model is well formed but needs something that Ridgeline does not have."""


class WeightsMismatchError(ModelFileError):
    """Tensors are missing, left over, or have a shape that the config does not give them."""


class TokenizerError(ModelFileError):
    """The tokenizer is missing or unusable."""


class MachineError(RidgelineError):
    """The machine lacks something that the work needs."""


class OutOfMemoryError(MachineError):
    """Weights, KV pool or activations do not fit; the message gives the numbers."""


class DiskError(MachineError):
    """A file could not be written or read for want of space or permission."""


class NetworkError(MachineError):
    """A download was needed and the network could not be used."""


class MissingDependencyError(MachineError):
    """An optional package is not installed; the message names the extra that brings it."""


class OverloadedError(RidgelineError):
    """The queue is full. ``retry_after_s``: seconds after which there is likely to be room."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(RidgelineError):
    """Something broke inside the engine."""


class NotFiniteError(EngineError):
    """What a model computed is infinite or not a number."""

    def __init__(self) -> None:
        super().__init__(
            "The result is not finite, as of damaged weights or of sums that the data type does "
            "not hold."
        )


class NoTokenError(EngineError):
    """A step left no token to take: an output ends with `FinishReason.ERROR`.

    ``outputs``: what `LLM.generate` made all the same, for each of its prompts.
    """

    def __init__(self, outputs: Sequence["RequestOutput"] = ()) -> None:
        self.outputs = tuple(outputs)
        super().__init__(
            "No token was possible: the logits are not finite, as of damaged weights or of sums "
            "that the data type does not hold, or every token is barred."
        )


class EngineUnavailableError(EngineError):
    """The engine takes no requests now: it starts, restarts, drains, stalls or has stopped."""
