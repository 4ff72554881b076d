"""LlamaIndex: pip install llama-index-llms-openai-like; python llama_index_chat.py [URL]."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
model = OpenAILike(
    model="embedded",
    api_base=f"{url}/v1",
    api_key="none",
    is_chat_model=True,
    max_tokens=48,
    context_window=1024,
)
for piece in model.stream_chat([ChatMessage(role="user", content="What does str.join do?")]):
    print(piece.delta, end="", flush=True)
print()
