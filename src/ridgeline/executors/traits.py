"""What an executor is and can do, said without making one, and without torch.

Each executor's folder has a module ``traits`` with its value; `registry` lists them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import SettingsError
from ridgeline.core.extras import install_command
from ridgeline.core.formats import NumberFormat
from ridgeline.core.plan import ModelRole
from ridgeline.core.protocols import Executor
from ridgeline.core.settings.executors import CUDASettings
from ridgeline.roofline import PricedModel

if TYPE_CHECKING:
    from ridgeline.executors.model import ExecutorModel


def needs_torch(executor: str) -> str:
    """What an executor that is all PyTorch says where that is not installed."""
    return (
        f"The {executor} executor needs PyTorch: {install_command('torch')}; the cpu executor "
        "does not."
    )


def has_torch() -> bool:
    """Whether PyTorch is installed; it is not imported."""
    return find_spec("torch") is not None


Models = Mapping[ModelRole, "ExecutorModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorTraits:
    """One executor.

    Attributes:
        create: makes it, of formats that it has.
        is_here: whether ``auto`` may choose it on this machine; quick.
        missing: one sentence on why it cannot run on this machine; ``None`` if it can.
        block_multiple: of tokens, in a KV block.
        runs_encoders: whether it has attention in both directions.
        computes_float64: whether a model in float64 is computed in it.
        weight_formats: what it quantizes weights to on load.
        kv_formats: what it stores KV in, beside the model's type.
        settings: the dataclass of settings that are its alone, which others refuse.
        expands: what to call a quantized format of a checkpoint that it expands to the model's
            type, by the checkpoint's quantization settings; ``None`` for one that it computes with.
        priced: a model in the formats that it makes of its own.
        dense_attention: whether masked scores are computed, too.
        is_native: whether it computes with the kernels of ``csrc``, for whose ceilings there are
            loops of our own, rather than with PyTorch's.
        runs_parts: whether it runs one rank's part of a model, with exchanges among the ops.
        shares_contexts: whether its ranks can share contexts (`context_parallel_size`).
        calibrated_formats: weights that its steps are calibrated in; none: it is not calibrated.
        own_bench: one sentence on what measures it where `ridgeline bench` does not.
        compresses_kv: whether a request may leave tokens out of its KV.
        moves_kv: whether it takes KV over that was computed at other positions.
        streams_weights: whether weights may stay on disk between steps.
        keeps_states: whether it runs models with states of sequences beside KV.
        shares_kv: whether it runs models some of whose layers read the K and V of others.
        lends_kv: whether what drafts may use the target's KV and hidden states: its first
            layers, or a drafter that reads them.
        device_bytes: all memory of the device that holds weights and KV; ``None`` for the host's.
    """

    name: str
    create: Callable[[Models, EngineConfig], Executor]
    is_here: Callable[[], bool] = lambda: True
    missing: Callable[[], str | None] = lambda: None
    block_multiple: int = 1
    runs_encoders: bool = True
    computes_float64: bool = False
    weight_formats: Sequence[str] = ()
    kv_formats: Sequence[str] = ()
    settings: type[CUDASettings] | None = None
    expands: Callable[[NumberFormat, Mapping[str, object]], str | None] = lambda _form, _config: (
        None
    )
    priced: Callable[[PricedModel], PricedModel] = lambda model: model
    dense_attention: bool = False
    is_native: bool = False
    runs_parts: bool = False
    shares_contexts: bool = False
    calibrated_formats: Sequence[str] = ()
    own_bench: str | None = None
    compresses_kv: bool = True
    moves_kv: bool = False
    streams_weights: bool = False
    keeps_states: bool = True
    shares_kv: bool = True
    lends_kv: bool = True
    device_bytes: Callable[[], float | None] = lambda: None

    def check_formats(self, weights: NumberFormat | None, kv: NumberFormat | None) -> None:
        """Refuse what weights are to be quantized to, or KV stored in; ``None`` changes nothing.

        Raises:
            SettingsError: it has no such format; says which it has.
        """
        for what, wanted, known in (
            ("quantize weights to", weights, self.weight_formats),
            ("store KV in", kv, self.kv_formats),
        ):
            if wanted is not None and wanted.name not in known:
                has = f"it takes {', '.join(known)}" if known else "it keeps the model's type"
                raise SettingsError(
                    f"The {self.name} executor does not {what} {wanted.name}: {has}."
                )
