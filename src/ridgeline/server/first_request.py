"""The first request of an engine, for which the first caller would else have to wait."""

from ridgeline.core.errors import NoTokenError
from ridgeline.core.request import FinishReason, GenerateRequest
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.engine.client import EngineClient

_TOKENS = 4


async def run_first_request(engine: EngineClient) -> None:
    """Fill caches and import what is imported late.

    Raises:
        NoTokenError: the model gives no token.
    """
    ids = (engine.spec.vocab_size // 2,)
    if not engine.spec.has_head:
        await engine.embed(ids, request_id="warm-up")
        return
    params = SamplingParams(max_tokens=_TOKENS, ignore_eos=True)
    async for chunk in engine.generate(
        GenerateRequest(request_id="warm-up", prompt=ids, params=params)
    ):
        if chunk.finish_reason is FinishReason.ERROR:
            raise NoTokenError
