"""Single kernels at the shapes of a model: bytes and operations per second."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import ceil, prod

import numpy as np
import torch

from benchmarks.gpu.progress import Bench
from benchmarks.gpu.settings import Settings as BenchSettings
from benchmarks.gpu.steps import random_model
from benchmarks.gpu.timing import measure
from ridgeline.core import ops
from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.formats import number_format
from ridgeline.core.spec import Activation, RoutingSpec, Scoring
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.inputs import PassInput, SegmentTables, Short, Span
from ridgeline.executors.cuda.kernels import AttendSpec, Draw, Experts, Gain, Kernels
from ridgeline.executors.cuda.kv_cache import DeviceKVCache
from ridgeline.executors.cuda.packaged_attention import PackagedAttention, misfit
from ridgeline.executors.cuda.program import rope_specs
from ridgeline.executors.cuda.rope import RopeTables
from ridgeline.executors.cuda.slots import Settings
from ridgeline.executors.cuda.weights import packed
from ridgeline.executors.model import ExecutorModel
from ridgeline.kernels.flash_attention import FlashAttention
from ridgeline.kernels.gpu import has_fp8
from ridgeline.kernels.triton import KVTensors

_BLOCK = 16
_BATCHES = (1, 8, 64, 128)
_CODED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_DRAWS = {Draw.NOISE: "draws", Draw.TRUNCATED: "draws by top-p"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Of one call: seconds, bytes that must move and operations of products."""

    name: str
    seconds: float
    num_bytes: float
    flops: float = 0.0


def bench_kernels(bench: Bench, shape: str) -> None:
    """Products by format and batch, attention by batch and context, and what is between them."""
    settings, progress = bench.settings, bench.progress
    model = random_model(bench.device, settings.shapes[shape])
    timer = _Timer(bench.device, bench.kernels(), model, settings)

    def case(name: str, time: Callable[[], KernelTime]) -> None:
        if progress.allows(f"kernel: {name}"):
            with bench.device.scope(), torch.inference_mode():
                progress.result("kernel", time())

    for form in settings.formats:
        for batch in _BATCHES:
            case(f"products, {form}, batch {batch}", partial(timer.product, form, batch))
    package = _package(bench, timer)
    for batch, context in settings.decode:
        name = f"attention {batch} at {context}"
        if timer.fits(batch, context):
            case(name, partial(timer.attention, batch, context))
            if package is not None:
                theirs = partial(timer.attention, batch, context, package=package)
                case(f"{name} by {package.name}", theirs)
        else:
            progress.leave_out(f"kernel: {name}", "no memory for KV")
    for batch, context in settings.coded:
        for name, kind in _CODED.items():
            if name == "fp8" and bench.device.torch_device.type == "cuda" and not has_fp8():
                continue
            case(
                f"attention {batch} at {context}, KV {name}",
                partial(timer.attention, batch, context, kind),
            )
    longest = max(settings.prompts)
    for tokens in (settings.decode[-1][0], longest):
        case(f"rotation, {tokens} tokens", partial(timer.rotation, tokens))
    for batch, how in product((1, settings.decode[-1][0]), (Draw.NOISE, Draw.TRUNCATED)):
        case(f"{_DRAWS[how]}, batch {batch}", partial(timer.draws, batch, how))
    for form, tokens in product(settings.formats[:2], settings.routed):
        case(f"experts {form}, {tokens} tokens", partial(timer.experts, form, tokens))
    for prompt in settings.prompts:
        name = f"attention of a prompt of {prompt}"
        case(name, partial(timer.prompt, prompt))
        if package is not None:
            case(f"{name} by {package.name}", partial(timer.prompt, prompt, package))
    case("norm", partial(timer.norm, longest))
    for form in settings.formats:
        if form in ("bfloat16", "fp8"):  # by the vendor's library, of rows that are rounded to fp8
            case(f"large products, {form}", partial(timer.product, form, longest))


def _package(bench: Bench, timer: "_Timer") -> FlashAttention | None:
    """What attends beside the kernels; what keeps it from that is told once."""
    if bench.attention is None:
        return None
    package = bench.attention.package
    if not isinstance(package, str):
        reason = timer.misfit(package)
        if reason is None:
            return package
        package = f"{package.name} {reason}."
    bench.progress.leave_out("kernel: attention by FlashAttention", package)
    return None


class _Timer:
    def __init__(
        self, device: Device, kernels: Kernels, model: ExecutorModel, settings: BenchSettings
    ) -> None:
        self._device, self._kernels, self._model = device, kernels, model
        self._settings, self._at = settings, device.torch_device
        self._mlp = next(op for op in model.ops if isinstance(op, ops.MLP))
        self._attend = next(op for op in model.ops if isinstance(op, ops.Attend))
        self._norm = next(op for op in model.ops if isinstance(op, ops.Norm))

    def product(self, form: str, batch: int) -> KernelTime:
        """Gate and up, with the activation: the largest matrix of a layer."""
        width, inner = self._mlp.up.shape
        shape = (2 * width, inner)
        number = None if form == "bfloat16" else number_format(form)
        values = self._random(*shape)
        x = self._random(batch, inner)
        num_bytes = float((number or number_format("bfloat16")).num_bytes(shape))
        count = max(1, min(8, ceil(self._settings.beyond_caches_bytes / num_bytes)))
        matrices = [packed(values.clone(), number) for _ in range(count)]
        self._kernels.reserve(matrices, x.dtype)
        calls = [
            partial(self._kernels.linear, x, matrix, activation=Activation.SILU)
            for matrix in matrices
        ]
        return self._time(
            f"gate·up {form}, {batch} tokens",
            calls,
            num_bytes + 2.0 * batch * (inner + width),
            2.0 * batch * prod(shape),
        )

    def attention(
        self,
        batch: int,
        context: int,
        kind: torch.dtype = torch.bfloat16,
        package: FlashAttention | None = None,
    ) -> KernelTime:
        """One token of each sequence over its context, in blocks scattered over the pool; by
        ``package``, in the smallest blocks that it takes, or by the kernels."""
        op = self._attend
        scale_bytes = 4 if kind in _CODED.values() else 0
        row = 2.0 * op.num_kv_heads * (op.head_dim * kind.itemsize + scale_bytes)
        calls_needed = ceil(self._settings.beyond_caches_bytes / (batch * context * row))
        layers = kv_groups(self._model.spec)[0].layers[:calls_needed]
        copies = ceil(calls_needed / len(layers))  # of the batch, beside each other in the pool
        block = _block(package)
        cache = self._cache(copies * batch, context, kind, block=block)
        q = self._random(batch, op.num_heads, op.head_dim)
        inputs = [
            self._input(batch, [context] * batch, 1, copy, copies, block=block)
            for copy in range(copies)
        ]
        calls = [
            partial(self._attends(package).decode, q, cache.layer(layer), at)
            for at in inputs
            for layer in layers
        ]
        flops = 4.0 * batch * context * op.num_heads * op.head_dim
        name = f"attention, {batch} at {context}"
        name += f", KV {str(kind).removeprefix('torch.')}" if scale_bytes else ""
        name += _by(package)
        found = self._time(name, calls, batch * context * row, flops)
        cache.free()
        return found

    def prompt(self, tokens: int, package: FlashAttention | None = None) -> KernelTime:
        """A prompt over itself."""
        block = _block(package)
        op, cache = self._attend, self._cache(1, tokens, block=block)
        q = self._random(tokens, op.num_heads, op.head_dim)
        at = self._input(1, [tokens], tokens, block=block)
        kv = cache.layer(cache.groups[0].layers[0])
        flops = 2.0 * tokens * (tokens + 1) * op.num_heads * op.head_dim
        moved = 2.0 * 2 * tokens * (op.num_heads + op.num_kv_heads) * op.head_dim
        found = self._time(
            f"attention of a prompt of {tokens}{_by(package)}",
            [partial(self._attends(package).prefill, q, kv, at)],
            moved,
            flops,
        )
        cache.free()
        return found

    def rotation(self, tokens: int) -> KernelTime:
        """Rotation of q and k, and the write of k and v."""
        op, cache = self._attend, self._cache(1, tokens)
        rope = RopeTables(rope_specs(self._model.ops), tokens, self._at)
        (rows,) = rope.of(torch.arange(tokens, device=self._at)).values()
        q, k, v = (
            self._random(tokens, heads, op.head_dim)
            for heads in (op.num_heads, op.num_kv_heads, op.num_kv_heads)
        )
        slots = torch.arange(tokens, device=self._at)
        calls = [
            partial(self._kernels.rotate_and_write, q, k, v, cache.layer(layer), slots, rope=rows)
            for layer in cache.groups[0].layers
        ]
        moved = 2.0 * 2 * tokens * (op.num_heads + 2 * op.num_kv_heads) * op.head_dim
        found = self._time(f"rotation and KV write, {tokens} tokens", calls, moved)
        cache.free()
        return found

    def draws(self, batch: int, how: Draw) -> KernelTime:
        """Tokens of rows of logits, which are read at least once."""
        vocab, at = self._model.spec.vocab_size, self._at
        logits = [3 * self._random(batch, vocab) for _ in range(2)]
        settings = Settings(
            fractions=torch.tensor([0.8, 0.95, 0.0], dtype=torch.float64, device=at)
            .repeat(batch, 1)
            .T.contiguous(),
            counts=torch.zeros(2, batch, dtype=torch.int32, device=at),
            seeds=torch.arange(batch, device=at),
        )
        positions = torch.arange(batch, device=at)
        calls = [
            partial(self._kernels.sample, each, settings, positions, positions.int(), how=how)
            for each in logits
        ]
        return self._time(f"{_DRAWS[how]}, {batch} rows", calls, 2.0 * batch * vocab)

    def experts(self, form: str, tokens: int) -> KernelTime:
        """A mixture: choice, order, both products, weighted sum; of the experts that are chosen."""
        count, top_k, width, inner = self._settings.experts
        number = None if form == "bfloat16" else number_format(form)
        gate_up, down = (count, 2 * inner, width), (count, width, inner)
        mixture = Experts(
            routing=RoutingSpec(top_k=top_k, scoring=Scoring.SOFTMAX, normalised=True),
            correction_E=None,
            gate_up=packed(self._random(*gate_up), number),
            down=packed(self._random(*down), number),
            gate_up_bias=None,
            down_bias=None,
            activation=Activation.SILU,
        )
        x, logits = self._random(tokens, width), self._random(tokens, count).float()
        chosen = int((logits.topk(top_k).indices.flatten().bincount() > 0).sum())
        form_bytes = (number or number_format("bfloat16")).num_bytes
        read = (form_bytes(gate_up) + form_bytes(down)) * chosen / count
        return self._time(
            f"experts {form}, {chosen} of {count} by {tokens} tokens",
            [partial(self._kernels.experts, x, logits, mixture)],
            read + 2.0 * 2 * tokens * width,
            2.0 * tokens * top_k * 3 * inner * width,
        )

    def norm(self, tokens: int) -> KernelTime:
        hidden = self._model.spec.hidden_size
        gain = Gain(spec=self._norm.spec, weight=torch.ones(hidden, device=self._at).bfloat16())
        inputs = [self._random(tokens, hidden) for _ in range(2)]
        calls = [partial(self._kernels.normalise, x, gain) for x in inputs]
        return self._time(f"norm, {tokens} tokens", calls, 4.0 * tokens * hidden)

    def misfit(self, package: FlashAttention) -> str | None:
        """Why a package cannot attend, in blocks of the size it likes."""
        return misfit(package, self._attend, torch.bfloat16, _block(package))

    def _attends(self, package: FlashAttention | None) -> "_OwnAttention | PackagedAttention":
        if package is not None:
            return PackagedAttention.of(package, self._attend)
        return _OwnAttention(self._kernels, AttendSpec(group=0, scale=self._attend.scale))

    def fits(self, batch: int, context: int) -> bool:
        """Whether the KV of all layers of such a batch has room."""
        cache = DeviceKVCache(self._device, self._model.spec, torch.bfloat16, _BLOCK)
        blocks = batch * ceil((context + 1) / _BLOCK)
        return blocks * cache.layout.block_bytes[0] < 0.8 * self._device.memory().free

    def _time(
        self, name: str, calls: Sequence[Callable[[], object]], num_bytes: float, flops: float = 0.0
    ) -> KernelTime:
        seconds = measure(self._device, calls, self._settings)
        return KernelTime(name=name, seconds=seconds, num_bytes=num_bytes, flops=flops)

    def _random(self, *shape: int) -> torch.Tensor:
        with self._device.scope():
            return torch.randn(*shape, device=self._at, dtype=torch.bfloat16)

    def _cache(
        self,
        batch: int,
        context: int,
        kind: torch.dtype = torch.bfloat16,
        *,
        block: int = _BLOCK,
    ) -> DeviceKVCache:
        cache = DeviceKVCache(self._device, self._model.spec, kind, block)
        with self._device.scope():
            blocks = batch * ceil((context + 1) / block)
            cache.allocate([blocks] * len(cache.groups))
            cache.fill_random()
        return cache

    def _input(
        self,
        batch: int,
        stops: list[int],
        longest: int,
        copy: int = 0,
        copies: int = 1,
        *,
        block: int = _BLOCK,
    ) -> PassInput:
        """Sequences whose blocks are scattered over the pool; their last tokens are queries.

        A pool for several copies of the batch holds other blocks for each.
        """
        each = ceil((max(stops) + 1) / block)
        every = np.random.default_rng(0).permutation(copies * batch * each)
        scattered = every.reshape(copies, batch, each)[copy]
        tokens = batch * longest
        is_decode = longest == 1
        positions = [stop - 1 for stop in stops] if is_decode else range(tokens)

        def tensor(values: object, kind: torch.dtype) -> torch.Tensor:
            return torch.as_tensor(values, dtype=kind, device=self._at)

        groups = kv_groups(self._model.spec)
        return PassInput(
            token_ids_T=torch.zeros(tokens, dtype=torch.int64, device=self._at),
            positions_T=tensor(positions, torch.int64),
            query_starts_S1=tensor(range(0, tokens + 1, longest), torch.int32),
            stops_S=tensor(stops, torch.int32),
            tables=SegmentTables(
                [tensor(scattered, torch.int32) for _ in groups], tensor(range(batch), torch.int64)
            ),
            slots=[],
            rope={},
            short=Short(batch, tokens, 1) if is_decode else Short(0, 0, 0),
            spans=None if is_decode else (Span(first=0, last=tokens, start=0, stop=tokens),),
        )


class _OwnAttention:
    """The kernels' attention, which tells decode steps from prompts by the pass."""

    def __init__(self, kernels: Kernels, spec: AttendSpec) -> None:
        self._kernels, self._spec = kernels, spec

    def decode(self, q: torch.Tensor, kv: KVTensors, at: PassInput) -> torch.Tensor:
        return self._kernels.attend(q, kv, at, self._spec)

    prefill = decode


def _block(package: FlashAttention | None) -> int:
    """Tokens of a block that a package reads."""
    return _BLOCK if package is None else max(_BLOCK, package.page_multiple)


def _by(package: FlashAttention | None) -> str:
    return "" if package is None else f", {package.name}, blocks of {_block(package)}"
