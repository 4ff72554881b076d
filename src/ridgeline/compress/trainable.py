"""A plain Llama for training: the names and the maths of Hugging Face's ``LlamaForCausalLM``.

Shape letters: B sequences, S positions, D hidden width, H query heads, G key/value heads,
E head width, V vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

QUERY_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama with tied embeddings. Widths are in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int = 1024
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError("num_heads must be a multiple of num_kv_heads")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even: rotary positions turn pairs")

    def hf_config(self, *, bos_token_id: int, eos_token_ids: list[int]) -> dict[str, object]:
        """The content of the ``config.json`` that transformers reads as this model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_scaling": None,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": bos_token_id,
            "eos_token_id": eos_token_ids,
            "torch_dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    """x / rms(x) times a gain (Zhang and Sennrich 2019), over the last axis."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary_table(*, shape: LlamaShape, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [S, E], of the Hugging Face layout (halves rotated; Su 2021)."""
    exponents_F = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    inverse_F = 1.0 / shape.rope_theta**exponents_F
    angles_SF = torch.outer(torch.arange(num_positions, dtype=torch.float32), inverse_F)
    angles_SE = torch.cat((angles_SF, angles_SF), dim=-1)
    return angles_SE.cos(), angles_SE.sin()


def rotate(x_BHSE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Turns each pair (e, e + E/2) by the angle of its position."""
    first, second = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cos_SE + torch.cat((-second, first), dim=-1) * sin_SE


def causal_attention(q_BGRSE: Tensor, k_BGSE: Tensor, v_BGSE: Tensor, mask_SS: Tensor) -> Tensor:
    """Causal attention of R query heads per key/value head: [B, G, R, S, E].

    ``mask_SS`` is 0 where a query may see a key, and -inf elsewhere. Scores are made for blocks of
    queries, up to a block's last key, with a softmax in float32. On a CPU the backward of that is
    several times faster than that of PyTorch's fused attention.
    """
    length, width = q_BGRSE.shape[-2:]
    parts: list[Tensor] = []
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        q_BGQE = q_BGRSE[..., start:stop, :].flatten(2, 3) * width**-0.5
        scores_BGQK = q_BGQE @ k_BGSE[..., :stop, :].transpose(-2, -1)
        scores = scores_BGQK.view(*scores_BGQK.shape[:2], -1, stop - start, stop).float()
        weights = (scores + mask_SS[start:stop, :stop]).softmax(dim=-1)
        out = weights.to(v_BGSE.dtype).flatten(2, 3) @ v_BGSE[..., :stop, :]
        parts.append(out.view(*out.shape[:2], -1, stop - start, width))
    return torch.cat(parts, dim=-2)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor, mask_SS: Tensor) -> Tensor:
        batch, length, _ = x_BSD.shape
        groups, width = self.shape.num_kv_heads, self.shape.head_dim
        # One product for the three: on a CPU a wide product runs faster than three narrow ones.
        weight = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        qkv = functional.linear(x_BSD, weight).view(batch, length, -1, width).transpose(1, 2)
        num_turned = self.shape.num_heads + groups
        turned = rotate(qkv[:, :num_turned], cos_SE, sin_SE).to(qkv.dtype)
        q_BGRSE = turned[:, :-groups].reshape(batch, groups, -1, length, width)
        y_BGRSE = causal_attention(q_BGRSE, turned[:, -groups:], qkv[:, num_turned:], mask_SS)
        y_BSD = y_BGRSE.flatten(1, 2).transpose(1, 2).reshape(batch, length, -1)
        out: Tensor = self.o_proj(y_BSD)
        return out


class FeedForward(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        weight = torch.cat((self.gate_proj.weight, self.up_proj.weight))
        gate, up = functional.linear(x_BSD, weight).chunk(2, dim=-1)
        out: Tensor = self.down_proj(functional.silu(gate) * up)
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each normed first and added to the residual stream."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor, mask_SS: Tensor) -> Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_SE, sin_SE, mask_SS)
        out: Tensor = x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))
        return out


class LlamaBody(nn.Module):
    """Embedding, decoder layers and the last norm."""

    cos_SE: Tensor
    sin_SE: Tensor
    mask_SS: Tensor

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        cos_SE, sin_SE = rotary_table(shape=shape, num_positions=shape.max_positions)
        self.register_buffer("cos_SE", cos_SE, persistent=False)
        self.register_buffer("sin_SE", sin_SE, persistent=False)
        mask_SS = torch.full((shape.max_positions, shape.max_positions), float("-inf")).triu(1)
        self.register_buffer("mask_SS", mask_SS, persistent=False)

    def forward(self, ids_BS: Tensor) -> Tensor:
        x_BSD: Tensor = self.embed_tokens(ids_BS)
        length = ids_BS.shape[1]
        for layer in self.layers:
            x_BSD = layer(x_BSD, self.cos_SE[:length], self.sin_SE[:length], self.mask_SS)
        out: Tensor = self.norm(x_BSD)
        return out


class TrainableLlama(nn.Module):
    """A Llama whose output head is its embedding; ``state_dict`` has Hugging Face's names.

    Projections that write to the residual stream start at zero, so every layer starts as the
    identity; the others start at 1/sqrt(fan in).
    """

    def __init__(self, shape: LlamaShape, *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        self.model = LlamaBody(shape)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif "embed_tokens" in name:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            elif parameter.ndim == 2:
                std = parameter.shape[1] ** -0.5
                nn.init.normal_(parameter, std=std, generator=generator)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Logits [B, S, V] of the token after each position of ``ids_BS``."""
        return functional.linear(self.model(ids_BS), self.model.embed_tokens.weight)

    def num_parameters(self) -> int:
        """Parameters in all; the tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


def export_weights(*, model: TrainableLlama, folder: Path, dtype: torch.dtype) -> None:
    """Writes ``model.safetensors`` as Hugging Face stores a Llama with tied embeddings."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().to(dtype).contiguous() for name, t in model.state_dict().items()}
    file = folder / "model.safetensors"
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # safetensors writes it for the owner alone


def load_exported(folder: Path) -> TrainableLlama:
    """Reads a folder with ``config.json`` and ``model.safetensors`` into a float32 model."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = LlamaShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    model = TrainableLlama(shape)
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict({name: t.float() for name, t in tensors.items()})
    return model
