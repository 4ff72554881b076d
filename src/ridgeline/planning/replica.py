"""How a model is spread over the devices of a machine."""

from dataclasses import dataclass, replace

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.rounding import ceil_div, round_up
from ridgeline.core.spec import AttentionSpec, GatedDeltaSpec, Mamba2Spec, MLASpec, ModelSpec
from ridgeline.models import lower
from ridgeline.planning.machine import Machine
from ridgeline.planning.question import Question
from ridgeline.roofline import PricedModel
from ridgeline.roofline.memory import MemoryFit, fit

_ROOMY = 64  # sequences that a replica should hold before it is spread over more devices


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One copy of the model, spread over some devices of the machine."""

    model: PricedModel
    fit: MemoryFit
    count: int

    @property
    def text(self) -> str:
        """Where it is, as a phrase."""
        tensor = self.model.layout.tensor
        return f"on {tensor} device{'s' if tensor > 1 else ''} a replica"

    @property
    def kv_pool_bytes(self) -> float:
        """Of all its ranks; what some of them hold twice counts once."""
        tensor = self.model.layout.tensor
        holders = min(min(tensor, group.num_kv_heads) for group in self.model.groups)
        return self.fit.kv_pool_bytes * holders


def replica_choices(question: Question) -> list[Replica]:
    """Ways to spread the model that are worth a try, the first of them that of `choose_replica`.

    Where there are SLOs and no number of devices was asked for, the others are all that hold a
    sequence, the narrowest first: wider ones are faster, narrower ones answer more.

    Raises:
        InvalidRequestError: as `choose_replica`.
    """
    first = choose_replica(question)
    if question.tensor is not None or not question.slo.is_set or not first.fit.fits:
        return [first]
    others = (_replica(question, n) for n in _widths(question) if n != first.model.layout.tensor)
    return [first, *(replica for replica in others if replica.fit.fits)]


def choose_replica(question: Question) -> Replica:
    """Spread over the asked number of devices, or over the fewest that hold 64 sequences.

    Raises:
        InvalidRequestError: the load or the layout contradicts the model or the machine.
    """
    _check(question)
    found = None
    for tensor in [question.tensor] if question.tensor else _widths(question):
        found = _replica(question, tensor)
        if found.fit.max_batch >= _ROOMY:
            break
    assert found is not None
    return found


def _widths(question: Question) -> list[int]:
    """Devices that a replica can be spread over, the fewest first; one if they are not linked."""
    count, spec = question.machine.count, question.model.spec
    most = min(count, question.machine.host_devices) if is_linked(question.machine) else 1
    return [n for n in range(1, most + 1) if count % n == 0 and splits(spec, n)]


def widest(question: Question) -> int:
    """The most devices that a replica can be spread over."""
    return _widths(question)[-1]


def is_linked(machine: Machine) -> bool:
    """Whether it is known how fast the devices exchange data."""
    return machine.calibration.ceilings.link_bytes_per_s > 0


def splits(spec: ModelSpec, tensor: int) -> bool:
    """Whether so many ranks can share the heads: each has one at least, and with latents, as many
    as any other."""
    mixers = (mixer for layer in spec.layers for mixer in (layer.attention, layer.scan))
    for attention in mixers:
        if attention is None:
            continue
        if isinstance(attention, AttentionSpec):
            if attention.num_heads < tensor:
                return False
        elif isinstance(attention, MLASpec):
            if attention.num_heads % tensor:  # every rank has the latents
                return False
        elif isinstance(attention, Mamba2Spec):
            if attention.num_heads % tensor:
                return False
        elif isinstance(attention, GatedDeltaSpec):
            if attention.num_key_heads % tensor:
                return False
        elif spec.hidden_size % tensor:  # channels
            return False
    return True


def pad_heads(model: PricedModel, tensor: int) -> PricedModel:
    """The model as ranks hold it that share its heads unevenly: all as many as the fullest.

    12 ranks of 64 heads over 8 KV heads have 6 each, of at most 2 KV heads: as 72 over 24.
    """
    layers = tuple(
        replace(layer, attention=_padded(layer.attention, tensor))
        if isinstance(layer.attention, AttentionSpec)
        else layer
        for layer in model.spec.layers
    )
    if layers == model.spec.layers:
        return model
    spec = replace(model.spec, layers=layers)
    return replace(model, spec=spec, ops=lower(spec))


def _padded(attention: AttentionSpec, tensor: int) -> AttentionSpec:
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    is_even = not heads % tensor and not (kv_heads % tensor and tensor % kv_heads)
    if is_even:
        return attention
    group, each = heads // kv_heads, ceil_div(heads, tensor)
    held = max(
        (min(first + each, heads) - 1) // group - first // group + 1
        for first in range(0, heads, each)
    )
    each = round_up(each, held)  # as many of each KV head
    return replace(attention, num_heads=each * tensor, num_kv_heads=held * tensor)


def _replica(question: Question, tensor: int) -> Replica:
    machine = question.machine
    padded = pad_heads(question.model, tensor)
    model = machine.run(replace(padded, layout=ParallelLayout(tensor=tensor)))
    memory = fit(
        model,
        memory_bytes=machine.memory_bytes,
        context=question.typical.num_tokens,
        block_tokens=question.config.block_tokens,
        step_tokens=question.config.max_num_batched_tokens,
        kv_share=machine.kv_share,
    )
    if memory.max_context < question.longest:
        memory = replace(memory, max_batch=0)
    return Replica(model=model, fit=memory, count=machine.count // tensor)


def _check(question: Question) -> None:
    spec, count, tensor = question.model.spec, question.machine.count, question.tensor
    if question.longest > spec.max_position:
        raise InvalidRequestError(
            f"Prompt and output are {question.longest} tokens together, and the model's context "
            f"is {spec.max_position}."
        )
    question.machine.calibration.ceilings.peak_flops(question.model.activations)
    if tensor is None:
        return
    if tensor < 1 or count % tensor:
        able = ", ".join(str(each) for each in range(1, count + 1) if count % each == 0)
        raise InvalidRequestError(
            f"tensor_parallel {tensor} does not divide {count} devices, which {able} does: give "
            "that, or another --count."
        )
    if tensor > (host := question.machine.host_devices):
        raise InvalidRequestError(
            f"{tensor} tensor-parallel ranks cross hosts of {host}, whose network is not known."
        )
    if tensor > 1 and not is_linked(question.machine):
        raise InvalidRequestError(
            f"How fast {question.machine.name} devices exchange data is not known; use -tp 1."
        )
    if not splits(spec, tensor):
        raise InvalidRequestError(f"The model's heads cannot be split over {tensor} ranks.")
