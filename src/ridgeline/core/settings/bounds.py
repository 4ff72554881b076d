"""What numbers of settings may be."""

from typing import Annotated

from msgspec import Meta

from ridgeline.core.sampling_params import MAX_TOKENS

Count = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
NumBytes = Annotated[int, Meta(ge=1, le=2**62)]
Positive = Annotated[float, Meta(gt=0)]
Seconds = Positive
