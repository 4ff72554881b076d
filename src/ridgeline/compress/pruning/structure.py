"""A smaller model of the same family: fewer layers, KV heads or feed-forward channels.

Shapes: O outputs and I inputs of a matrix, G groups of its inputs, n inputs of a group, T tokens,
D hidden width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ridgeline.compress.block_forward import BlockForward
from ridgeline.compress.layers import LayeredModel
from ridgeline.compress.pruning.recipe import PruneRecipe
from ridgeline.core import ops
from ridgeline.core.errors import SettingsError, UnsupportedModelError
from ridgeline.core.spec import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormScope
from ridgeline.core.weight_uses import op_weights
from ridgeline.evaluation import Document
from ridgeline.models import ModelDefinition, describe
from ridgeline.models.known_keys import INERT

_WIDTH_MULTIPLE = 32  # groups of quantized columns
_DAMPING = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What is left: layers by their old numbers, KV heads and channels of each (``None``: all)."""

    layers: tuple[int, ...]
    kv_heads: int | None = None
    ffn_width: int | None = None

    @classmethod
    def of(cls, spec: ModelSpec, recipe: PruneRecipe, layers: Sequence[int]) -> "Structure":
        """
        Raises:
            SettingsError: nothing would be left.
            UnsupportedModelError: the layers have no such heads or channels, or different ones, or
                norms over all of them.
        """
        heads = width = None
        if (recipe.remove_kv_heads or recipe.remove_ffn) and any(map(_is_normed, spec.layers)):
            raise UnsupportedModelError(
                "The layers of this model have norms over all heads and channels, which are of "
                "other models without some of them; remove whole layers instead."
            )
        if recipe.remove_kv_heads:
            (found,) = _same({_kv_heads(layer) for layer in spec.layers}, "KV heads")
            heads = found - recipe.remove_kv_heads
            if heads < 1:
                raise SettingsError(f"remove_kv_heads must be below {found}, the KV heads here.")
        if recipe.remove_ffn:
            (found,) = _same({_width(layer) for layer in spec.layers}, "feed-forward channels")
            unit = _WIDTH_MULTIPLE if found % _WIDTH_MULTIPLE == 0 else 1
            width = max(1, round(found * (1 - recipe.remove_ffn) / unit)) * unit
        return cls(layers=tuple(layers), kv_heads=heads, ffn_width=width)

    def spec(self, before: ModelSpec) -> ModelSpec:
        """The spec of what is left."""
        return replace(before, layers=tuple(self._layer(before.layers[i]) for i in self.layers))

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        attention, mlp = layer.attention, layer.mlp
        if self.kv_heads is not None:
            assert isinstance(attention, AttentionSpec)
            queries = attention.num_heads // attention.num_kv_heads * self.kv_heads
            attention = replace(attention, num_heads=queries, num_kv_heads=self.kv_heads)
        if self.ffn_width is not None:
            assert isinstance(mlp, MLPSpec)
            mlp = replace(mlp, width=self.ffn_width)
        return replace(layer, attention=attention, mlp=mlp)


def smaller_config(
    config: Mapping[str, object], spec: ModelSpec, structure: Structure
) -> tuple[dict[str, object], ModelDefinition]:
    """The config.json of what is left, and what it is read as.

    Lists with an entry for each layer keep those of layers that are left.

    Raises:
        UnsupportedModelError: the family's config cannot say it.
    """
    wanted, kept = structure.spec(spec), structure.layers
    changed = dict[str, int]()
    if len(kept) < len(spec.layers):
        changed["num_hidden_layers"] = len(kept)
    if structure.kv_heads is not None:
        (attention,) = {layer.attention for layer in wanted.layers[:1]}
        assert isinstance(attention, AttentionSpec)
        changed["num_key_value_heads"] = attention.num_kv_heads
        changed["num_attention_heads"] = attention.num_heads
        changed["head_dim"] = attention.head_dim
    if structure.ffn_width is not None:
        changed["intermediate_size"] = structure.ffn_width
    found = {
        key: [value[i] for i in kept]
        if isinstance(value, list) and len(value) == len(spec.layers) and key not in INERT
        else value
        for key, value in config.items()
    } | changed
    if isinstance(first := config.get("max_window_layers"), int):  # Qwen's: all from it on
        found["max_window_layers"] = sum(layer < first for layer in kept)
    definition = describe(found, strict=False)
    if not changed.keys() <= config.keys() | {"head_dim"} or definition.spec != wanted:
        raise UnsupportedModelError(
            f"A config of {spec.model_type} cannot describe what would be left: its layers differ "
            "by their place, or its sizes have other names."
        )
    return found, definition


@torch.no_grad()
def least_layers(model: LayeredModel, windows: Sequence[Document], number: int) -> list[int]:
    """The layers whose output is most like their input: least 1 − mean cos (x before, x behind).

    Block influence (Men et al. 2024, arXiv 2403.03853). One layer is in memory at a time, with the
    residual streams of all windows.
    """
    weights = model.weights(0)
    streams = [BlockForward(weights, [window]).run(model.runs[0]) for window in windows]
    likeness = []
    for layer, run in enumerate(model.runs[1:-1], start=1):
        weights, total, num_tokens = model.weights(layer), 0.0, 0
        for number_, window in enumerate(windows):
            before_TD = streams[number_]
            behind_TD = BlockForward(weights, [window], x_TD=before_TD.clone()).run(run)
            cosines_T = torch.nn.functional.cosine_similarity(before_TD, behind_TD, dim=-1)
            total, num_tokens = total + float(cosines_T.double().sum()), num_tokens + len(window)
            streams[number_] = behind_TD
        likeness.append(total / num_tokens)
    order = sorted(range(len(likeness)), key=lambda layer: -likeness[layer])
    return order[:number]


def group_errors(w_OI: torch.Tensor, hessian_II: torch.Tensor, num_groups: int) -> torch.Tensor:
    """What taking each group of inputs away does to the outputs, the rest making good, ``[G]``.

    tr W_g ([H⁻¹]_gg)⁻¹ W_gᵀ (Hassibi and Stork 1993; of groups, Kurtic et al. 2022, arXiv
    2203.07259). H is damped here.
    """
    inverse_II = torch.cholesky_inverse(torch.linalg.cholesky(_damped(hessian_II)))
    size = w_OI.shape[1] // num_groups
    blocks = inverse_II.view(num_groups, size, num_groups, size)
    own_Gnn = torch.stack([blocks[g, :, g] for g in range(num_groups)])
    w_GOn = torch.unflatten(w_OI, 1, (num_groups, size)).transpose(0, 1)
    errors: torch.Tensor = w_GOn @ torch.linalg.inv(own_Gnn) * w_GOn
    return errors.sum((1, 2))


def refit(w_OI: torch.Tensor, hessian_II: torch.Tensor, kept_I: torch.Tensor) -> torch.Tensor:
    """The weights of the kept inputs with which the outputs change least: W H_:k (H_kk)⁻¹."""
    damped_II = _damped(hessian_II)
    right_OI = w_OI @ damped_II[:, kept_I]
    factor = torch.linalg.cholesky(damped_II[kept_I][:, kept_I])
    return torch.cholesky_solve(right_OI.T, factor).T.contiguous()


def cut(
    weights: dict[str, torch.Tensor],
    pairs: Sequence[tuple[ops.Op, ops.Op]],
    kept_G: torch.Tensor,
    num_groups: int,
) -> None:
    """Keep the kept groups of each axis that is shorter in the second op of a pair; in place."""
    for old_op, new_op in pairs:
        for old, new in zip(op_weights(old_op), op_weights(new_op), strict=True):
            for axis, size in enumerate(old.shape):
                if size != new.shape[axis]:
                    groups = torch.unflatten(weights[old.name], axis, (num_groups, -1))
                    kept = groups.index_select(axis, kept_G).flatten(axis, axis + 1)
                    weights[old.name] = kept.contiguous()


def renamed(weights: Mapping[str, torch.Tensor], old: int, new: int) -> dict[str, torch.Tensor]:
    """A layer's weights under the names of another layer."""
    before, behind = f"layers.{old}.", f"layers.{new}."
    return {behind + name.removeprefix(before): weight for name, weight in weights.items()}


def _damped(hessian_II: torch.Tensor) -> torch.Tensor:
    mean = float(hessian_II.diagonal().mean()) or 1.0
    return hessian_II + _DAMPING * mean * torch.eye(len(hessian_II))


def _same(found: set[int | None], what: str) -> tuple[int]:
    if len(found) != 1 or None in found:
        raise UnsupportedModelError(f"The layers of this model have no {what}, or different ones.")
    (value,) = found
    assert value is not None
    return (value,)


def _is_normed(layer: LayerSpec) -> bool:
    branches = (getattr(layer.attention, "out_norm", None), getattr(layer.mlp, "inner_norm", None))
    return branches != (None, None)


def _kv_heads(layer: LayerSpec) -> int | None:
    attention = layer.attention
    if not isinstance(attention, AttentionSpec) or attention.qk_norm_scope is NormScope.PROJECTION:
        return None  # a norm over all heads is another one without some
    return attention.num_kv_heads


def _width(layer: LayerSpec) -> int | None:
    return layer.mlp.width if isinstance(layer.mlp, MLPSpec) else None
