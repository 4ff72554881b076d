"""Ollama's package: pip install ollama; python ollama_chat.py [URL]."""

import sys

from ollama import Client

client = Client(host=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000")
model = client.list().models[0].model

for part in client.chat(
    model,
    [{"role": "user", "content": "What does str.join do?"}],
    options={"num_predict": 48},
    stream=True,
):
    print(part.message.content, end="", flush=True)
print()
