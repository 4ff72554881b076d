"""Parameters of experts and latents, and a watch over routers in transformers' models."""

import math

import torch

_ROUTERS = ("topkrouter", "tokenchoicerouter", "moev1gate", "gemma4textrouter", "llama4router")
_PERTURBATIONS = 4
_RELATIVE = 2e-5  # some hundred times the rounding of float32


def random_sparse(
    name: str, shape: torch.Size, generator: torch.Generator, rope_dim: int
) -> torch.Tensor | None:
    """A random parameter of experts or latent attention; ``None`` for those of other parts.

    Router logits have a standard deviation of 2 or more. Latents are so small before their norm
    that its eps, 1e-6, shows.
    """
    values = torch.randn(shape, generator=generator)
    if name.endswith(("e_score_correction_bias", "expert_bias")):
        return values * (0.05 if "statics" in name else 0.2)  # beside scores that add up to 1
    if name.endswith(
        (
            "mlp.gate.weight", "feed_forward.gate.weight", "router.weight", "router.gate.weight",
            "mlp.gate.wg.weight",
        )
    ):  # fmt: skip
        return values * 2.0 / math.sqrt(shape[-1])
    if name.endswith("router.proj.weight"):  # of norms that are divided by √D
        return values * 2.0
    if name.endswith(("router.scale", "per_expert_scale")):
        return 0.6 + torch.rand(shape, generator=generator)
    if "q_a_proj" in name or "kv_a_proj" in name:
        values *= 0.5 if name.endswith("bias") else 1.1 / math.sqrt(shape[-1])
        latent = shape[0] if "q_a_proj" in name else shape[0] - rope_dim
        values[:latent] *= 1e-3
        return values
    if "q_b_proj" in name or "kv_b_proj" in name:
        return values * 1.5 / math.sqrt(shape[-1])
    return None


def _experts(router: torch.nn.Module, output: tuple) -> torch.Tensor:
    """Those chosen for each token, in order; Llama 4's router gives logits alone."""
    chosen = output[2] if len(output) > 2 else output[1].topk(router.top_k).indices
    return chosen.sort(-1).values


class RouterWatch:
    """Checks each call of a model's routers while it is open.

    A near tie between experts could go either way by rounding, and then logits differ for no
    fault. So the choice must stay the same under perturbations far larger than rounding. Most
    experts must be chosen at some time, and none by all tokens.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._chosen: dict[torch.nn.Module, list[torch.Tensor]] = {}
        self._hooks = []
        for module in model.modules():
            if type(module).__name__.lower().endswith(_ROUTERS):
                self._chosen[module] = []
                self._hooks.append(module.register_forward_hook(self._check))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for router, chosen in self._chosen.items():
            experts = torch.cat(chosen)
            count = getattr(router, "num_experts", None) or router.config.num_experts
            counts = torch.bincount(experts.flatten(), minlength=count)
            assert (counts > 0).sum() > count / 2, "few experts are used"
            assert counts.max() < len(experts), "all tokens go to one expert"

    def _check(self, router: torch.nn.Module, args: tuple, output: tuple) -> None:
        hidden, *others = args
        chosen = _experts(router, output)
        generator = torch.Generator().manual_seed(0)
        for _ in range(_PERTURBATIONS):
            noise = torch.randn(hidden.shape, generator=generator)
            again = router.forward(hidden * (1 + _RELATIVE * noise), *others)
            assert torch.equal(_experts(router, again), chosen), "near a tie: choose another seed"
        self._chosen[router].append(chosen)
