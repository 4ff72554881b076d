"""Executors by name."""

from collections.abc import Callable, Mapping

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.reference import ReferenceExecutor

Factory = Callable[[Mapping[ModelRole, ExecutorModel], int], Executor]

_FACTORIES: dict[str, Factory] = {"reference": ReferenceExecutor}
_AUTO = "reference"


def executor_names() -> tuple[str, ...]:
    """The names that `create_executor` takes beside ``auto``."""
    return tuple(_FACTORIES)


def default_executor() -> str:
    """What ``auto`` stands for here."""
    return _AUTO


def create_executor(
    name: str, models: Mapping[ModelRole, ExecutorModel], *, block_tokens: int
) -> Executor:
    """Build the executor called ``name`` (or the best one here, for ``auto``).

    Raises:
        InvalidRequestError: there is none of that name.
    """
    factory = _FACTORIES.get(_AUTO if name == "auto" else name)
    if factory is None:
        raise InvalidRequestError(
            f"Unknown executor {name!r}; choose auto or one of {', '.join(_FACTORIES)}."
        )
    return factory(models, block_tokens)
