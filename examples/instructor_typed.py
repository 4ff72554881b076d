"""Instructor: pip install instructor; python instructor_typed.py [URL]. The answer is an object."""

import sys
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Ticket(BaseModel):
    """What somebody wrote to us."""

    kind: Literal["bug", "question", "wish"]
    urgent: bool


url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = instructor.from_openai(
    OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA
)
ticket = client.chat.completions.create(
    model="embedded",
    response_model=Ticket,
    messages=[{"role": "user", "content": "The page is blank since this morning!"}],
    max_tokens=64,
)
print(ticket)
