"""The ranks of a training run, none of which holds a whole model.

Weights, gradients and the optimizer's sums are cut by their first axis (ZeRO stage 3, Rajbhandari
et al. 2020, arXiv 1910.02054) by PyTorch's FSDP2: a layer is gathered while it computes, and
gradients are summed where their rows are.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ridgeline.core.errors import EngineError, SettingsError
from ridgeline.core.host import unmap_freed_blocks
from ridgeline.core.rounding import ceil_div

_TOLD_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRanks:
    """Which rank this process is, of how many."""

    number: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it is the one that writes."""
        return self.number == 0

    def shard(self, *modules: nn.Module) -> None:
        """Cut the parameters of modules, which are gathered together while any of them computes.

        Modules go before those that they are in. Each rank gives equal weights.
        """
        if self.count == 1:
            return
        mesh = init_device_mesh("cpu", (self.count,))
        fully_shard(list(modules), mesh=mesh, reshard_after_forward=True)
        for module in modules:
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)  # a sum: losses are shares of a step's
            module.set_force_sum_reduction_for_comms(True)

    def rows(self, num_rows: int) -> slice:
        """Which of a tensor's rows lie here."""
        share = ceil_div(num_rows, self.count)
        first = min(num_rows, self.number * share)
        return slice(first, min(num_rows, first + share))

    def in_turn(self, values: Sequence[float]) -> list[float]:
        """Equally many values of each rank: the first of all, in their order, then the second."""
        if self.count == 1:
            return list(values)
        own = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.count)]
        distributed.all_gather(found, own)
        return torch.stack(found, dim=1).flatten().tolist()

    def of_first(self, values: Sequence[float]) -> list[float]:
        """The first rank's values; all have equally many."""
        return self.in_turn(values)[:: self.count]

    def text_of_first(self, make: Callable[[], str]) -> str:
        """What the first rank makes."""
        if self.count == 1:
            return make()
        data = make().encode() if self.is_first else b""
        (size,) = self.of_first([len(data)])
        values = torch.empty(int(size), dtype=torch.uint8)
        if self.is_first:
            values.numpy()[:] = bytearray(data)
        distributed.broadcast(values, 0)
        return values.numpy().tobytes().decode()

    def wait(self) -> None:
        """Until all are here."""
        self.in_turn([0.0])


ALONE = TrainingRanks()


def own_rows(tensor: Tensor) -> Tensor:
    """The memory of the rows that lie here: of a tensor that is not cut, all."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full_rows(tensor: Tensor) -> Tensor:
    """All rows, for which all ranks must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Within, the parameters of a module that was cut are whole; all ranks must enter."""
    if not isinstance(module, FSDPModule):
        yield
        return
    module.unshard()
    yield
    module.reshard()


def join_launched(rendezvous: Path) -> None:
    """Make this process a rank of those that `--ranks` starts, which meet in a file."""
    with _losing_ranks(is_launched=True):
        distributed.init_process_group(
            "gloo",
            init_method=rendezvous.as_uri(),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )


@contextmanager
def joined_ranks(num_ranks: int) -> Iterator[TrainingRanks]:
    """The ranks that this process was started as one of: by `--ranks`, or by torchrun.

    Raises:
        SettingsError: ``num_ranks`` contradicts torchrun.
        EngineError: another rank ended, or cannot be reached.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if num_ranks not in (1, count):
        raise SettingsError(
            f"ranks is {num_ranks}, and torchrun started {count}: leave it out with torchrun."
        )
    if count == 1:
        yield ALONE
        return
    unmap_freed_blocks()
    is_launched = distributed.is_initialized()
    with _losing_ranks(is_launched):
        if not is_launched:
            distributed.init_process_group("gloo")
        yield TrainingRanks(number=distributed.get_rank(), count=count)
        distributed.destroy_process_group()


@contextmanager
def _losing_ranks(is_launched: bool) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        if is_launched:
            time.sleep(_TOLD_S)  # what started the ranks tells which one ended, and ends this one
        raise EngineError("Another rank of the training ended, or cannot be reached.") from error
