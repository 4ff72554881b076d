"""The machines that plans are made for: of the catalogue, or the one at hand."""

from dataclasses import dataclass, replace

from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import Calibration, typical
from ridgeline.roofline.catalogue import Catalogue, DeviceKind


@dataclass(frozen=True, kw_only=True)
class Machine:
    """``count`` equal devices; rates, memory, price and power are of one of them.

    ``kind`` is that of the catalogue. ``power_w`` is a datasheet's. ``kv_share`` is the part of the
    memory beside the weights that KV takes, where that is not all but a reserve
    (`roofline.memory.fit`).
    """

    key: str
    name: str
    calibration: Calibration
    memory_bytes: float
    kind: DeviceKind = DeviceKind.GPU
    host_devices: int = 8
    count: int = 1
    usd_per_hour: float | None = None
    power_w: float | None = None
    kv_share: float | None = None

    @property
    def measured(self) -> bool:
        return self.calibration.measured

    def run(self, model: PricedModel) -> PricedModel:
        """The model as a kernel here multiplies it: weights of a format that has no rate here are
        unpacked to the activations'."""
        if model.compute is None or self.calibration.ceilings.has_own_rate(model.compute):
            return model
        return replace(model, compute=None)


def catalogue_machine(catalogue: Catalogue, key: str, count: int = 1) -> Machine:
    """Some devices of the catalogue, with typical efficiencies.

    Raises:
        InvalidRequestError: there is no such device.
    """
    device = catalogue.device(key, or_this=True)
    return Machine(
        key=key.lower(),
        name=device.name,
        kind=device.kind,
        host_devices=device.host_devices,
        calibration=typical(device.ceilings()),
        memory_bytes=device.memory_bytes,
        count=count,
        usd_per_hour=device.usd_per_hour.value if device.usd_per_hour else None,
        power_w=device.power_w.value if device.power_w else None,
    )
