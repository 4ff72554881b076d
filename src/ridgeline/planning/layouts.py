"""Layouts of one model over devices, beside each other: what each exchanges, and what it gives.

Formulas on predicted steps, without a simulation. The exchanges are those of our ranks: the lists
of ops that `models.shard` makes for them are priced, so that bytes are what ranks then count.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from ridgeline.core.errors import InvalidRequestError, SettingsError
from ridgeline.core.ops import MoE, SendHidden
from ridgeline.core.parallel_layout import ParallelLayout
from ridgeline.core.plan import ModelRole
from ridgeline.executors.distributed.stages import layer_costs
from ridgeline.models import shard
from ridgeline.planning.machine import Machine
from ridgeline.planning.notes import question_notes
from ridgeline.planning.question import Question
from ridgeline.planning.ranking import largest_within
from ridgeline.planning.replica import is_linked
from ridgeline.roofline import BatchShape, PricedModel, decode_batch, prefill_batch
from ridgeline.roofline.memory import fit
from ridgeline.roofline.pipeline import stage_borders
from ridgeline.roofline.predict import Bound, StepPredictor
from ridgeline.roofline.price import pass_work

_GATHERED = (
    "Exchanges are those of Ridgeline's ranks, which gather, so that any layout gives the same "
    "tokens. Engines that add partial sums up send fewer bytes with -tp: a plan without --layouts "
    "prices those."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Between hosts: bytes that one sends in a second, and seconds of a message."""

    bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Of one step in a pipeline: of all stages and networks between them, of the dearest of these,
    and those of both that go to exchanges."""

    whole_s: float
    dearest_s: float
    exchanged_s: float


@dataclass(frozen=True, kw_only=True)
class SpreadModel:
    """A model as the ranks of one replica hold it. ``crossings``: stages behind which the network
    is; what they send goes over it and not over the link of a host."""

    layout: ParallelLayout
    ranks: Sequence[PricedModel]
    predictors: Sequence[StepPredictor] = field(repr=False)
    crossings: frozenset[int] = frozenset()
    network: Network | None = None

    def sent_bytes(self, batch: BatchShape) -> float:
        """What all ranks together send in a pass."""
        return sum(pass_work(rank, batch).link_bytes for rank in self.ranks)

    def seconds(self, batch: BatchShape) -> StepSeconds:
        """Predicted, of one pass; a stage takes as long as the slowest of its ranks."""
        parts, exchanged_s = list[float](), 0.0
        width = self.layout.stage_ranks
        for first in range(0, len(self.predictors), width):
            ranks = [each.parts(batch) for each in self.predictors[first : first + width]]
            slowest = max(ranks, key=lambda each: sum(each.values()))
            parts.append(sum(slowest.values()))
            exchanged_s += slowest[Bound.COMMUNICATION]
            if first // width in self.crossings:
                parts.append(self._network_s(first, batch))
                exchanged_s += parts[-1]
        return StepSeconds(whole_s=sum(parts), dearest_s=max(parts), exchanged_s=exchanged_s)

    def _network_s(self, first: int, batch: BatchShape) -> float:
        """Of hidden states, which each rank of a stage sends for itself."""
        assert self.network is not None
        model = self.ranks[first]
        sent = batch.num_tokens * model.spec.hidden_size * model.activation_bytes
        return sent * self.layout.stage_ranks / self.network.bytes_per_s + self.network.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPrediction:
    """What a layout of all devices is predicted to give.

    Attributes:
        layout: of one replica, of which there are ``replicas``.
        max_batch: sequences of the asked length that have room, in all replicas.
        ttft_s, alone_tpot_s: of a request that is alone.
        batch: sequences at once, in all replicas, within the TPOT limit.
        tpot_s, output_tok_s: with so many; prompts are included in the second.
        sent_bytes: of all ranks, for each output token of that batch.
        prompt_sent_bytes: for one prompt.
        exchanged_share: of the time of that batch's decode steps.
        prompt_exchanged_share: of the time of a prompt.
        meets_slo: whether a lone request, and one in the batch, keep the limits.
    """

    layout: ParallelLayout
    replicas: int
    max_batch: int
    ttft_s: float = 0.0
    alone_tpot_s: float = 0.0
    batch: int = 0
    tpot_s: float = 0.0
    output_tok_s: float = 0.0
    sent_bytes: float = 0.0
    prompt_sent_bytes: float = 0.0
    exchanged_share: float = 0.0
    prompt_exchanged_share: float = 0.0
    meets_slo: bool = False

    @property
    def fits(self) -> bool:
        return self.max_batch > 0

    @property
    def options(self) -> str:
        """As ``ridgeline serve`` takes them."""
        return layout_options(self.layout, self.replicas)

    def to_json(self) -> dict[str, Any]:
        """Plain values; what does not fit has no figures."""
        layout = self.layout
        head = {
            "options": self.options,
            "tensor_parallel": layout.tensor,
            "pipeline_parallel": layout.pipeline,
            "expert_parallel": layout.expert,
            "context_parallel": layout.context,
            "replicas": self.replicas,
            "max_batch": self.max_batch,
            "fits": self.fits,
        }
        names = (
            "ttft_s", "alone_tpot_s", "batch", "tpot_s", "output_tok_s", "sent_bytes",
            "prompt_sent_bytes", "exchanged_share", "prompt_exchanged_share", "meets_slo",
        )  # fmt: skip
        return head | {name: getattr(self, name) if self.fits else None for name in names}


@dataclass(frozen=True, kw_only=True)
class LayoutComparison:
    """Layouts, most output tokens a second first; ``refused`` are options by why they are not
    possible."""

    predictions: Sequence[LayoutPrediction]
    refused: Mapping[str, Sequence[str]]
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        best, fastest = self.best, self.fastest
        return {
            "layouts": [each.to_json() for each in self.predictions],
            "best": None if best is None else best.options,
            "fastest_alone": None if fastest is None else fastest.options,
            "refused": {why: list(options) for why, options in self.refused.items()},
            "notes": list(self.notes),
        }

    @property
    def best(self) -> LayoutPrediction | None:
        """Of the most output tokens a second, of those that meet the limits, or else of all."""
        return next((each for each in self.predictions if each.fits), None)

    @property
    def fastest(self) -> LayoutPrediction | None:
        """Of the shortest TPOT of a request that is alone."""
        held = [each for each in self.predictions if each.fits]
        return min(held, key=lambda each: each.alone_tpot_s, default=None)


def layout_options(layout: ParallelLayout, replicas: int = 1) -> str:
    """A layout as options of the command line.

    >>> layout_options(ParallelLayout(tensor=2), 4)
    '-tp 2 -dp 4'
    """
    sizes = (layout.tensor, layout.pipeline, layout.expert, layout.context, replicas)
    axes = zip(("-tp", "-pp", "-ep", "-cp", "-dp"), sizes, strict=True)
    return " ".join(f"{name} {size}" for name, size in axes if size > 1) or "-tp 1"


def compare_layouts(question: Question, network: Network | None = None) -> LayoutComparison:
    """Predict all layouts that use all devices of the question's machine.

    Ranks of a stage are in one host; stages may be in several, where the ``network`` is known.

    Raises:
        InvalidRequestError: the load contradicts the model.
    """
    if question.longest > question.model.spec.max_position:
        raise InvalidRequestError(
            f"Prompt and output are {question.longest} tokens together, and the model's context "
            f"is {question.model.spec.max_position}."
        )
    predictions, refused = list[LayoutPrediction](), dict[str, list[str]]()
    for layout in _layouts(question):
        try:
            spread = spread_model(question, layout, network)
        except (SettingsError, InvalidRequestError) as error:
            refused.setdefault(str(error), []).append(layout_options(layout))
            continue
        predictions.append(_predicted(question, spread))
    predictions.sort(key=lambda each: (not each.fits, not each.meets_slo, -each.output_tok_s))
    notes = (*question_notes(question), _GATHERED)
    return LayoutComparison(predictions=predictions, refused=refused, notes=notes)


def _layouts(question: Question) -> Iterator[ParallelLayout]:
    """Of replicas that can be as many as use all devices."""
    count, spec = question.machine.count, question.model.spec
    host = min(count, question.machine.host_devices)
    has_experts = any(isinstance(op, MoE) for op in question.model.ops)
    for width in (n for n in range(1, host + 1) if count % n == 0):
        if width > 1:
            yield ParallelLayout(context=width)
        for stages in range(1, min(count // width, len(spec.layers)) + 1):
            if count % (width * stages) == 0:
                yield ParallelLayout(tensor=width, pipeline=stages)
                for tensor in range(1, width if has_experts else 1):
                    if width % tensor == 0:
                        yield ParallelLayout(tensor=tensor, expert=width, pipeline=stages)


def spread_model(
    question: Question, layout: ParallelLayout, network: Network | None = None
) -> SpreadModel:
    """The parts of the model that each rank of a replica has; stages are cut by price.

    Raises:
        SettingsError: the model cannot be split so.
        InvalidRequestError: the machine's devices are not known to be connected so.
    """
    machine = question.machine
    model = machine.run(question.model)
    crossings = _crossings(layout, machine)
    if crossings and network is None:
        raise InvalidRequestError("Its stages are in several hosts; give --network-gb-per-s.")
    if layout.num_ranks > 1 + len(crossings) and not is_linked(machine):
        raise InvalidRequestError(f"How fast {machine.name} devices exchange data is not known.")
    if layout.pipeline > 1:
        borders = stage_borders(layer_costs(model), layout.pipeline)
        layout = replace(layout, stage_borders=borders)
    ranks = [_part(model, layout, rank) for rank in range(layout.num_ranks)]
    predictors = [
        StepPredictor(
            {ModelRole.TARGET: _without_send(rank) if _stage(layout, n) in crossings else rank},
            machine.calibration,
        )
        for n, rank in enumerate(ranks)
    ]
    return SpreadModel(
        layout=layout, ranks=ranks, predictors=predictors, crossings=crossings, network=network
    )


def _crossings(layout: ParallelLayout, machine: Machine) -> frozenset[int]:
    """Stages behind which the next one is in another host.

    Raises:
        InvalidRequestError: neither do replicas fill hosts nor hosts replicas, so that they would
            not be alike, or a stage would be in two hosts.
    """
    width, num_ranks, host = layout.stage_ranks, layout.num_ranks, machine.host_devices
    if machine.count <= host or host % num_ranks == 0:
        return frozenset()
    if host % width or num_ranks % host:
        raise InvalidRequestError(f"Replicas of {num_ranks} devices do not fill hosts of {host}.")
    stages = range(layout.pipeline - 1)
    return frozenset(s for s in stages if (s + 1) * width % host == 0)


def _stage(layout: ParallelLayout, rank: int) -> int:
    return rank // layout.stage_ranks


def _part(model: PricedModel, layout: ParallelLayout, rank: int) -> PricedModel:
    part = shard(model.spec, layout, rank)
    own = ParallelLayout(context=layout.context)
    return replace(model, spec=part.spec, ops=part.ops, layout=own)


def _without_send(model: PricedModel) -> PricedModel:
    ops = tuple(op for op in model.ops if not isinstance(op, SendHidden))
    return replace(model, ops=ops)


def _predicted(question: Question, spread: SpreadModel) -> LayoutPrediction:
    replicas = question.machine.count // spread.layout.num_ranks
    machine, config, typical = question.machine, question.config, question.typical
    held = [
        fit(
            rank,
            memory_bytes=machine.memory_bytes,
            context=typical.num_tokens,
            block_tokens=config.block_tokens,
            step_tokens=config.max_num_batched_tokens,
            kv_share=machine.kv_share,
        )
        for rank in spread.ranks
    ]
    room = min(each.max_batch for each in held)
    found = LayoutPrediction(layout=spread.layout, replicas=replicas, max_batch=room * replicas)
    if not room:
        return found
    middle = typical.prompt_tokens + typical.output_tokens // 2

    def step(batch: int) -> tuple[StepSeconds, BatchShape, float]:
        """Of one of the plans in flight, and the seconds in which each sequence has a token."""
        plans = min(batch, spread.layout.pipeline)
        shape = decode_batch(ceil(batch / plans), middle)
        taken = spread.seconds(shape)
        return taken, shape, max(plans * taken.dearest_s, taken.whole_s)

    most = min(room, config.max_num_seqs, config.max_num_batched_tokens)
    batch = largest_within(lambda batch: step(batch)[2], question.slo.tpot_s, most)
    last, shape, tpot_s = step(max(1, batch))
    prompt = _Prompt(spread, typical.prompt_tokens, config.max_num_batched_tokens)
    output = typical.output_tokens
    rate = batch * output / (batch * prompt.busy_s + output * tpot_s)
    end_s = prompt.ttft_s + tpot_s * (output - 1)
    met = question.slo.met(ttft_s=prompt.ttft_s, tpot_s=tpot_s, end_to_end_s=end_s)
    return replace(
        found,
        ttft_s=prompt.ttft_s,
        alone_tpot_s=step(1)[2],
        batch=batch * replicas,
        tpot_s=tpot_s,
        output_tok_s=rate * replicas,
        sent_bytes=spread.sent_bytes(shape) / shape.num_tokens,
        prompt_sent_bytes=prompt.sent_bytes,
        exchanged_share=last.exchanged_s / last.whole_s,
        prompt_exchanged_share=prompt.exchanged_share,
        meets_slo=batch > 0 and met,
    )


class _Prompt:
    """A prompt in pieces, which follow each other through the stages."""

    def __init__(self, spread: SpreadModel, num_tokens: int, most: int) -> None:
        self.ttft_s = self.busy_s = self.sent_bytes = 0.0
        whole_s = exchanged_s = 0.0
        for start in range(0, num_tokens, most):
            is_last = start + most >= num_tokens
            piece = prefill_batch(min(most, num_tokens - start), start=start)
            if not is_last:
                piece = replace(piece, logit_rows=0)
            step = spread.seconds(piece)
            self.ttft_s += step.whole_s if is_last else step.dearest_s
            self.busy_s += step.dearest_s
            self.sent_bytes += spread.sent_bytes(piece)
            whole_s += step.whole_s
            exchanged_s += step.exchanged_s
        self.exchanged_share = exchanged_s / whole_s
