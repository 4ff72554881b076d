"""Profiles of an engine's steps: recorded by its executor, priced as its observer prices them."""

from concurrent.futures import Future

from ridgeline.core.errors import InvalidRequestError
from ridgeline.engine.engine import Engine
from ridgeline.executors.recorder import Recording
from ridgeline.executors.runner import StepRunner
from ridgeline.roofline.ceilings import Ceilings
from ridgeline.roofline.profile import Profile, make_profile


def record(engine: Engine, num_steps: int) -> Future[Recording]:
    """Have the engine's next steps recorded; see `StepRunner.record`.

    Raises:
        InvalidRequestError: its executor runs no ops, or steps are being recorded.
    """
    return _runner(engine).record(num_steps)


def stop_recording(engine: Engine) -> None:
    """End a recording early, if there is one."""
    _runner(engine).stop_recording()


def profile_of(
    engine: Engine,
    recording: Recording,
    *,
    ceilings: Ceilings | None = None,
    by_layer: bool = False,
) -> Profile:
    """What a recording says, beside ``ceilings`` or those of this machine's calibration.

    Raises:
        InvalidRequestError: no step was recorded.
    """
    observer = engine.observer
    if ceilings is None and observer.predictor is not None:
        ceilings = observer.predictor.calibration.ceilings
    return make_profile(recording.steps(), observer.models, ceilings, by_layer=by_layer)


def _runner(engine: Engine) -> StepRunner:
    if engine.executor.layout_for().num_ranks > 1:
        raise InvalidRequestError("Steps of several processes are not profiled; leave those out.")
    if not isinstance(engine.executor, StepRunner):
        raise InvalidRequestError(
            f"The {engine.executor.name} executor runs no ops that could be timed."
        )
    return engine.executor
