"""Whether the executor on a device computes what the reference does, without any test runner.

Tiny random models, one for each kind of op, and each format of weights and KV: logits of a prompt
and of steps after it, against the reference executor in float32 on the CPU with the same weights;
and tokens of recorded steps against those of single ones.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.gpu.progress import Bench
from ridgeline.core.arrays import Array
from ridgeline.core.formats import number_format
from ridgeline.core.op_facts import Role
from ridgeline.core.ops import Op
from ridgeline.core.plan import (
    Admission,
    BlockTableUpdate,
    ModelRole,
    Outputs,
    Pass,
    Segment,
    StepPlan,
)
from ridgeline.core.protocols import Executor
from ridgeline.core.result import SegmentResult
from ridgeline.core.rounding import ceil_div
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.weight_uses import weight_roles
from ridgeline.executors.cuda.device import Device
from ridgeline.executors.cuda.executor import CUDAExecutor
from ridgeline.executors.cuda.formats import PACKED, device_head_format
from ridgeline.executors.cuda.kernels import Kernels
from ridgeline.executors.cuda.torch_kernels import unpacked
from ridgeline.executors.cuda.weights import packed
from ridgeline.executors.model import ExecutorModel
from ridgeline.executors.reference.executor import ReferenceExecutor
from ridgeline.kernels.tensors import as_array, as_tensor
from ridgeline.models import describe, lower
from ridgeline.weights import dummy_weights, expanded

_BLOCK = 16
_PROMPT = tuple((37 * i + 11) % 211 for i in range(75))
_STEPS = 5
_LOGITS = Outputs(sample=True, logits=True)

Floats = npt.NDArray[np.float32]

_DENSE: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_LATENTS = _DENSE | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_MODELS: dict[str, Mapping[str, object]] = {
    "dense": _DENSE,
    "window": _DENSE | {"model_type": "mistral", "sliding_window": 24},
    "biases": _DENSE | {"model_type": "qwen2"},
    "head norms": _DENSE | {"model_type": "qwen3"},
    "experts": _DENSE | {"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 2},
    # Each token goes to every expert: no rounding tips the choice.
    "all experts": _DENSE
    | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 4},
    "sinks": _DENSE
    | {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "latents": _LATENTS,
    "all latent experts": _LATENTS | {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},
}
# In bfloat16 the last bit of a router's inputs decides between experts.
_TIPPING = ("experts", "sinks", "latents")
# dtype: relative error that rounding explains.
_TOLERANCES = {torch.float32: 2e-3, torch.bfloat16: 6e-2}
_KV_TOLERANCES = {"auto": 0.0, "int8": 3e-2, "fp8": 1e-1}
# A GPU rounds the prompt's activations to float8 as well, which the reference does not.
_WEIGHT_TOLERANCES = {"fp8": 1.5e-1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What was compared, the largest error of a logit relative to the largest logit, and what it
    may be. ``problem``: it could not be run."""

    name: str
    error: float
    tolerance: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        return not self.problem and self.error <= self.tolerance

    def text(self) -> str:
        """One line."""
        outcome = "passed" if self.passed else "FAILED"
        told = self.problem or f"{self.error:.1e} of {self.tolerance:.0e}"
        return f"{outcome}  {self.name}: {told}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    model: str = "dense"
    dtype: torch.dtype = torch.float32
    form: str | None = None
    kv: str = "auto"

    @property
    def tolerance(self) -> float:
        by_weights = _WEIGHT_TOLERANCES.get(self.form or "", 0.0)
        return _TOLERANCES[self.dtype] + _KV_TOLERANCES[self.kv] + by_weights

    @property
    def name(self) -> str:
        return f"{self.model}, {_name(self.dtype)}, weights {self.form or 'plain'}, KV {self.kv}"


_CASES = (
    *(_Case(model=name) for name in _MODELS),
    *(_Case(model=name, dtype=torch.bfloat16) for name in _MODELS if name not in _TIPPING),
    *(_Case(dtype=torch.bfloat16, form=form) for form in ("int8", "int4", "int4-g128", "fp8")),
    *(_Case(dtype=torch.bfloat16, kv=kv) for kv in ("int8", "fp8")),
)


def case_names() -> tuple[str, ...]:
    """Of every check."""
    return tuple(case.name for case in _CASES)


def bench_checks(bench: Bench, *names: str) -> None:
    """Those of ``names``, as a part of a `processes.Job`."""
    for name in names:
        if bench.progress.allows(name):
            for check in check_all(bench.device, bench.kernels, names=[name]):
                bench.progress.result("check", check)
                if check.problem:
                    raise RuntimeError(check.problem)


def check_all(
    device: Device,
    kernels: Callable[[], Kernels],
    *,
    names: Collection[str] | None = None,
    execution: str = "graphs",
) -> Iterator[Check]:
    """Every case, or those of ``names``; one that fails does not stop the others."""
    for case in (case for case in _CASES if names is None or case.name in names):
        try:
            error = _error(case, device, kernels(), execution)
        except Exception as failure:
            problem = f"{type(failure).__name__}: {failure}"
            yield Check(name=case.name, error=np.inf, tolerance=case.tolerance, problem=problem)
        else:
            yield Check(name=case.name, error=error, tolerance=case.tolerance)


def _error(case: _Case, device: Device, kernels: Kernels, execution: str) -> float:
    spec = describe(_MODELS[case.model]).spec
    model_ops = lower(spec)
    weights = _weights(model_ops, case.dtype)
    model = ExecutorModel(
        spec=spec,
        ops=model_ops,
        weights=weights,
        dtype=_name(case.dtype),
        quantization=None if case.form is None else number_format(case.form),
    )
    ours = CUDAExecutor(
        {ModelRole.TARGET: model},
        _BLOCK,
        device=device,
        kernels=kernels,
        kv_cache_dtype=case.kv,
        num_slots=2,
        execution=execution,
    )
    exact = replace(
        model, weights=_as_quantized(model, case.form), dtype="float32", quantization=None
    )
    reference = ReferenceExecutor({ModelRole.TARGET: exact}, _BLOCK)
    try:
        found = _logits(ours, None)
        drawn = [token for _, token in found]
        if _plain_tokens(ours) != drawn:
            raise ValueError("recorded steps drew other tokens than single ones")
        expected = _logits(reference, drawn)
    finally:
        ours.close()
        reference.close()
    errors = [
        np.abs(mine - theirs).max() / np.abs(theirs).max()
        for (mine, _), (theirs, _) in zip(found, expected, strict=True)
    ]
    return float(np.max(errors))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _weights(model_ops: Sequence[Op], dtype: torch.dtype) -> dict[str, Array]:
    """Random ones, gains and biases as well, which would otherwise change nothing; values of
    ``dtype``, in float32."""
    generator = np.random.default_rng(2)
    weights = dummy_weights(model_ops, dtype="float32", seed=2)
    for name, weight in weights.items():
        if weight.ndim == 1 or "bias" in name:
            weight += 0.2 * generator.standard_normal(weight.shape, dtype=np.float32)
        weights[name] = torch.from_numpy(weight).to(dtype).float().numpy()
    return weights


def _as_quantized(model: ExecutorModel, name: str | None) -> dict[str, Array]:
    """The weights in float32, rounded as the executor rounds them."""
    values = {key: expanded(each, "float32") for key, each in model.weights.items()}
    if name is None:
        return values
    form = number_format(name)
    for key, roles in weight_roles(model.ops).items():
        if roles & PACKED:
            own = device_head_format(form) if Role.HEAD in roles else form
            values[key] = as_array(unpacked(packed(as_tensor(values[key]), own), torch.float32))
    return values


def _logits(executor: Executor, tokens: list[int] | None) -> list[tuple[Floats, int]]:
    """Logits and token of the prompt and of each step after it, which takes the token before, or
    is told it."""
    blocks = ceil_div(len(_PROMPT) + _STEPS, _BLOCK)
    executor.allocate_kv([2 * blocks] * len(executor.kv_layout().groups))
    found: list[tuple[Floats, int]] = []
    known = list(_PROMPT)
    for step in range(_STEPS):
        start = 0 if step == 0 else len(known) - 1
        (result,) = _run(executor, 0, known, start, outputs=_LOGITS)
        assert result.logits is not None
        token = result.token_ids[0] if tokens is None else tokens[step]
        found.append((result.logits, token))
        known.append(token)
    return found


def _plain_tokens(executor: Executor) -> list[int]:
    """The tokens of steps that want nothing else: recorded ones, repeated without the host."""
    (first,) = _run(executor, 1, list(_PROMPT), 0)
    known = [*_PROMPT, *first.token_ids]
    (rest,) = _run(executor, 1, known, len(_PROMPT), num_steps=_STEPS - 1)
    return [*first.token_ids, *rest.token_ids]


def _run(
    executor: Executor,
    slot: int,
    known: list[int],
    start: int,
    *,
    outputs: Outputs = Outputs(sample=True),
    num_steps: int = 1,
) -> tuple[SegmentResult, ...]:
    """One plan that computes the known tokens from ``start`` on, those before it being cached."""
    each = ceil_div(len(_PROMPT) + _STEPS, _BLOCK)
    updates: tuple[BlockTableUpdate, ...] = ()
    admissions: tuple[Admission, ...] = ()
    if start == 0:
        own = tuple(range(slot * each, (slot + 1) * each))
        groups = range(len(executor.kv_layout().groups))
        updates = tuple(BlockTableUpdate(group=group, first=0, blocks=own) for group in groups)
        admissions = (
            Admission(
                slot=slot,
                token_ids=tuple(known),
                num_prompt_tokens=len(known),
                params=SamplingParams(temperature=0.0),
                seed=0,
            ),
        )
    segment = Segment(
        slot=slot,
        start=start,
        stop=len(known),
        token_ids=tuple(known[start:]),
        outputs=outputs,
        block_updates=updates,
    )
    a_pass = Pass(segments=(segment,), num_steps=num_steps)
    plan = StepPlan(step_id=1, passes=(a_pass,), admissions=admissions)
    return executor.submit(plan).result().passes[0]
