"""Training a model folder into a new one: healed, distilled, or trained in the grid of its codes.

All weights are in memory, in float32, with two sums of the optimizer for each that is trained.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from torch import Tensor, nn

import ridgeline
from ridgeline.compress.batches import BatchStream, WindowStream
from ridgeline.compress.block_model import BlockModel, Masked, next_token_loss, training_dtype
from ridgeline.compress.calibration import TrainingText
from ridgeline.compress.distill import DistillationConfig, distillation_loss
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.layerwise import check_finite
from ridgeline.compress.optimizer import OptimizerConfig
from ridgeline.compress.output import OutputFolder
from ridgeline.compress.pretrain import Schedule, TrainingConfig, step_losses, train
from ridgeline.compress.qat import FakeQuantized, recipe_of
from ridgeline.compress.quantize import check_source
from ridgeline.compress.tensors import plan_tensors, products
from ridgeline.compress.ternary import Ternary, ternary_codes, ternary_tensors
from ridgeline.compress.training_recipe import TrainingRecipe
from ridgeline.compress.writing import quantized_parts
from ridgeline.core.arrays import Array, cast
from ridgeline.core.errors import SettingsError, UnsupportedModelError
from ridgeline.core.op_facts import Role
from ridgeline.core.weight_uses import weight_roles
from ridgeline.kernels.tensors import as_array, as_tensor
from ridgeline.models import read_config
from ridgeline.quant import QuantizedTensor
from ridgeline.quant.bitnet import BITNET_CONFIG, ternary_parts
from ridgeline.weights import Checkpoint, stored_tensors
from ridgeline.weights.digest import content_digest

_SHARD = "model-00001-of-00001.safetensors"
_WARMUP_SHARE = 20
StepProgress = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What was done: the losses of the first and the last steps, in nats per token."""

    path: Path
    first_loss: float
    last_loss: float
    num_tokens: int
    weights_bytes: int


def distill(
    student: LayeredModel,
    teacher: LayeredModel | None,
    out: Path,
    recipe: TrainingRecipe,
    text: TrainingText,
    *,
    resume: bool = False,
    progress: StepProgress | None = None,
) -> TrainingReport:
    """Train ``student`` on ``text`` to answer as ``teacher``, or without one to predict the text.

    A student that `ridgeline quantize` made of the teacher is trained in its own grid. With
    ``resume``, what an earlier run with the same models, text and recipe did is gone on with from
    its last checkpoint, and the weights are those of one run.

    Raises:
        SettingsError: ``out`` exists, or is from something else; the vocabularies differ.
        UnsupportedModelError: the student is quantized and the teacher not what it was made of.
        CorruptFileError: a weight is not finite.
        DiskError: a file cannot be read or written.
    """
    if teacher is None and recipe.kl_share:
        raise SettingsError("Without a teacher there is no KL: give one, or kl_share 0.")
    sizes = [m.loaded.definition.spec.vocab_size for m in (student, teacher or student)]
    if sizes[0] != sizes[1]:
        raise SettingsError(
            f"Student and teacher have {sizes[0]:,} and {sizes[1]:,} tokens: what they say of the "
            "next one cannot be compared."
        )
    stream = text_stream(text, recipe)
    trained: _FloatStudent | _QuantizedStudent
    if student.stored.quantization is not None:
        if recipe.ternary:
            raise SettingsError("What is made ternary is a model of floats, and not quantized.")
        if recipe.keep_zeros:
            raise SettingsError(
                "A quantized student is trained in its grid, where zeros do not stay: distill the "
                "pruned model with keep_zeros, and quantize it then with keep_zeros."
            )
        trained = _QuantizedStudent(student, teacher)
    else:
        check_source(student)
        made = _TernaryStudent if recipe.ternary else _FloatStudent
        trained = made(student, keep_zeros=recipe.keep_zeros)
    identity = {
        "ridgeline": ridgeline.__version__,
        "training": asdict(recipe),
        "model": content_digest([student.stored.path]),
        "teacher": None if teacher is None else content_digest([teacher.stored.path]),
        "text": text.digest,
    }
    folder = OutputFolder(out, identity, resume=resume)
    if not folder.is_complete:
        model = trained.model
        dtype = min(
            (training_dtype(each.loaded.model.ops) for each in (student, teacher or student)),
            key=lambda found: -found.itemsize,
        )
        if teacher is None:
            loss = next_token_loss(model, dtype)
        else:
            loss = distillation_loss(
                teacher=frozen_model(teacher),
                student=model,
                config=DistillationConfig(kl_share=recipe.kl_share, top_k=recipe.top_k),
                dtype=dtype,
            )
        losses = run_training(model, loss, recipe, stream, folder, progress)
        if not folder.num_done:
            folder.add_shard(_SHARD, trained.tensors(), losses)
        folder.finish(student.stored.path, trained.config(read_config(student.stored.path)))
    (losses,) = folder.notes
    return TrainingReport(
        path=out,
        first_loss=losses["first"],
        last_loss=losses["last"],
        num_tokens=recipe.steps * recipe.step_tokens,
        weights_bytes=folder.weights_bytes,
    )


def run_training(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    recipe: TrainingRecipe,
    stream: BatchStream,
    folder: OutputFolder,
    progress: StepProgress | None,
) -> dict[str, float]:
    """Train in place, from the checkpoint in the folder on; means of the first and last losses."""
    warmup = max(1, recipe.steps // _WARMUP_SHARE)
    config = TrainingConfig(
        schedule=Schedule(
            warmup_steps=warmup, stable_steps=0, decay_steps=recipe.steps - warmup, final_scale=0.02
        ),
        optimizer=OptimizerConfig(other_lr=recipe.learning_rate, muon=False),
        micro_batch_tokens=recipe.micro_batch_tokens,
        num_micro_batches=recipe.step_tokens // recipe.micro_batch_tokens,
        checkpoint_every=recipe.checkpoint_every,
        log_every=1,
        compile=False,
    )
    train(
        model=model,
        loss_function=loss,
        stable=stream,
        decay=stream,
        config=config,
        folder=folder.work_path,
        on_step=progress,
    )
    losses, share = step_losses(folder.work_path), max(1, recipe.steps // 10)
    return {"first": fmean(losses[:share]), "last": fmean(losses[-share:])}


def text_stream(text: TrainingText, recipe: TrainingRecipe) -> WindowStream:
    """Windows of a text in the order of the seed.

    Raises:
        SettingsError: there is not one.
    """
    ids = np.array(text.tokens, dtype=np.int64)
    if len(ids) <= recipe.window_tokens:
        raise SettingsError(f"The text has {len(ids):,} tokens, fewer than a window and one more.")
    return WindowStream(ids=ids, length_tokens=recipe.window_tokens, seed=recipe.seed)


def all_weights(model: LayeredModel) -> dict[str, Tensor]:
    """Every weight, float32.

    Raises:
        CorruptFileError: a value is not finite.
    """
    weights = {
        name: weight
        for run in range(len(model.runs))
        for name, weight in model.weights(run).items()
    }
    for name, weight in weights.items():
        check_finite(name, weight.numpy())
    return weights


def frozen_model(model: LayeredModel) -> BlockModel:
    """A model as it is."""
    return BlockModel(model.loaded.model.ops, all_weights(model), is_trained=lambda _: False)


class _FloatStudent:
    """All weights are trained."""

    def __init__(self, student: LayeredModel, *, keep_zeros: bool) -> None:
        weights = all_weights(student)
        self._student, self._keep_zeros = student, keep_zeros
        self.model = BlockModel(
            student.loaded.model.ops,
            weights,
            is_trained=lambda _: True,
            views=self._views(weights),
        )

    def _views(self, weights: Mapping[str, Tensor]) -> Mapping[str, nn.Module]:
        runs = self._student.runs if self._keep_zeros else ()
        return {name: Masked(weights[name]) for run in runs for name in products(run)}

    def tensors(self) -> dict[str, Array]:
        """Those of the file."""
        stored = self._student.stored
        found = {name: as_array(weight) for name, weight in self.model.weights().items()}
        with Checkpoint(stored.path) as checkpoint:
            tensors = stored_tensors(found, stored.sources, checkpoint)
            unread = set(checkpoint.names()) - tensors.keys()
            return tensors | {name: checkpoint.tensor(name).copy() for name in sorted(unread)}

    def config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        """That of the file."""
        return config


class _TernaryStudent(_FloatStudent):
    """The matrices of the layers are seen as ternary, and written so."""

    def _views(self, weights: Mapping[str, Tensor]) -> Mapping[str, nn.Module]:
        with Checkpoint(self._student.stored.path) as checkpoint:
            self._tensors = ternary_tensors(self._student, checkpoint)
        return {name: Ternary() for name in self._tensors}

    def tensors(self) -> dict[str, Array]:
        weights, found = dict(self.model.stored()), super().tensors()
        for name, tensor in self._tensors.items():
            codes, scale = ternary_codes(weights[name])
            del found[tensor]
            parts = ternary_parts(codes.numpy(), scale.numpy())
            found |= {tensor.removesuffix(".weight") + each: part for each, part in parts.items()}
        return found

    def config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        return {**config, "quantization_config": BITNET_CONFIG}


class _QuantizedStudent:
    """What is quantized is trained in its grid, norms and biases as they are; tables stay."""

    def __init__(self, student: LayeredModel, teacher: LayeredModel | None) -> None:
        self._recipe, made_of = recipe_of(student.stored.path)
        if teacher is None or content_digest([teacher.stored.path]) != made_of:
            raise UnsupportedModelError(
                f"{student.stored.path} is quantized: --teacher must be the model that it was made "
                "of."
            )
        check_source(teacher)
        self._teacher, weights = teacher, all_weights(teacher)
        views: dict[str, FakeQuantized] = {}
        for name, weight in student.stored.items():
            if isinstance(weight, QuantizedTensor):
                views[name] = FakeQuantized(weight, self._recipe)
                weights[name] = as_tensor(weight.dequantize("float32"))
        self._views = views
        roles = weight_roles(teacher.loaded.model.ops)
        fixed = {Role.TABLE, Role.POSITIONS, Role.HEAD}
        self.model = BlockModel(
            teacher.loaded.model.ops,
            weights,
            is_trained=lambda name: not roles[name] & fixed,
            views=views,
        )

    def tensors(self) -> dict[str, Array]:
        """Those of the file."""
        weights: Mapping[str, Tensor] = dict(self.model.stored())
        found: dict[str, Array] = {}
        with Checkpoint(self._teacher.stored.path) as checkpoint:
            plan = plan_tensors(
                self._teacher, checkpoint, lambda _, columns: self._recipe.grid(columns)
            )
            for tensor in plan.tensors:
                values = checkpoint.tensor(tensor.name)
                if tensor.matrices:
                    rounded = [
                        self._views[name].rounded(weights[name], index)
                        for name, index in tensor.matrices
                    ]
                    parts = quantized_parts(self._recipe, rounded, self._recipe.bits)
                    found |= {tensor.module + suffix: part for suffix, part in parts.items()}
                elif tensor.weight is not None:
                    array = as_array(weights[tensor.weight])
                    found[tensor.name] = cast(array.reshape(values.shape), values.dtype.name)
                else:
                    found[tensor.name] = values.copy()
        return found

    def config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        """That of the file."""
        return config
