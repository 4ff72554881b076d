"""OpenAI's Agents SDK: pip install openai-agents; python agents_sdk_typed.py [URL]."""

import sys
from typing import Literal

from agents import Agent, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel


class Ticket(BaseModel):
    """What somebody wrote to us."""

    kind: Literal["bug", "question", "wish"]
    urgent: bool


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
set_tracing_disabled(True)  # traces would go to OpenAI
model = OpenAIResponsesModel("embedded", AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))
agent = Agent(name="triage", model=model, output_type=Ticket)
print(Runner.run_sync(agent, "The page is blank since this morning!").final_output)
