"""The training loop: warmup, stable, decay; checkpoints from which a run continues exactly."""

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass, field
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ridgeline.compress.batches import BatchStream
from ridgeline.compress.cross_entropy import cross_entropy
from ridgeline.compress.optimizer import MuonAdam, OptimizerConfig
from ridgeline.compress.ranks import ALONE, TrainingRanks, full_rows, own_rows
from ridgeline.compress.trainable import TrainableLlama
from ridgeline.kernels.tensors import as_array
from ridgeline.weights.safetensors_writer import SafetensorsTensor, write_tensors

LossFunction = Callable[[Tensor, Tensor], Tensor]
_CHECKPOINT_NAME = "checkpoint.safetensors"
_METRICS_NAME = "metrics.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Steps of each phase: the rate rises, stays, and falls linearly to ``final_scale``."""

    warmup_steps: int
    stable_steps: int
    decay_steps: int
    final_scale: float = 0.02

    @property
    def decay_start(self) -> int:
        return self.warmup_steps + self.stable_steps

    @property
    def total_steps(self) -> int:
        return self.decay_start + self.decay_steps

    def scale(self, step: int) -> float:
        """What multiplies the learning rate at ``step``."""
        if step < self.decay_start:
            return min(1.0, (step + 1) / max(1, self.warmup_steps))
        left = (self.total_steps - step) / max(1, self.decay_steps)
        return self.final_scale + (1 - self.final_scale) * left


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """One run. A step sees ``num_micro_batches * micro_batch_tokens`` tokens."""

    schedule: Schedule
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    micro_batch_tokens: int = 4096
    num_micro_batches: int = 2
    checkpoint_every: int = 25
    log_every: int = 5
    compile: bool = True


def fast_dtype() -> torch.dtype:
    """bfloat16 where the processor multiplies it faster than float32 (AMX, AVX512-BF16)."""
    capabilities = torch.cpu.get_capabilities()
    has_bf16 = capabilities.get("amx_bf16") or capabilities.get("avx512_bf16")
    return torch.bfloat16 if has_bf16 else torch.float32


def autocast(dtype: torch.dtype) -> torch.autocast:
    """Within, products are in ``dtype``. No cast of a weight is kept for another use: a model's
    would lie beside it until the end."""
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False)


def next_token_loss(model: TrainableLlama, dtype: torch.dtype = torch.float32) -> LossFunction:
    """Mean cross-entropy of the next token, in nats; matrix products are in ``dtype``.

    Weights, residual stream, norms, softmax and gradients of weights stay in float32.
    """

    def loss(ids_BS: Tensor, next_BS: Tensor) -> Tensor:
        with autocast(dtype):
            hidden_TD = model.model(ids_BS).flatten(0, 1)
        return cross_entropy(
            hidden_TD=hidden_TD.to(dtype),
            head_VD=model.model.embed_tokens.weight,
            next_T=next_BS.reshape(-1),
        )

    return loss


def read_schedule(folder: Path, default: Schedule, ranks: TrainingRanks = ALONE) -> Schedule:
    """The schedule in ``schedule.json``, which may be edited while the run goes on."""
    file, schedule = folder / "schedule.json", default
    if ranks.is_first:
        if not file.exists():
            file.write_text(json.dumps(asdict(default)) + "\n", encoding="utf-8")
        schedule = Schedule(**json.loads(file.read_text(encoding="utf-8")))
    *steps, final_scale = ranks.of_first(astuple(schedule))
    warmup, stable, decay = map(int, steps)
    return Schedule(
        warmup_steps=warmup, stable_steps=stable, decay_steps=decay, final_scale=final_scale
    )


def save_checkpoint(
    *,
    folder: Path,
    model: nn.Module,
    optimizer: MuonAdam,
    step: int,
    seconds: float,
    ranks: TrainingRanks = ALONE,
) -> None:
    """Replaces the checkpoint of ``folder``, which says nothing of ranks, one tensor at a time."""
    tensors = _checkpointed(model, optimizer)
    values = (as_array(full_rows(tensor)) for tensor in tensors.values())
    if not ranks.is_first:
        deque(values, maxlen=0)
        return
    described = [
        SafetensorsTensor(name=name, dtype="F32", shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    metadata = {"step": str(step), "seconds": f"{seconds:.3f}"}
    write_tensors(folder / _CHECKPOINT_NAME, described, values, metadata)


def load_checkpoint(
    *,
    folder: Path,
    model: nn.Module,
    optimizer: MuonAdam | None = None,
    ranks: TrainingRanks = ALONE,
) -> tuple[int, float]:
    """Reads this rank's part of the checkpoint: (steps done, seconds spent), or zeros.

    It may be of another number of ranks.
    """
    file = folder / _CHECKPOINT_NAME
    if not file.exists():
        return 0, 0.0
    with safe_open(file, framework="pt") as stored:
        for name, tensor in _checkpointed(model, optimizer).items():
            rows = ranks.rows(len(tensor)) if isinstance(tensor, DTensor) else slice(None)
            own_rows(tensor).copy_(stored.get_slice(name)[rows])
        metadata = stored.metadata()
    return int(metadata["step"]), float(metadata["seconds"])


def _checkpointed(model: nn.Module, optimizer: MuonAdam | None) -> dict[str, Tensor]:
    tensors = {
        f"model/{name}": parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    state = {} if optimizer is None else optimizer.state
    return tensors | {f"optimizer/{name}": tensor for name, tensor in state.items()}


def step_losses(folder: Path) -> list[float]:
    """The loss of each step that was logged, of all runs that a training was gone on with by."""
    lines = (folder / _METRICS_NAME).read_text(encoding="utf-8").splitlines()
    return [float(json.loads(line)["loss"]) for line in lines]


def _trim_metrics(file: Path, step: int) -> None:
    """Drops the lines of steps after the checkpoint, which will be made again, and a line that the
    end of a run cut short."""
    if file.exists():
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= step]
        file.write_text("".join(kept), encoding="utf-8")


def train(
    *,
    model: nn.Module,
    loss_function: LossFunction,
    stable: BatchStream,
    decay: BatchStream,
    config: TrainingConfig,
    folder: Path,
    stop_at_step: int | None = None,
    on_step: Callable[[int, int, str], None] | None = None,
    ranks: TrainingRanks = ALONE,
) -> list[float]:
    """Trains ``model`` in place from the folder's checkpoint on; the losses of the steps made.

    ``folder`` gets ``metrics.jsonl`` and checkpoints. ``stop_at_step`` ends early, as a stop of
    the process would, but with a checkpoint. ``on_step`` is told of each step: its number, how
    many there are, and its loss. ``ranks`` take turns at the micro-batches, which are those of one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = MuonAdam(model, config.optimizer)
    step, seconds = load_checkpoint(folder=folder, model=model, optimizer=optimizer, ranks=ranks)
    save = partial(save_checkpoint, folder=folder, model=model, optimizer=optimizer, ranks=ranks)
    if ranks.is_first:
        _trim_metrics(folder / _METRICS_NAME, step)
    compiled = torch.compile(loss_function, dynamic=False) if config.compile else loss_function
    losses: list[float] = []
    model.train()
    schedule = read_schedule(folder, config.schedule, ranks)
    while step < min(schedule.total_steps, stop_at_step or schedule.total_steps):
        began = time.monotonic()
        decaying = step >= schedule.decay_start
        stream = decay if decaying else stable
        first = (step - schedule.decay_start if decaying else step) * config.num_micro_batches
        loss = _add_gradients(compiled, stream, first, config, ranks)
        scale = schedule.scale(step)
        optimizer.step(number=step, lr_scale=scale)
        step += 1
        losses.append(loss)
        if on_step is not None:
            label = f"step {step} of {schedule.total_steps}, loss {loss:.4f}"
            on_step(step, schedule.total_steps, label)
        took = time.monotonic() - began
        seconds += took
        if step % config.log_every == 0:
            if ranks.is_first:
                windows = config.num_micro_batches * _num_windows(stream, config)
                line = {
                    "step": step,
                    "loss": round(loss, 6),
                    "mean_loss": round(sum(losses[-config.log_every :]) / config.log_every, 4),
                    "lr_scale": round(scale, 4),
                    "seconds": round(seconds, 1),
                    "tokens_per_s": round(windows * stream.length_tokens / took),
                }
                with (folder / _METRICS_NAME).open("a", encoding="utf-8") as handle:
                    handle.write(json.dumps(line) + "\n")
            schedule = read_schedule(folder, config.schedule, ranks)
        if step % config.checkpoint_every == 0:
            save(step=step, seconds=seconds)
    save(step=step, seconds=seconds)
    return losses


def _add_gradients(
    loss_function: LossFunction,
    stream: BatchStream,
    first: int,
    config: TrainingConfig,
    ranks: TrainingRanks,
) -> float:
    """Add those of a step, whose micro-batches begin at ``first`` in the stream and of which this
    rank takes its own; the loss of all."""
    parts: list[float] = []
    for micro in range(ranks.number, config.num_micro_batches, ranks.count):
        windows = stream.batch(number=first + micro, num_windows=_num_windows(stream, config))
        part = loss_function(*windows) / config.num_micro_batches
        torch.autograd.backward(part)
        parts.append(part.item())
    return sum(ranks.in_turn(parts))


def _num_windows(stream: BatchStream, config: TrainingConfig) -> int:
    return config.micro_batch_tokens // stream.length_tokens
