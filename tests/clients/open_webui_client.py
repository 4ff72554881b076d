"""Open WebUI without a browser: ``open_webui_client.py URL BINARY``; a JSON object per check.

It reaches the server twice, as an OpenAI API and as an Ollama, and is asked through its own API, as
its page does.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time

import httpx

QUESTION = [{"role": "user", "content": "What does str.join do?"}]
START_S = 800  # the first start compiles some thousand modules


def expect(name, holds, shown=""):
    problem = None if holds else f"got {shown!r}"[:300]
    print(json.dumps({"check": name, "problem": problem}))


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def started(url, binary, folder):
    settings = {
        "DATA_DIR": folder,
        "OPENAI_API_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "OLLAMA_BASE_URL": url,
        "WEBUI_AUTH": "False",
        "WEBUI_SECRET_KEY": "of this test",
        "OFFLINE_MODE": "True",
        "RAG_EMBEDDING_ENGINE": "openai",  # its own is downloaded
    }
    port = free_port()
    process = subprocess.Popen(
        [binary, "serve", "--host", "127.0.0.1", "--port", str(port)],
        env=os.environ | settings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    page = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
    for _ in range(START_S):
        try:
            page.get("/health").raise_for_status()
            return process, page
        except httpx.HTTPError:
            assert process.poll() is None, "Open WebUI ended"
            time.sleep(1)
    process.kill()
    raise RuntimeError(f"Open WebUI is not ready after {START_S} s")


def written(page, model, **fields):
    """The text that the page shows of a streamed answer."""
    body = {"model": model, "messages": QUESTION, "stream": True, **fields}
    text = ""
    with page.stream("POST", "/api/chat/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: ")).get("choices") or [{}]
                text += choices[0].get("delta", {}).get("content") or ""
    return text


def check_page(page):
    token = page.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()["token"]
    page.headers["authorization"] = f"Bearer {token}"
    models = {each["id"]: each["owned_by"] for each in page.get("/api/models").json()["data"]}
    both = {"embedded": "openai", "embedded:latest": "ollama"}
    expect("models of both connections", models == both, models)
    version = page.get("/ollama/api/version")
    expect("the version of Ollama", version.is_success, version.text)
    running = page.get("/ollama/api/ps").json()["models"]
    expect("what is in memory", [each["name"] for each in running] == ["embedded:latest"], running)
    for model, api in both.items():
        text = written(page, model, max_tokens=12)
        expect(f"a chat, streamed, over {api}'s API", text, text)
    task = {"model": "embedded", "chat_id": "1", "messages": QUESTION}
    follow_up = page.post("/api/v1/tasks/follow_up/completions", json=task)
    expect("follow-up questions", follow_up.is_success, follow_up.text)
    unknown = page.post("/api/chat/completions", json={"model": "none", "messages": QUESTION})
    expect("an unknown model is refused", unknown.is_client_error, unknown.text)


with tempfile.TemporaryDirectory() as folder:
    process, page = started(*sys.argv[1:], folder)
    try:
        check_page(page)
    finally:
        process.terminate()
        process.wait(60)
