"""The weights of ops, typed by what is done with them and by how ranks share them."""

from dataclasses import dataclass
from typing import Annotated

from ridgeline.core.op_facts import Role, Split, WeightFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter by its canonical name, e.g. ``layers.3.q``, and its shape."""

    name: str
    shape: tuple[int, ...]


# Weights by what is done with them, and by how ranks share them.
Product = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.ROWS)]
ProductByColumns = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.COLUMNS)]
WholeProduct = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.WHOLE)]
KVProduct = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.KV_HEADS)]
Experts = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.EXPERT_ROWS)]
ExpertsByColumns = Annotated[Weight, WeightFacts(Role.PRODUCT, Split.EXPERT_COLUMNS)]
Bias = Annotated[Weight, WeightFacts(Role.BIAS, Split.ROWS)]
WholeBias = Annotated[Weight, WeightFacts(Role.BIAS, Split.WHOLE)]
KVBias = Annotated[Weight, WeightFacts(Role.BIAS, Split.KV_HEADS)]
ExpertsBias = Annotated[Weight, WeightFacts(Role.BIAS, Split.EXPERT_ROWS)]
Gain = Annotated[Weight, WeightFacts(Role.GAIN, Split.WHOLE)]
Router = Annotated[Weight, WeightFacts(Role.ROUTER, Split.WHOLE)]
OutputGate = Annotated[Weight, WeightFacts(Role.OUTPUT_GATE, Split.COLUMNS)]
WholeOutputGate = Annotated[Weight, WeightFacts(Role.OUTPUT_GATE, Split.WHOLE)]
Expansion = Annotated[Weight, WeightFacts(Role.EXPANSION, Split.ROWS)]
Sinks = Annotated[Weight, WeightFacts(Role.SINKS, Split.ROWS)]
Decay = Annotated[Weight, WeightFacts(Role.DECAY, Split.ROWS)]
Skip = Annotated[Weight, WeightFacts(Role.SKIP, Split.ROWS)]
Convolution = Annotated[Weight, WeightFacts(Role.CONVOLUTION, Split.ROWS)]
Table = Annotated[Weight, WeightFacts(Role.TABLE, Split.ROWS)]
WholeTable = Annotated[Weight, WeightFacts(Role.TABLE, Split.WHOLE)]
Positions = Annotated[Weight, WeightFacts(Role.POSITIONS, Split.WHOLE)]
HeadMatrix = Annotated[Weight, WeightFacts(Role.HEAD, Split.ROWS)]
