"""LiteLLM: pip install litellm; python litellm_chat.py [URL]."""

import sys

import litellm

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
answer = litellm.completion(
    model="hosted_vllm/embedded",  # the name that the server serves, after the provider
    api_base=f"{url}/v1",
    api_key="none",
    messages=[{"role": "user", "content": "What does str.join do?"}],
    max_tokens=48,
)
print(answer.choices[0].message.content)
