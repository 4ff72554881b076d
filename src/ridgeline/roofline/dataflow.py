"""Which buffers an op reads and writes: what a kernel that did two ops at once would not move."""

from collections.abc import Mapping

from ridgeline.core import ops

Widths = Mapping[str, int]  # elements of a token, by buffer


def buffers_of(op: ops.Op, hidden_size: int) -> tuple[Widths, Widths]:
    """What an op reads, and what it writes; of KV caches and states nothing."""
    hidden = hidden_size
    match op:
        case ops.Embed():
            return {}, {"x": hidden}
        case ops.Norm():
            return {op.src: op.width(hidden)}, {op.dst: op.width(hidden)}
        case ops.QKVProject():
            heads, width = op.num_kv_heads, op.head_dim
            written = {"q": op.num_heads * width, "k": heads * width, "v": heads * width}
            return {op.src: hidden}, written
        case ops.LatentProject():
            return {op.src: hidden}, {"q": op.query.shape[0], "k": op.latent.shape[0]}
        case ops.HeadNorm():
            keys = op.num_kv_heads * op.head_dim
            normed = {"q": op.num_heads * op.head_dim, "k": keys}
            normed |= {"v": keys} if op.values else {}
            return normed, normed
        case ops.Rope():
            both = {"q": op.num_heads * op.head_dim, "k": op.num_kv_heads * op.key_dim}
            return both, both
        case ops.KVWrite():
            return {"k": op.num_kv_heads * op.k_width, "v": op.num_kv_heads * op.v_width}, {}
        case ops.GrowQueries():
            grown = {"q": op.num_heads * op.head_dim}
            return grown, grown
        case ops.Attend():
            width = op.num_heads * op.head_dim
            return {"q": width}, {"h": width}
        case ops.BidirectionalAttend():
            width, heads = op.num_heads * op.head_dim, op.num_kv_heads * op.head_dim
            return {"q": width, "k": heads, "v": heads}, {"h": width}
        case ops.LatentAttend():
            queries = op.num_heads * (op.nope_dim + op.rope_dim)
            return {"q": queries}, {"h": op.num_heads * op.v_dim}
        case ops.ConvProject():
            return {op.src: hidden}, dict.fromkeys(("q", "k", "v"), hidden)
        case ops.DeltaProject():
            heads = op.beta.shape[0]
            mixed = op.query.shape[0] + op.key.shape[0] + op.value.shape[0]
            return {op.src: hidden}, {"q": mixed, "k": op.gate.shape[0], "v": 2 * heads}
        case ops.GatedDelta():
            values = op.num_value_heads * op.value_dim
            read = {"q": op.conv.shape[0], "k": values, "v": 2 * op.num_value_heads}
            return read, {"h": values}
        case ops.ScanProject():
            outputs = zip("qkv", (op.mixed, op.gate, op.step), strict=True)
            return {op.src: hidden}, {name: weight.shape[0] for name, weight in outputs}
        case ops.SelectiveScan():
            values = op.num_heads * op.head_dim
            return {"q": op.conv.shape[0], "k": values, "v": op.num_heads}, {"h": values}
        case ops.GateHeads():
            width = op.weight.shape[0]
            return {op.src: hidden, "h": width}, {"h": width}
        case ops.ShortConv():
            return dict.fromkeys(("q", "k", "v"), hidden), {"h": hidden}
        case ops.OutProject():
            return {"h": op.weight.shape[1]}, {"h": op.weight.shape[0]}
        case ops.MoE():
            return dict.fromkeys((op.src, op.router_src or op.src), hidden), {"h": hidden}
        case ops.MLP():
            return {op.src: hidden}, {"h": hidden}
        case ops.GateUp():
            return {op.src: hidden}, {"inner": op.up.shape[0]}
        case ops.Down():
            source = {op.src: hidden} if op.output_gate else {}
            return {"inner": op.weight.shape[1]} | source, {op.dst: op.weight.shape[0]}
        case ops.Xielu():
            return {"inner": op.width}, {"inner": op.width}
        case ops.SharedExpert():
            return {op.src: hidden}, {"shared": hidden}
        case ops.AddShared():
            return {"h": hidden, "shared": hidden}, {"h": hidden}
        case ops.AddResidual():
            return {"x": hidden, "h": hidden}, {"x": hidden}
        case ops.AddLaurel():
            return dict.fromkeys(("x", "h", "n", "shared"), hidden), {"x": hidden}
        case ops.SplitStreams():
            return {"x": hidden}, {"streams": (1 + len(op.weights)) * hidden}
        case ops.PredictStreams():
            streams = {"streams": op.num_streams * hidden}
            return streams, streams | {"x": hidden}
        case ops.CorrectStreams():
            both = {"streams": op.num_streams * hidden, "x": hidden}
            return both, both
        case ops.AddToStreams():
            others = {"streams": (op.num_streams - 1) * hidden}
            return others | {"h": hidden}, others
        case ops.JoinStreams():
            return {"streams": (1 + len(op.weights)) * hidden}, {"x": hidden}
        case ops.SparseGateUp():
            return {op.src: hidden}, {"inner": op.up.shape[0]}
        case ops.LayerEmbed():
            return {"x": hidden}, {"layers": op.projection.shape[0]}
        case ops.LayerInput():
            return {"x": hidden, "layers": op.width}, {"h": hidden}
        case ops.ScaleHidden():
            return {"x": hidden}, {"x": hidden}
        case ops.Head():
            return {"h": hidden}, {}
        case ops.Gather():
            return {op.buffer: op.own}, {op.buffer: op.borders[-1]}
        case ops.GatherTokens():
            return {"x": hidden}, {"x": hidden}
        case ops.GatherLogits() | ops.GatherContext() | ops.GatherSplits():
            return {}, {}
        case ops.GatherRanges():
            return {"h": hidden}, {"h": hidden}
        case ops.SendHidden():
            return {"x": hidden}, {}
        case ops.ReceiveHidden():
            return {}, {"x": hidden}
        case ops.KeepFeatures():
            return {op.src: op.width}, {}
        case ops.ReadFeatures():
            return {}, {op.dst: op.width, "x": hidden}
        case ops.JoinFeatures():
            return {op.first: hidden, op.second: hidden}, {"inner": 2 * hidden}
        case ops.AddInner():
            return {"h": hidden, "inner": hidden}, {"h": hidden}


def passed_on(first: ops.Op, second: ops.Op, hidden_size: int) -> int:
    """Elements of a token that ``first`` writes and ``second`` reads."""
    written, read = buffers_of(first, hidden_size)[1], buffers_of(second, hidden_size)[0]
    return sum(min(width, read[name]) for name, width in written.items() if name in read)
