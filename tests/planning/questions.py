"""Questions about models and machines that tests of plans ask."""

from ridgeline.models import PRESETS, describe, lower
from ridgeline.planning import (
    Question,
    catalogue_machine,
)
from ridgeline.roofline import PricedModel
from ridgeline.roofline.catalogue import load_catalogue

CATALOGUE = load_catalogue()


def model(name, **changes):
    spec = describe(dict(PRESETS[name])).spec
    return PricedModel(spec=spec, ops=lower(spec), **changes)


def question(name="llama-3.1-8b", hardware="l4", count=1, **changes):
    values = {"prompt_tokens": 300, "output_tokens": 60, "num_requests": 40} | changes
    return Question(
        model=values.pop("model", None) or model(name),
        machine=catalogue_machine(CATALOGUE, hardware, count),
        **values,
    )
