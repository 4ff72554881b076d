"""Pydantic AI: pip install "pydantic-ai-slim[openai]"; python pydantic_ai_typed.py [URL]."""

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Ticket(BaseModel):
    """What somebody wrote to us."""

    kind: Literal["bug", "question", "wish"]
    urgent: bool


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = OpenAIChatModel("embedded", provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
agent = Agent(model, output_type=NativeOutput(Ticket))
print(agent.run_sync("The page is blank since this morning!").output)
