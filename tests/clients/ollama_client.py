"""Ollama's own client against a server: ``ollama_client.py URL``; a JSON object per check."""

import json
import sys

import ollama

client = ollama.Client(host=sys.argv[1])
MODEL = "embedded"
OPTIONS = {"temperature": 0, "num_predict": 12}
QUESTION = [{"role": "user", "content": "What does str.join do?"}]


def check(name, problem=None):
    print(json.dumps({"check": name, "problem": problem}))


def expect(name, holds, shown=""):
    check(name, None if holds else f"got {shown!r}"[:300])


tags = [model.model for model in client.list().models]
expect("list", tags == ["embedded:latest"], tags)
running = client.ps().models
expect("ps", running[0].context_length == 1024, running)
shown = client.show(MODEL)
expect("show", shown.modelinfo["llama.context_length"] == 1024, shown)

whole = client.chat(MODEL, QUESTION, options=OPTIONS)
expect("chat", whole.done and 0 < whole.eval_count <= 12 and whole.message.content, whole)
pieces = list(client.chat(MODEL, QUESTION, options=OPTIONS, stream=True))
text = "".join(piece.message.content or "" for piece in pieces)
expect("chat, streamed", text == whole.message.content and len(pieces) > 1, pieces)
tagged = client.chat("embedded:latest", QUESTION, options=OPTIONS)
expect("chat, tagged", tagged.message.content == text, tagged)

generated = client.generate(MODEL, "def add(a, b):", raw=True, options=OPTIONS)
streamed = client.generate(MODEL, "def add(a, b):", raw=True, options=OPTIONS, stream=True)
text = "".join(piece.response for piece in streamed)
expect("generate", generated.response == text and text, generated)

schema = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
}
made = client.chat(MODEL, QUESTION, format=schema, options={"temperature": 0, "num_predict": 64})
expect("format", set(json.loads(made.message.content)) == {"name", "age"}, made)


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return city


answer = client.chat(MODEL, QUESTION, tools=[weather], options=OPTIONS)
expect("tools are taken", answer.done, answer)

vectors = client.embed(MODEL, ["import os", "import sys"]).embeddings
expect("embed", len(vectors) == 2 and len(vectors[0]) == 384, vectors)
expect("pull of what is served", client.pull(MODEL).status == "success")
for name, ask in {
    "an unknown model": lambda: client.chat("none", QUESTION),
    "an image": lambda: client.chat(
        MODEL, [{"role": "user", "content": "see", "images": [b"\x89PNG"]}]
    ),
    "delete of what is served": lambda: client.delete(MODEL),
}.items():
    try:
        ask()
    except ollama.ResponseError as error:
        expect(f"{name} is a sentence", error.error.endswith("."), error.error)
    else:
        check(name, "no error")
