// How to ask for the same thing from code, at this server.
const SNIPPETS = {
  python: (url, model) => `from openai import OpenAI

client = OpenAI(base_url="${url}/v1", api_key="none")
answer = client.chat.completions.create(
    model=${JSON.stringify(model)},
    messages=[{"role": "user", "content": "Hello"}],
)
print(answer.choices[0].message.content)`,
  curl: (url, model) => `curl ${url}/v1/chat/completions -H "content-type: application/json" \\
  -d '${JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] }).replaceAll("'", "'\\''")}'`,
  anthropic: (url, model) => `from anthropic import Anthropic

client = Anthropic(base_url="${url}", api_key="none")
answer = client.messages.create(
    model=${JSON.stringify(model)},
    max_tokens=256,
    messages=[{"role": "user", "content": "Hello"}],
)
print(answer.content[0].text)`,
  ollama: (url, model) => `from ollama import Client

client = Client(host="${url}")
answer = client.chat(${JSON.stringify(model)}, [{"role": "user", "content": "Hello"}])
print(answer.message.content)`,
};

export function snippet(kind, model) {
  return SNIPPETS[kind](location.origin, model);
}
