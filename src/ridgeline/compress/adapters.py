"""Training a LoRA adapter (Hu et al. 2021, arXiv 2106.09685) into a folder in PEFT's layout."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import ridgeline
from ridgeline.compress.batches import BatchStream
from ridgeline.compress.block_model import BlockModel, LowRankView, Sequences
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.pretrain import LossFunction
from ridgeline.compress.quantize import check_source
from ridgeline.compress.ranks import ALONE, TrainingRanks, full_rows
from ridgeline.compress.training import (
    StepProgress,
    TrainingReport,
    mean_losses,
    report,
    run_training,
    shared_folder,
)
from ridgeline.compress.training_recipe import TrainingRecipe
from ridgeline.core.arrays import Array
from ridgeline.core.errors import UnsupportedModelError
from ridgeline.kernels.tensors import as_array
from ridgeline.models import TensorSource
from ridgeline.weights.digest import content_digest
from ridgeline.weights.files import ADAPTER_CONFIG_NAME
from ridgeline.weights.lora import adaptable

_FILE = "adapter_model.safetensors"
_PLAIN = TensorSource(name="")


class AdaptedModel:
    """A model of which only an adapter of rank ``rank`` is trained; A B is scaled by 1.

    Raises:
        UnsupportedModelError: it is quantized, or none of its matrices is a tensor by itself.
    """

    def __init__(
        self, source: LayeredModel, rank: int, seed: int, ranks: TrainingRanks = ALONE
    ) -> None:
        check_source(source)
        self.source, self.rank, self._ranks = source, rank, ranks
        self._modules = _modules(source)
        generator = torch.Generator().manual_seed(seed)

        def view(name: str, weight: Tensor) -> LowRankView | None:
            return LowRankView(weight, rank, 1.0, generator) if name in self._modules else None

        self.adapted = BlockModel(source, view=view, ranks=ranks)

    def base(self, sequences: Sequences) -> Tensor:
        """Logits of the model as it is."""
        logits: Tensor = self.adapted(sequences, bare=True)
        return logits

    def train(
        self,
        out: Path,
        identity: Mapping[str, object],
        loss: LossFunction,
        recipe: TrainingRecipe,
        stream: BatchStream,
        *,
        resume: bool = False,
        progress: StepProgress | None = None,
    ) -> TrainingReport | None:
        """Train the adapter and write it to the new folder ``out``; the first rank has the report.

        ``identity`` names what beside model and recipe decides the bytes. Of a folder that is
        complete already, the adapter is not read back.

        Raises:
            SettingsError: ``out`` exists, or is to be gone on with and is from something else; the
                ranks do not share a step's micro-batches equally.
            DiskError: a file cannot be read or written.
        """
        recipe.check_shares(self._ranks.count)
        whole = {
            "ridgeline": ridgeline.__version__,
            "training": asdict(recipe),
            "rank": self.rank,
            "model": content_digest([self.source.stored.path]),
            **identity,
        }
        folder = shared_folder(
            out, whole, self._ranks, resume=resume, config_name=ADAPTER_CONFIG_NAME
        )
        if not folder.is_complete:
            run_training(self.adapted, loss, recipe, stream, folder, progress, self._ranks)
            tensors = self._tensors()
            if self._ranks.is_first:
                if not folder.num_done:
                    folder.add_shard(_FILE, tensors, mean_losses(folder, recipe))
                folder.commit(self._config())
        return report(folder, recipe) if self._ranks.is_first else None

    def _tensors(self) -> dict[str, Array]:
        found: dict[str, Array] = {}
        for name, parameter in self.adapted.named_parameters():
            if parameter.requires_grad:
                *_, weight, part = name.split(".")
                module = self._modules[weight.replace("/", ".")]
                letter = {"down": "A", "up": "B"}[part]
                found[f"base_model.model.{module}.lora_{letter}.weight"] = as_array(
                    full_rows(parameter)
                )
        return found

    def _config(self) -> dict[str, object]:
        """PEFT's; the scale alpha / r is 1."""
        targets = sorted({module.rpartition(".")[2] for module in self._modules.values()})
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.source.loaded.name,
            "r": self.rank,
            "lora_alpha": self.rank,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "target_modules": targets,
            "inference_mode": True,
        }


def _modules(model: LayeredModel) -> dict[str, str]:
    """The weights that are adapted, and the module of each."""
    found: dict[str, str] = {}
    for users in adaptable(model.loaded.model.ops, model.stored.sources).values():
        ((weight, source), *others) = users
        place = (source.transpose, source.rows, source.of_each, source.every_other)
        plain = (_PLAIN.transpose, _PLAIN.rows, _PLAIN.of_each, _PLAIN.every_other)
        if not others and place == plain and len(weight.shape) == 2:
            found[weight.name] = source.name.removesuffix(".weight")
    if not found:
        raise UnsupportedModelError(
            "No matrix of this model is a tensor by itself: adapters of fused or transposed ones "
            "are served, and not trained."
        )
    return found
