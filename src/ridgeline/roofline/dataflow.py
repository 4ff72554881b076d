"""Which buffers an op reads and writes: what a kernel that did two ops at once would not move."""

from collections.abc import Mapping

from ridgeline.core.ops import (
    MLP,
    AddInner,
    AddLaurel,
    AddResidual,
    AddShared,
    AddToStreams,
    Attend,
    BidirectionalAttend,
    ConvProject,
    CorrectStreams,
    DeltaProject,
    Down,
    Embed,
    GatedDelta,
    GateHeads,
    GateUp,
    Gather,
    GatherContext,
    GatherLogits,
    GatherRanges,
    GatherSplits,
    GatherTokens,
    GrowQueries,
    Head,
    HeadNorm,
    JoinFeatures,
    JoinStreams,
    KeepFeatures,
    KVWrite,
    LatentAttend,
    LatentProject,
    LayerEmbed,
    LayerInput,
    MoE,
    Norm,
    Op,
    OutProject,
    PredictStreams,
    QKVProject,
    ReadFeatures,
    ReceiveHidden,
    Rope,
    ScaleHidden,
    ScanProject,
    SelectiveScan,
    SendHidden,
    SharedExpert,
    ShortConv,
    SparseGateUp,
    SplitStreams,
    Xielu,
)

Widths = Mapping[str, int]  # elements of a token, by buffer


def buffers_of(op: Op, hidden_size: int) -> tuple[Widths, Widths]:
    """What an op reads, and what it writes; of KV caches and states nothing."""
    hidden = hidden_size
    match op:
        case Embed():
            return {}, {"x": hidden}
        case Norm():
            return {op.src: op.width(hidden)}, {op.dst: op.width(hidden)}
        case QKVProject():
            heads, width = op.num_kv_heads, op.head_dim
            written = {"q": op.num_heads * width, "k": heads * width, "v": heads * width}
            return {op.src: hidden}, written
        case LatentProject():
            return {op.src: hidden}, {"q": op.query.shape[0], "k": op.latent.shape[0]}
        case HeadNorm():
            keys = op.num_kv_heads * op.head_dim
            normed = {"q": op.num_heads * op.head_dim, "k": keys}
            normed |= {"v": keys} if op.values else {}
            return normed, normed
        case Rope():
            both = {"q": op.num_heads * op.head_dim, "k": op.num_kv_heads * op.key_dim}
            return both, both
        case KVWrite():
            return {"k": op.num_kv_heads * op.k_width, "v": op.num_kv_heads * op.v_width}, {}
        case GrowQueries():
            grown = {"q": op.num_heads * op.head_dim}
            return grown, grown
        case Attend():
            width = op.num_heads * op.head_dim
            return {"q": width}, {"h": width}
        case BidirectionalAttend():
            width, heads = op.num_heads * op.head_dim, op.num_kv_heads * op.head_dim
            return {"q": width, "k": heads, "v": heads}, {"h": width}
        case LatentAttend():
            queries = op.num_heads * (op.nope_dim + op.rope_dim)
            return {"q": queries}, {"h": op.num_heads * op.v_dim}
        case ConvProject():
            return {op.src: hidden}, dict.fromkeys(("q", "k", "v"), hidden)
        case DeltaProject():
            heads = op.beta.shape[0]
            mixed = op.query.shape[0] + op.key.shape[0] + op.value.shape[0]
            return {op.src: hidden}, {"q": mixed, "k": op.gate.shape[0], "v": 2 * heads}
        case GatedDelta():
            values = op.num_value_heads * op.value_dim
            read = {"q": op.conv.shape[0], "k": values, "v": 2 * op.num_value_heads}
            return read, {"h": values}
        case ScanProject():
            outputs = zip("qkv", (op.mixed, op.gate, op.step), strict=True)
            return {op.src: hidden}, {name: weight.shape[0] for name, weight in outputs}
        case SelectiveScan():
            values = op.num_heads * op.head_dim
            return {"q": op.conv.shape[0], "k": values, "v": op.num_heads}, {"h": values}
        case GateHeads():
            width = op.weight.shape[0]
            return {op.src: hidden, "h": width}, {"h": width}
        case ShortConv():
            return dict.fromkeys(("q", "k", "v"), hidden), {"h": hidden}
        case OutProject():
            return {"h": op.weight.shape[1]}, {"h": op.weight.shape[0]}
        case MoE():
            return dict.fromkeys((op.src, op.router_src or op.src), hidden), {"h": hidden}
        case MLP():
            return {op.src: hidden}, {"h": hidden}
        case GateUp():
            return {op.src: hidden}, {"inner": op.up.shape[0]}
        case Down():
            source = {op.src: hidden} if op.output_gate else {}
            return {"inner": op.weight.shape[1]} | source, {op.dst: op.weight.shape[0]}
        case Xielu():
            return {"inner": op.width}, {"inner": op.width}
        case SharedExpert():
            return {op.src: hidden}, {"shared": hidden}
        case AddShared():
            return {"h": hidden, "shared": hidden}, {"h": hidden}
        case AddResidual():
            return {"x": hidden, "h": hidden}, {"x": hidden}
        case AddLaurel():
            return dict.fromkeys(("x", "h", "n", "shared"), hidden), {"x": hidden}
        case SplitStreams():
            return {"x": hidden}, {"streams": (1 + len(op.weights)) * hidden}
        case PredictStreams():
            streams = {"streams": op.num_streams * hidden}
            return streams, streams | {"x": hidden}
        case CorrectStreams():
            both = {"streams": op.num_streams * hidden, "x": hidden}
            return both, both
        case AddToStreams():
            others = {"streams": (op.num_streams - 1) * hidden}
            return others | {"h": hidden}, others
        case JoinStreams():
            return {"streams": (1 + len(op.weights)) * hidden}, {"x": hidden}
        case SparseGateUp():
            return {op.src: hidden}, {"inner": op.up.shape[0]}
        case LayerEmbed():
            return {"x": hidden}, {"layers": op.projection.shape[0]}
        case LayerInput():
            return {"x": hidden, "layers": op.width}, {"h": hidden}
        case ScaleHidden():
            return {"x": hidden}, {"x": hidden}
        case Head():
            return {"h": hidden}, {}
        case Gather():
            return {op.buffer: op.own}, {op.buffer: op.borders[-1]}
        case GatherTokens():
            return {"x": hidden}, {"x": hidden}
        case GatherLogits() | GatherContext() | GatherSplits():
            return {}, {}
        case GatherRanges():
            return {"h": hidden}, {"h": hidden}
        case SendHidden():
            return {"x": hidden}, {}
        case ReceiveHidden():
            return {}, {"x": hidden}
        case KeepFeatures():
            return {op.src: op.width}, {}
        case ReadFeatures():
            return {}, {op.dst: op.width, "x": hidden}
        case JoinFeatures():
            return {op.first: hidden, op.second: hidden}, {"inner": 2 * hidden}
        case AddInner():
            return {"h": hidden, "inner": hidden}, {"h": hidden}


def passed_on(first: Op, second: Op, hidden_size: int) -> int:
    """Elements of a token that ``first`` writes and ``second`` reads."""
    written, read = buffers_of(first, hidden_size)[1], buffers_of(second, hidden_size)[0]
    return sum(min(width, read[name]) for name, width in written.items() if name in read)
