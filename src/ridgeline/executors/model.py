"""A model as an executor takes it: spec, ops and weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ridgeline.core.arrays import Array
from ridgeline.core.errors import SettingsError
from ridgeline.core.formats import NumberFormat
from ridgeline.core.ops import Op
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.spec import DraftHeadSpec, ModelSpec
from ridgeline.executors.pipeline import StagePipe
from ridgeline.models import lower, shard
from ridgeline.quant import GGUFBlocks, QuantizedTensor
from ridgeline.weights import Adapter, Weight, WeightSource, only_of, rows_of

if TYPE_CHECKING:
    from ridgeline.kernels.cpu.group import RankGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorModel:
    """``weights`` are read by the executor as it is made, and kept in whatever form it computes
    with; those that are not quantized have the type ``dtype``. ``quantization`` is what it makes of
    matrices that are not quantized yet; ``None`` leaves them as they are.

    ``adapters[i]`` is what sequences of adapter slot i + 1 run with; slot 0 is the plain model.
    ``group`` is there if this is one rank's part of a model: its ops exchange through it. So is
    ``pipe`` where that is a stage of a pipeline. ``is_exit``: it is a draft model that is the
    target's first layers and head, and has the target's weights and KV (`exit_after`).
    ``borrowed``: it is a drafter that reads the target's hidden states (`ModelSpec.draft_head`),
    and has these weights of the target's, which ``weights`` lacks, here with their names there;
    ``later`` are the ops that draft its second token, its third, and so on, if not all are ``ops``;
    ``token_ids``[rows of its head] are its tokens in the target's vocabulary, if it has not all. Of
    the KV that ``context_ranks`` share, this is the part of the group's rank.
    """

    spec: ModelSpec
    ops: tuple[Op, ...]
    weights: WeightSource
    dtype: str
    quantization: NumberFormat | None = None
    adapters: tuple[Adapter, ...] = ()
    group: "RankGroup | None" = None
    pipe: StagePipe | None = None
    is_exit: bool = False
    context_ranks: int = 1
    borrowed: Mapping[str, str] | None = None
    later: tuple[tuple[Op, ...], ...] = ()
    token_ids: Array | None = None

    @property
    def is_head(self) -> bool:
        """Whether it drafts from the target's hidden states."""
        return self.borrowed is not None

    @property
    def all_ops(self) -> tuple[Op, ...]:
        """Those of ``ops`` and ``later``: all that read its weights."""
        return (*self.ops, *(op for ops in self.later for op in ops))

    @property
    def shares_kv(self) -> bool:
        """Whether it is a draft model whose KV is in the target's blocks."""
        return self.is_exit or self.is_head

    def with_features(self, head: DraftHeadSpec) -> "ExecutorModel":
        """This model, keeping what a drafter reads."""
        spec = replace(self.spec, draft_head=head)
        return replace(self, spec=spec, ops=lower(spec))

    def exit_after(self, num_layers: int) -> "ExecutorModel":
        """The draft model that this one is if it stops after its first layers: weights and KV are
        its own, so nothing of it is loaded or kept for them.

        Raises:
            SettingsError: the model has no more layers than that.
        """
        if num_layers >= len(self.spec.layers):
            raise SettingsError(
                f"draft_layers {num_layers} leaves nothing to skip: the model has "
                f"{len(self.spec.layers)} layers; name fewer."
            )
        return replace(self, ops=lower(self.spec, exit_after=num_layers), is_exit=True)

    def part(
        self,
        layout: ParallelLayout,
        rank: int,
        group: "RankGroup",
        pipe: StagePipe | None = None,
    ) -> "ExecutorModel":
        """One rank's part, beside whose weights none are read.

        Raises:
            SettingsError: the model cannot be split so.
        """
        own = shard(self.spec, layout, rank)
        adapters = tuple(
            {
                name: replace(lora, up=lora.up[slice(*own.rows.get(name, (None, None)))])
                for name, lora in adapter.items()
            }
            for adapter in self.adapters
        )
        return replace(
            self,
            spec=own.spec,
            ops=own.ops,
            weights=rows_of(only_of(self.weights, own.ops), own.rows),
            adapters=adapters,
            group=group,
            pipe=pipe,
            context_ranks=layout.context,
        )

    def check_not_quantized_twice(self, weight: Weight, *, may_have_its_bits: bool = False) -> None:
        """
        Raises:
            SettingsError: the model is to be quantized, and this weight of it is already, unless
                it may be, to the same number of bits.
        """
        if self.quantization is None or not isinstance(weight, QuantizedTensor | GGUFBlocks):
            return
        has_its_bits = (
            isinstance(weight, QuantizedTensor) and weight.format.bits == self.quantization.bits
        )
        if not (may_have_its_bits and has_its_bits):
            raise SettingsError(
                f"The checkpoint is quantized already, to {weight.format.name}; leave out "
                "`quantization` (of a draft model: set draft_quantization to none), or load the "
                "unquantized checkpoint."
            )
