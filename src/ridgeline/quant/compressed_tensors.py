"""compressed-tensors (llm-compressor, vLLM), version 0.6 to 0.19.

Of a linear layer with I inputs and O outputs, in G groups of inputs:

- ``pack-quantized``: ``weight_packed`` int32 [O, ⌈I·bits/32⌉], signed codes plus 2^(bits−1), packed
  along the inputs (see `bits`); ``weight_shape`` int64 [2], O and I; ``weight_zero_point`` int32
  [⌈O·bits/32⌉, G], packed alike along the outputs; ``weight_g_idx`` int32 [I], the group of each
  input (act-order; until 0.9).
- ``int-quantized`` and ``naive-quantized``: ``weight`` int8 [O, I], ``weight_zero_point`` int8.
- ``float-quantized`` and ``naive-quantized``: ``weight`` float8 [O, I].
- ``mxfp8-quantized``: the same, ``weight_scale`` uint8 exponents with a bias of 127.
- ``nvfp4-pack-quantized``: ``weight_packed`` uint8 [O, I/2], E2M1 codes, the low nibble first;
  ``weight_scale`` float8 [O, I/16], to be divided by ``weight_global_scale`` float32 [1].
- ``mxfp4-pack-quantized``: the same codes; ``weight_scale`` uint8 [O, I/32] exponents.

``weight_scale`` is [1], [O, 1], [O, G] or one a block, by the strategy; w = (code − zero) · scale.
Source: https://github.com/vllm-project/compressed-tensors, ``compressors``.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ridgeline.core.arrays import FLOAT8S
from ridgeline.core.errors import CorruptFileError, UnsupportedModelError
from ridgeline.models.config import ConfigReader
from ridgeline.quant.compressed_tensors_config import Groups, WeightArgs, read_groups
from ridgeline.quant.compressed_tensors_layouts import float4_weight, integer_weight, packed_weight
from ridgeline.quant.fp8 import float8_weight, note_unused_scales
from ridgeline.quant.scheme import Module, Read, StoragePlan, StoredWeight, TensorInfo

_UNUSED = (
    ".input_scale",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".output_zero_point",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensors:
    """A compressed-tensors checkpoint."""

    groups: Groups

    @classmethod
    def read(cls, config: ConfigReader) -> "CompressedTensors":
        return cls(groups=read_groups(config))

    def plan(self, tensors: Mapping[str, TensorInfo], read: Read) -> StoragePlan:
        plan = StoragePlan()
        for name in tensors:
            for suffix in (".weight_packed", ".weight_scale"):
                prefix = name.removesuffix(suffix)
                done = suffix == ".weight_scale" and f"{prefix}.weight_packed" in tensors
                if name.endswith(suffix) and not done:
                    module = Module(tensors, prefix)
                    plan.weights.append(self._weight(module, self._args(module), read))
        self._note(plan, tensors)
        return plan

    def _args(self, module: Module) -> WeightArgs:
        if self.groups.ignores(module.prefix):
            raise CorruptFileError(
                f"quantization_config ignores {module}, and its weight is quantized."
            )
        group = self.groups.find(module.prefix)
        if group is None:
            raise CorruptFileError(
                f"quantization_config has no group for {module}, and its weight is quantized."
            )
        return group.weights

    def _weight(self, module: Module, args: WeightArgs, read: Read) -> StoredWeight:
        if module.has(".weight_packed") and args.is_float:
            return float4_weight(module, args)
        if module.has(".weight_packed"):
            return packed_weight(module, args, read)
        if not args.is_float:
            return integer_weight(module, args)
        if args.bits != 8:
            raise UnsupportedModelError(f"Floats of {args.bits} bits are not supported.")
        shape = module.part(".weight", *FLOAT8S, shape=(None, None))
        return float8_weight(
            module,
            ".weight_scale",
            shape,
            (1, args.group_size) if args.group_size else args.block,
            is_exponent=args.format == "mxfp8-quantized",
        )

    def _note(self, plan: StoragePlan, tensors: Mapping[str, TensorInfo]) -> None:
        if self.groups.quantizes_activations:
            plan.notes.append("Its activations are not quantized here: only weights are.")
        if self.groups.quantizes_cache:
            plan.notes.append("Its kv_cache_scheme is not used: the cache is not quantized.")
        note_unused_scales(plan, tensors)
        plan.spare.update(name for name in tensors if name.endswith(_UNUSED))
