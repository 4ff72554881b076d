"""Order, names and groups of the lowered ops."""

from ridgeline.core import ops
from ridgeline.core.cache_groups import kv_groups
from ridgeline.core.weight_uses import op_weights
from ridgeline.models import PRESETS, describe, lower


def lowered(preset, **changes):
    spec = describe(dict(PRESETS[preset]) | {"num_hidden_layers": 2} | changes).spec
    return spec, lower(spec)


def outline(all_ops):
    """Each op by its name; norms with their buffers, ops with one weight with that."""
    result = []
    for op in all_ops:
        name = type(op).__name__
        if isinstance(op, ops.Norm):
            name += f" {op.src}→{op.dst} {op.weight.name}"
        result.append(name)
    return result


def test_llama_layer():
    _, all_ops = lowered("llama-3.2-1b")
    assert outline(all_ops)[:11] == [
        "Embed",
        "Norm x→h layers.0.attention_norm",
        "QKVProject",
        "Rope",
        "KVWrite",
        "Attend",
        "OutProject",
        "AddResidual",
        "Norm x→h layers.0.mlp_norm",
        "MLP",
        "AddResidual",
    ]
    assert outline(all_ops)[-2:] == ["Norm x→h final_norm", "Head"]


def test_gemma_3_layer():
    _, all_ops = lowered("gemma-3-1b")
    assert outline(all_ops)[1:14] == [
        "Norm x→h layers.0.attention_norm",
        "QKVProject",
        "HeadNorm",
        "Rope",
        "KVWrite",
        "Attend",
        "OutProject",
        "Norm h→h layers.0.attention_post_norm",
        "AddResidual",
        "Norm x→h layers.0.mlp_norm",
        "MLP",
        "Norm h→h layers.0.mlp_post_norm",
        "AddResidual",
    ]


def test_weight_names_and_shapes():
    _, all_ops = lowered("llama-3.2-1b", attention_bias=True, mlp_bias=True)
    weights = {weight.name: weight.shape for op in all_ops for weight in op_weights(op)}
    assert {name: shape for name, shape in weights.items() if name.startswith("layers.1.")} == {
        "layers.1.attention_norm": (2048,),
        "layers.1.q": (2048, 2048),
        "layers.1.k": (512, 2048),
        "layers.1.v": (512, 2048),
        "layers.1.q_bias": (2048,),
        "layers.1.k_bias": (512,),
        "layers.1.v_bias": (512,),
        "layers.1.o": (2048, 2048),
        "layers.1.o_bias": (2048,),
        "layers.1.mlp_norm": (2048,),
        "layers.1.gate": (8192, 2048),
        "layers.1.up": (8192, 2048),
        "layers.1.down": (2048, 8192),
        "layers.1.gate_bias": (8192,),
        "layers.1.up_bias": (8192,),
        "layers.1.down_bias": (2048,),
    }
    assert {name for name in weights if "layers" not in name} == {"embed", "final_norm"}


def test_head_is_tied_or_not():
    _, tied = lowered("llama-3.2-1b")
    _, untied = lowered("llama-3.2-1b", tie_word_embeddings=False)
    assert tied[-1].weight == tied[0].weight
    assert untied[-1].weight.name == "head"
    assert untied[-1].weight.shape == untied[0].weight.shape


def test_groups_index_kv_groups():
    spec, all_ops = lowered("gemma-3-1b", num_hidden_layers=8)
    groups = kv_groups(spec)
    assert [group.window for group in groups] == [512, None]
    for op in all_ops:
        if isinstance(op, ops.KVWrite | ops.Attend):
            assert op.layer in groups[op.group].layers
    assert [op.window for op in all_ops if isinstance(op, ops.Attend)][4:7] == [512, None, 512]
