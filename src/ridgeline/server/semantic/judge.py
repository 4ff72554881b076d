"""The served model as the judge of whether two answers say the same."""

from collections.abc import Awaitable, Callable

from ridgeline.core.request import GenerateRequest
from ridgeline.core.sampling_params import SamplingParams
from ridgeline.core.structured_outputs import StructuredOutputs
from ridgeline.engine.client import EngineClient
from ridgeline.server.ids import new_id
from ridgeline.server.semantic.answers import UserQuestion

JUDGE_PRIORITY = 1 << 30  # after everything that somebody waits for
_YES_OR_NO = StructuredOutputs.of({"choice": ["yes", "no"]})
_ASKED = (
    "A question was answered twice.\n\nQuestion:\n{question}\n\nFirst answer:\n{first}\n\n"
    "Second answer:\n{second}\n\nWould a reader learn the same from both? Answer yes or no."
)


async def says_the_same(
    engine: EngineClient,
    in_thread: Callable[[Callable[[], str]], Awaitable[str]],
    question: UserQuestion,
    first: str,
    second: str,
) -> bool:
    """Ask the model; no where it has no chat template.

    Raises what `EngineClient.generate` raises.
    """
    template = engine.chat_template
    if template is None:
        return False
    text = _ASKED.format(question=question.text, first=first, second=second)
    prompt = await in_thread(lambda: template.render([{"role": "user", "content": text}]))
    request = GenerateRequest(
        request_id=new_id("judge-"),
        prompt=prompt,
        params=SamplingParams(temperature=0, max_tokens=8, structured_outputs=_YES_OR_NO),
        priority=JUDGE_PRIORITY,
    )
    return "".join([chunk.text async for chunk in engine.generate(request)]) == "yes"
