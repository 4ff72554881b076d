"""Models in files with a layer that predicts one token more, and transformers' modules of both."""

import json
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file
from tests.parity.oracle import _model, _random
from tests.parity.routers import random_sparse
from transformers.modeling_layers import MtpModel

_OWN = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
_OF_MIMO = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "post_norm": "final_layernorm",
}


@torch.no_grad()
def write_mtp(case, folder):
    """transformers' model of a case, which has no such layer, and its `MtpModel`."""
    count = case.config["num_hidden_layers"]
    kinds = {
        name: [*case.changes[name], case.changes[name][-1]]
        for name in ("mlp_layer_types", "layer_types")
        if name in case.changes
    }
    longer = _model(replace(case, changes=case.changes | {"num_hidden_layers": count + 1} | kinds))
    main = longer.eval()
    config = main.config
    config._experts_implementation = "eager"  # others have no float64
    generator = torch.Generator().manual_seed(len(case.id))
    randomize(main, generator, case)
    main.save_pretrained(folder)
    for name in ("mlp_layer_types", "layer_types"):
        if getattr(config, name, None) is not None:
            setattr(config, f"mtp_{name}", getattr(config, name)[count:])
            setattr(config, name, getattr(config, name)[:count])
    config.num_hidden_layers, config.num_mtp_layers = count, 1
    config.mtp_hidden_states_first = case.family == "mimo"
    block = main.model.layers[count]
    main.model.layers = main.model.layers[:count]
    mtp = MtpModel(main, 1).eval()
    randomize(mtp.layers, generator, case)
    mtp.layers[0].mtp_block.load_state_dict(block.state_dict())
    _add_layer(folder, mtp.layers[0], case, count)
    return main, mtp


def randomize(module, generator, case):
    saved = [each for each in module.named_buffers() if each[0] in module.state_dict()]
    rope_dim = case.config.get("qk_rope_head_dim", 0)
    for name, parameter in [*module.named_parameters(), *saved]:
        if "norm" in name and not name.endswith("weight"):
            continue
        values = random_sparse(name, parameter.shape, generator, rope_dim)
        parameter.copy_(_random(name, parameter, generator, case) if values is None else values)


def _add_layer(folder, layer, case, count):
    """The layer's modules in the file, under the family's names, and its number in the config."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    begin, names = f"model.layers.{count}.", _OWN
    if case.family == "mimo":
        tensors = {
            name.replace(begin, "model.mtp_layers.0."): each for name, each in tensors.items()
        }
        begin, names = "model.mtp_layers.0.", _OF_MIMO
    else:  # published files have copies
        tensors[f"{begin}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{begin}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    for module, name in names.items():
        tensors[f"{begin}{name}.weight"] = getattr(layer, module).weight.clone()
    save_file(tensors, path, {"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    changes = {"num_hidden_layers": count, "num_nextn_predict_layers": 1}
    for name in ("mlp_layer_types", "layer_types"):
        if config.get(name):
            changes[name] = config[name][:count]
    path.write_text(json.dumps(config | changes | {"model_type": case.family}))


@torch.no_grad()
def final_hidden(main, token_ids):
    """The model's hidden states ``[1, T, D]``, normed."""
    return main.model(torch.tensor([token_ids])).last_hidden_state


@torch.no_grad()
def plain_logits(main, mtp, token_ids, drafted=(), hidden=None):
    """Logits ``[T, V]`` after each token but the first, and after each drafted one; ``hidden`` are
    `final_hidden` of these and perhaps more."""
    hidden = final_hidden(main, token_ids) if hidden is None else hidden
    hidden = hidden[:, : len(token_ids) - 1]
    rows = [*token_ids[1:], *drafted]
    for stop in range(len(token_ids) - 1, len(rows) + 1):
        positions, token_ids_T = torch.arange(1, stop + 1)[None], torch.tensor([rows[:stop]])
        own = mtp.forward_layer(0, hidden, positions, None, input_ids=token_ids_T)
        hidden = torch.cat([hidden, own[:, -1:]], dim=1)
    return mtp._project_to_logits(own)[0]
