"""Continue, the editor's extension: the requests that its providers send for its config.yaml.

Fields and routes are those of `core/llm/llms/OpenAI.ts` and `Ollama.ts` of continuedev/continue.
"""

import json
import shutil

import pytest
from tests.server.running import running
from tokenizers import Tokenizer

MARKS = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
MESSAGES = [
    {"role": "system", "content": "Answer shortly."},
    {"role": "user", "content": "the cat"},
]
OPTIONS = {  # what is not set in config.yaml is left out of the body
    "temperature": 0.01, "num_predict": 6, "num_ctx": 2048, "use_mmap": True, "num_thread": 2,
    "stop": ["/src/", "#- coding: utf-8"],
}  # fmt: skip


@pytest.fixture(scope="module")
def coder(roomy_folder, tmp_path_factory):
    """A server of a model whose tokenizer has tokens for gaps."""
    folder = tmp_path_factory.mktemp("coder") / "tiny"
    shutil.copytree(roomy_folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(MARKS)
    tokenizer.save(str(folder / "tokenizer.json"))
    with (
        running(
            folder, data_dir=tmp_path_factory.mktemp("data"), served_model_name="tiny"
        ) as server,
        server.client() as http,
    ):
        yield http


def streamed(http, path, body):
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_chat_by_the_openai_provider(coder):
    assert coder.get("/v1/models").json()["data"][0]["id"]
    pieces = streamed(
        coder,
        "/v1/chat/completions",
        {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "stream": True, "stop": ["#x"]},
    )
    assert "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)


def test_completion_in_the_editor_by_the_openai_provider_is_a_prompt_with_the_marks(coder):
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "stream": True}
    prompt = f"{MARKS[0]}the cat {MARKS[1]} the mat{MARKS[2]}"
    asked = streamed(coder, "/v1/completions", body | {"prompt": prompt})
    by_suffix = streamed(
        coder, "/v1/completions", body | {"prompt": "the cat ", "suffix": " the mat"}
    )
    texts = ["".join(each["choices"][0]["text"] for each in found) for found in (asked, by_suffix)]
    assert texts[0] == texts[1] != ""


def test_the_ollama_provider_knows_by_the_template_that_a_model_fills_gaps(coder, served):
    """It looks for ``.Suffix``, and reads the parameters line by line."""
    shown = coder.post("/api/show", json={"name": "tiny"}).json()
    marks = f"{MARKS[0]}{{{{ .Prompt }}}}{MARKS[1]}{{{{ .Suffix }}}}{MARKS[2]}"
    assert shown["template"].startswith(marks)
    assert "insert" in shown["capabilities"]
    assert all(len(line.split(None, 1)) == 2 for line in shown["parameters"].splitlines())
    with served.client() as http:
        others = http.post("/api/show", json={"name": served.server.model_name}).json()
    assert ".Suffix" not in others["template"]
    assert "insert" not in others["capabilities"]


def test_completion_in_the_editor_by_the_ollama_provider_sends_the_suffix(coder):
    body = {
        "model": "tiny", "prompt": "the cat ", "suffix": " the mat", "keep_alive": 1800,
        "options": OPTIONS | {"temperature": 0}, "stream": True,
    }  # fmt: skip
    *pieces, last = streamed(coder, "/api/generate", body)
    direct = coder.post(
        "/v1/completions",
        json={"prompt": "the cat ", "suffix": " the mat", "max_tokens": 6, "temperature": 0},
    ).json()
    text = "".join(piece["response"] for piece in pieces) + last["response"]
    assert text == direct["choices"][0]["text"]
    assert last["done"] is True


def test_chat_by_the_ollama_provider(coder):
    body = {"model": "tiny", "messages": MESSAGES, "options": OPTIONS, "keep_alive": 1800}
    *pieces, last = streamed(coder, "/api/chat", body | {"stream": True})
    assert all(piece["message"]["role"] == "assistant" for piece in pieces)
    assert last["eval_count"] == 6
