"""Training a model folder into a new one: healed, distilled, or trained in the grid of its codes.

All weights are in the memory of the ranks together, in float32, with two sums of the optimizer for
each that is trained.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from torch import Tensor, nn

import ridgeline
from ridgeline.compress.batches import BatchStream, WindowStream
from ridgeline.compress.block_model import (
    BlockLayer,
    BlockModel,
    Masked,
    next_token_loss,
    training_dtype,
)
from ridgeline.compress.calibration import TrainingText
from ridgeline.compress.distill import DistillationConfig, distillation_loss
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.optimizer import OptimizerConfig
from ridgeline.compress.output import OutputFolder
from ridgeline.compress.pretrain import (
    LossFunction,
    Schedule,
    TrainingConfig,
    step_losses,
    train,
)
from ridgeline.compress.qat import FakeQuantized, recipe_of
from ridgeline.compress.quantize import check_source
from ridgeline.compress.ranks import ALONE, TrainingRanks
from ridgeline.compress.tensors import OUTSIDE, StoredTensor, plan_tensors, products
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
from ridgeline.weights import Checkpoint, only_of, stored_tensors, weight_shapes
from ridgeline.weights.digest import content_digest
from ridgeline.weights.files import CONFIG_NAME

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
    ranks: TrainingRanks = ALONE,
) -> TrainingReport | None:
    """Train ``student`` on ``text`` to answer as ``teacher``, or without one to predict the text.

    A student that `ridgeline quantize` made of the teacher is trained in its own grid. With
    ``resume``, what an earlier run with the same models, text and recipe did is gone on with from
    its last checkpoint, and the weights are those of one run. Of several ``ranks``, all must call,
    and the first has the report.

    Raises:
        SettingsError: ``out`` exists, or is from something else; the vocabularies differ; the ranks
            do not share a step's micro-batches equally.
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
    recipe.check_shares(ranks.count)
    stream = text_stream(text, recipe)
    trained = _trained(student, teacher, recipe, ranks)
    identity = {
        "ridgeline": ridgeline.__version__,
        "training": asdict(recipe),
        "model": content_digest([student.stored.path]),
        "teacher": None if teacher is None else content_digest([teacher.stored.path]),
        "text": text.digest,
    }
    folder = shared_folder(out, identity, ranks, resume=resume)
    if not folder.is_complete:
        model = trained.model
        loss = _loss(model, student, teacher, recipe, ranks)
        run_training(model, loss, recipe, stream, folder, progress, ranks)
        losses = mean_losses(folder, recipe) if ranks.is_first else {}
        count = len(model.layers)
        for number in range(folder.num_done, count):
            with model.layer(number) as layer:
                if ranks.is_first:
                    name = f"model-{number + 1:05}-of-{count:05}.safetensors"
                    folder.add_shard(name, trained.tensors(number, layer, folder.tensors), losses)
        if ranks.is_first:
            config = trained.config(read_config(student.stored.path))
            folder.finish(student.stored.path, config)
    return report(folder, recipe) if ranks.is_first else None


def _trained(
    student: LayeredModel,
    teacher: LayeredModel | None,
    recipe: TrainingRecipe,
    ranks: TrainingRanks,
) -> "_FloatStudent | _QuantizedStudent":
    """The student as its own format, or the recipe, has it trained."""
    if student.stored.quantization is None:
        check_source(student)
        made = _TernaryStudent if recipe.ternary else _FloatStudent
        return made(student, ranks, keep_zeros=recipe.keep_zeros)
    if recipe.ternary:
        raise SettingsError("What is made ternary is a model of floats, and not quantized.")
    if recipe.keep_zeros:
        raise SettingsError(
            "A quantized student is trained in its grid, where zeros do not stay: distill the "
            "pruned model with keep_zeros, and quantize it then with keep_zeros."
        )
    return _QuantizedStudent(student, teacher, ranks)


def _loss(
    model: BlockModel,
    student: LayeredModel,
    teacher: LayeredModel | None,
    recipe: TrainingRecipe,
    ranks: TrainingRanks,
) -> LossFunction:
    dtype = min(
        (training_dtype(each.loaded.model.ops) for each in (student, teacher or student)),
        key=lambda found: -found.itemsize,
    )
    if teacher is None:
        return next_token_loss(model, dtype)
    return distillation_loss(
        teacher=BlockModel(teacher, ranks=ranks),
        student=model,
        config=DistillationConfig(kl_share=recipe.kl_share, top_k=recipe.top_k),
        dtype=dtype,
    )


def shared_folder(
    out: Path,
    identity: Mapping[str, object],
    ranks: TrainingRanks,
    *,
    resume: bool,
    config_name: str = CONFIG_NAME,
) -> OutputFolder:
    """An `OutputFolder`, which the first rank makes or recalls and the others read."""
    for is_turn in (ranks.is_first, not ranks.is_first):
        if is_turn:
            again = resume or not ranks.is_first
            folder = OutputFolder(out, identity, resume=again, config_name=config_name)
        ranks.wait()
    return folder


def run_training(
    model: BlockModel,
    loss: Callable[[Tensor, Tensor], Tensor],
    recipe: TrainingRecipe,
    stream: BatchStream,
    folder: OutputFolder,
    progress: StepProgress | None,
    ranks: TrainingRanks,
) -> None:
    """Train in place, from the checkpoint in the folder on."""
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
        ranks=ranks,
    )


def mean_losses(folder: OutputFolder, recipe: TrainingRecipe) -> dict[str, float]:
    """Means of the first and last losses of a run that has ended."""
    losses, share = step_losses(folder.work_path), max(1, recipe.steps // 10)
    return {"first": fmean(losses[:share]), "last": fmean(losses[-share:])}


def report(folder: OutputFolder, recipe: TrainingRecipe) -> TrainingReport:
    """What a finished folder says."""
    losses = folder.notes[-1]
    return TrainingReport(
        path=folder.path,
        first_loss=losses["first"],
        last_loss=losses["last"],
        num_tokens=recipe.steps * recipe.step_tokens,
        weights_bytes=folder.weights_bytes,
    )


def text_stream(text: TrainingText, recipe: TrainingRecipe) -> WindowStream:
    """Windows of a text in the order of the seed.

    Raises:
        SettingsError: there is not one.
    """
    ids = np.array(text.tokens, dtype=np.int64)
    if len(ids) <= recipe.window_tokens:
        raise SettingsError(f"The text has {len(ids):,} tokens, fewer than a window and one more.")
    return WindowStream(ids=ids, length_tokens=recipe.window_tokens, seed=recipe.seed)


class _FloatStudent:
    """All weights are trained."""

    def __init__(self, student: LayeredModel, ranks: TrainingRanks, *, keep_zeros: bool) -> None:
        self._student = student
        kept = self._viewed(keep_zeros=keep_zeros)
        self.model = BlockModel(
            student,
            is_trained=lambda _: True,
            view=lambda name, _: self._view() if name in kept else None,
            ranks=ranks,
        )

    def _viewed(self, *, keep_zeros: bool) -> Collection[str]:
        """The weights that are seen through a view."""
        return {name for run in self._student.runs if keep_zeros for name in products(run)}

    def _view(self) -> nn.Module:
        return Masked()

    def tensors(self, number: int, layer: BlockLayer, written: Collection[str]) -> dict[str, Array]:
        """Those of the file that are written with a layer."""
        return self._stored(number, layer.copies(), written)

    def _stored(
        self, number: int, weights: Mapping[str, Tensor], written: Collection[str]
    ) -> dict[str, Array]:
        stored = self._student.stored
        found = {name: as_array(weight) for name, weight in weights.items()}
        with Checkpoint(stored.path) as checkpoint:
            tensors = stored_tensors(found, stored.sources, checkpoint)
            tensors = {name: values for name, values in tensors.items() if name not in written}
            if number == len(self._student.runs) - 1:
                unread = set(checkpoint.names()) - tensors.keys() - set(written)
                tensors |= {name: checkpoint.tensor(name).copy() for name in sorted(unread)}
            return tensors

    def config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        """That of the file."""
        return config


class _TernaryStudent(_FloatStudent):
    """The matrices of the layers are seen as ternary, and written so."""

    def _viewed(self, *, keep_zeros: bool) -> Collection[str]:
        with Checkpoint(self._student.stored.path) as checkpoint:
            self._tensors = ternary_tensors(self._student, checkpoint)
        return self._tensors

    def _view(self) -> nn.Module:
        return Ternary()

    def tensors(self, number: int, layer: BlockLayer, written: Collection[str]) -> dict[str, Array]:
        weights = layer.copies(bare=True)
        ternary = {name: weights.pop(name) for name in self._tensors if name in weights}
        written = {*written, *self._tensors.values()}
        found = self._stored(number, weights, written)
        for name, weight in ternary.items():
            codes, scale = ternary_codes(weight)
            parts = ternary_parts(codes.numpy(), scale.numpy())
            module = self._tensors[name].removesuffix(".weight")
            found |= {module + each: part for each, part in parts.items()}
        return found

    def config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        return {**config, "quantization_config": BITNET_CONFIG}


class _QuantizedStudent:
    """What is quantized is trained in its grid, norms and biases as they are; tables stay."""

    def __init__(
        self, student: LayeredModel, teacher: LayeredModel | None, ranks: TrainingRanks
    ) -> None:
        self._recipe, made_of = recipe_of(student.stored.path)
        if teacher is None or content_digest([teacher.stored.path]) != made_of:
            raise UnsupportedModelError(
                f"{student.stored.path} is quantized: --teacher must be the model that it was made "
                "of."
            )
        check_source(teacher)
        self._student, self._teacher = student, teacher
        roles = weight_roles(teacher.loaded.model.ops)
        fixed = {Role.TABLE, Role.POSITIONS, Role.HEAD}
        self._views: dict[str, FakeQuantized] = {}
        self.model = BlockModel(
            teacher,
            is_trained=lambda name: not roles[name] & fixed,
            view=lambda name, _: self._views.get(name),
            weights=self._weights,
            ranks=ranks,
        )

    def _weights(self, number: int) -> dict[str, Tensor]:
        """Of a run; that makes the views of what is quantized."""
        weights, run = self._teacher.weights(number), self._teacher.runs[number]
        for name, weight in only_of(self._student.stored, run).items():
            if isinstance(weight, QuantizedTensor):
                self._views[name] = FakeQuantized(weight, self._recipe)
                weights[name] = as_tensor(weight.dequantize("float32"))
        return weights

    def tensors(self, number: int, layer: BlockLayer, _: Collection[str]) -> dict[str, Array]:
        """Those of the file that are written with a layer."""
        weights = layer.copies(bare=True)
        found: dict[str, Array] = {}
        with Checkpoint(self._teacher.stored.path) as checkpoint:
            plan = plan_tensors(
                self._teacher, checkpoint, lambda _, columns: self._recipe.grid(columns)
            )
            for tensor in plan.tensors:
                if number != self._home(tensor):
                    continue
                if tensor.matrices:
                    rounded = [
                        self._views[name].rounded(weights[name], index)
                        for name, index in tensor.matrices
                    ]
                    parts = quantized_parts(self._recipe, rounded, self._recipe.bits)
                    found |= {tensor.module + suffix: part for suffix, part in parts.items()}
                    continue
                values = checkpoint.tensor(tensor.name).copy()
                if tensor.weight is not None:
                    array = as_array(weights[tensor.weight])
                    values = cast(array.reshape(values.shape), values.dtype.name)
                found[tensor.name] = values
        return found

    def _home(self, tensor: StoredTensor) -> int:
        """The run that a tensor is written with."""
        if tensor.run != OUTSIDE:
            return tensor.run
        runs = self._teacher.runs
        return 0 if tensor.weight in weight_shapes(runs[0]) else len(runs) - 1

    def config(self, config: Mapping[str, object]) -> Mapping[str, object]:
        """That of the file."""
        return config
