"""Anthropic's package: pip install anthropic; python anthropic_messages.py [URL]."""

import sys

from anthropic import Anthropic

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = Anthropic(base_url=url, api_key="none")
model = client.models.list().data[0].id

with client.messages.stream(
    model=model,
    max_tokens=48,
    messages=[{"role": "user", "content": "What does str.join do?"}],
) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()
