"""How a model is spread over the devices of a machine."""

from dataclasses import dataclass, replace

from ridgeline.core.errors import InvalidRequestError
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.spec import AttentionSpec, ModelSpec
from ridgeline.planning.machine import Machine
from ridgeline.planning.question import Question
from ridgeline.roofline import PricedModel
from ridgeline.roofline.memory import MemoryFit, fit

_ROOMY = 64  # sequences that a replica should hold before it is spread over more devices
HOST_DEVICES = 8  # the links of the catalogue go no further


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
    most = min(count, HOST_DEVICES) if is_linked(question.machine) else 1
    return [n for n in range(1, most + 1) if count % n == 0 and splits(spec, n)]


def widest(question: Question) -> int:
    """The most devices that a replica can be spread over."""
    return _widths(question)[-1]


def is_linked(machine: Machine) -> bool:
    """Whether it is known how fast the devices exchange data."""
    return machine.calibration.ceilings.link_bytes_per_s > 0


def splits(spec: ModelSpec, tensor: int) -> bool:
    """Whether so many ranks can share the heads: each has as many, and whole KV heads or one."""
    for layer in spec.layers:
        attention = layer.attention
        if attention.num_heads % tensor:
            return False
        if isinstance(attention, AttentionSpec):  # every rank has the latents of the other kind
            heads = attention.num_kv_heads
            if heads % tensor and tensor % heads:
                return False
    return True


def _replica(question: Question, tensor: int) -> Replica:
    machine = question.machine
    model = machine.run(replace(question.model, layout=ParallelLayout(tensor=tensor)))
    memory = fit(
        model,
        memory_bytes=machine.memory_bytes,
        context=question.typical.num_tokens,
        step_tokens=question.config.max_num_batched_tokens,
        block_tokens=question.config.block_tokens,
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
        raise InvalidRequestError(f"{tensor} tensor-parallel ranks do not divide {count} devices.")
    if tensor > HOST_DEVICES:
        raise InvalidRequestError(
            f"{tensor} tensor-parallel ranks cross hosts of {HOST_DEVICES}, whose network is not "
            "known."
        )
    if tensor > 1 and not is_linked(question.machine):
        raise InvalidRequestError(
            f"How fast {question.machine.name} devices exchange data is not known; use -tp 1."
        )
    if not splits(spec, tensor):
        raise InvalidRequestError(f"The model's heads cannot be split over {tensor} ranks.")
