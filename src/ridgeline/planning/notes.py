"""What must be known to read a plan right, in sentences."""

from collections.abc import Collection, Iterator

from ridgeline.core.formats import FLOAT16
from ridgeline.planning.machine import Machine
from ridgeline.planning.question import Question
from ridgeline.planning.replica import Replica, is_linked, widest
from ridgeline.planning.traffic import Traffic
from ridgeline.roofline import PricedModel
from ridgeline.roofline.calibration import describe
from ridgeline.roofline.catalogue import DeviceKind
from ridgeline.roofline.history import past_errors, past_sentences


def notes_of(question: Question, replica: Replica, traffic: Traffic | None) -> list[str]:
    """Of the machine, the model on it, the replica, and the ``traffic`` if there is any."""
    notes = question_notes(question)
    notes += _uneven(question, replica)
    if traffic is None:
        return [*notes, *_spread(question, replica)]
    return [*notes, *_left_out(traffic)]


def question_notes(question: Question) -> list[str]:
    """Of the machine, and of the model on it."""
    formats = {question.model.main_format.name}
    return [*machine_notes(question.machine, formats), *model_notes(question)]


def machine_notes(machine: Machine, formats: Collection[str]) -> Iterator[str]:
    """What a machine was calibrated with, and how far off predictions of models in these formats
    were; or that a device which is no GPU is priced as one."""
    if machine.measured:
        yield f"Predicted by a model {describe(machine.calibration)}."
        yield from past_sentences(past_errors(machine.calibration.executor, formats))
    if machine.measured or machine.kind is DeviceKind.GPU:
        return
    if machine.kind is DeviceKind.CPU:
        yield (
            f"{machine.name} is a CPU, of which the efficiencies of tuned GPU engines are assumed. "
            "--hardware this measures the machine at hand."
        )
    else:
        yield (
            f"{machine.name} is no GPU, and the efficiencies of tuned GPU engines are assumed of "
            "it. No executor of ours runs there."
        )


def model_notes(question: Question) -> list[str]:
    """Of the formats of the model, and how fast they are on the machine."""
    return [*question.notes, *_slow_format(question.machine, question.model)]


def _slow_format(machine: Machine, model: PricedModel) -> Iterator[str]:
    """That bfloat16 is slow where tensor cores have only float16, and the layers' products are in
    bfloat16."""
    ceilings, form = machine.calibration.ceilings, machine.run(model).main_product_format
    if machine.measured or form.name != "bfloat16" or form.name in ceilings.flops_per_s:
        return
    if not ceilings.has_rate(FLOAT16):
        return
    gain = ceilings.peak_flops(FLOAT16) / ceilings.peak_flops(form)
    if gain > 1:
        yield (
            f"{machine.name} has no bfloat16 in its tensor cores and multiplies it at float32's "
            f"rate: --dtype float16 has {gain:.0f} times as much."
        )


def _uneven(question: Question, replica: Replica) -> Iterator[str]:
    """That some ranks have more heads than others."""
    if replica.model.spec != question.model.spec:
        yield (
            f"The heads do not divide by {replica.model.layout.tensor}, and ranks are priced as "
            "the fullest of them. Ridgeline's own ranks refuse such a split."
        )


def _spread(question: Question, replica: Replica) -> Iterator[str]:
    """Why a replica that does not fit is on no more of the devices."""
    tensor, count = replica.model.layout.tensor, question.machine.count
    if count > 1 and not is_linked(question.machine):
        yield (
            "A replica is on one of the devices alone: how fast they exchange data is not known."
        )
    elif tensor == widest(question) < count:
        yield (
            f"A replica is spread over {tensor} of the {count} devices at the most: its ranks are "
            f"in one host, of up to {question.machine.host_devices}, divide the devices, and have "
            "a head each at least."
        )


def _left_out(traffic: Traffic) -> Iterator[str]:
    """That a load is shorter than it would be but for the time that simulating it takes."""
    simulated, left_out = len(traffic.answers), traffic.num_left_out
    if left_out:
        yield (
            f"{simulated:,} requests of each replica are simulated, not {simulated + left_out:,}, "
            "which would take too long: what is said of the load is rough."
        )
