"""Ollama's interface, as its documentation has it."""

import json
import threading

import httpx
import pytest
from tests.server.running import running
from tests.weights.conftest import NAME, hub  # noqa: F401

import ridgeline
from ridgeline.server import downloads
from ridgeline.weights import locate_model
from ridgeline.weights.aliases import read_aliases, write_alias

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the cat"}]}
GREEDY = {"temperature": 0, "num_predict": 6}


@pytest.fixture
def name(served):
    return served.server.model_name


def lines(http, path, body):
    with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def test_a_chat_streams_lines_that_end_with_counts_and_nanoseconds(http, name):
    body = CHAT | {"model": name, "options": GREEDY}
    *pieces, last = lines(http, "/api/chat", body)
    text = "".join(piece["message"]["content"] for piece in pieces)
    assert all(piece["done"] is False and piece["model"] == name for piece in pieces)
    assert (last["done"], last["done_reason"], last["eval_count"]) == (True, "length", 6)
    assert last["prompt_eval_count"] > 0
    durations = last["prompt_eval_duration"] + last["eval_duration"]
    assert 0 < durations <= last["total_duration"] < 60e9
    whole = http.post("/api/chat", json=body | {"stream": False}).json()
    assert whole["message"] == {"role": "assistant", "content": text}
    openai = http.post(
        "/v1/chat/completions",
        json={"messages": CHAT["messages"], "temperature": 0, "max_tokens": 6},
    ).json()
    assert openai["choices"][0]["message"]["content"] == text


def test_generate_asks_with_the_template_and_raw_without(http, name):
    body = {"model": name, "prompt": "the cat", "options": GREEDY, "stream": False}
    chat = http.post("/api/chat", json=CHAT | {"model": name, "options": GREEDY, "stream": False})
    asked = http.post("/api/generate", json=body).json()
    assert asked["response"] == chat.json()["message"]["content"]
    raw = http.post("/api/generate", json=body | {"raw": True}).json()
    plain = http.post(
        "/v1/completions", json={"prompt": "the cat", "temperature": 0, "max_tokens": 6}
    ).json()
    assert raw["response"] == plain["choices"][0]["text"]
    assert (
        "".join(each["response"] for each in lines(http, "/api/generate", body | {"stream": True}))
        == asked["response"]
    )


def test_names_may_have_ollamas_tag(http, name):
    body = CHAT | {"model": f"{name}:latest", "options": GREEDY, "stream": False}
    assert http.post("/api/chat", json=body).json()["model"] == f"{name}:latest"


def test_a_format_holds(http, name):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    body = CHAT | {"model": name, "stream": False}
    body |= {"format": schema, "options": {"num_predict": 60, "temperature": 0}}
    text = http.post("/api/chat", json=body).json()["message"]["content"]
    assert json.loads(text) == {"a": 1}


def test_calls_of_tools_are_objects_and_come_whole(http, name, says):
    says("<tool_call>", '{"name": "f", "argu', 'ments": {"x": 1}}', "</tool_call>")
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = CHAT | {"model": name, "tools": tools}
    found = lines(http, "/api/chat", body)
    calls = [each for line in found for each in line["message"].get("tool_calls", [])]
    assert calls == [{"function": {"index": 0, "name": "f", "arguments": {"x": 1}}}]
    says("<tool_call>", '{"name": "f", "arguments": {"x": 1}}', "</tool_call>")
    whole = http.post("/api/chat", json=body | {"stream": False}).json()
    assert whole["message"]["tool_calls"] == calls
    history = [
        *CHAT["messages"],
        whole["message"],
        {"role": "tool", "content": "2", "tool_name": "f"},
    ]
    says("it is 2")
    answer = http.post("/api/chat", json=body | {"messages": history, "stream": False}).json()
    assert answer["message"]["content"] == "it is 2"


def test_thinking_is_apart(http, name, says):
    says("<think>", "so", "</think>", "yes")
    whole = http.post("/api/chat", json=CHAT | {"model": name, "stream": False}).json()
    assert whole["message"]["thinking"] == "so"
    assert whole["message"]["content"] == "yes"


def test_embeddings_are_those_of_the_other_interface(http, name):
    found = http.post("/api/embed", json={"model": name, "input": ["the cat", "a mat"]}).json()
    openai = http.post("/v1/embeddings", json={"input": ["the cat", "a mat"]}).json()
    for ours, theirs in zip(found["embeddings"], openai["data"], strict=True):
        assert ours == pytest.approx(theirs["embedding"], abs=1e-5)  # steps may be shared or not
    assert found["prompt_eval_count"] == openai["usage"]["prompt_tokens"]
    older = http.post("/api/embeddings", json={"model": name, "prompt": "the cat"}).json()
    assert older["embedding"] == pytest.approx(found["embeddings"][0], abs=1e-5)


def test_what_there_is(http, name):
    (model,) = http.get("/api/tags").json()["models"]
    assert model["name"] == f"{name}:latest"
    assert model["details"]["quantization_level"] == "float32"
    assert model["size"] > 0
    (loaded,) = http.get("/api/ps").json()["models"]
    assert loaded["context_length"] == 2048
    shown = http.post("/api/show", json={"model": name}).json()
    assert shown["model_info"]["llama.context_length"] == 2048
    assert "completion" in shown["capabilities"]
    assert "insert" not in shown["capabilities"]
    told = http.get("/api/version").json()
    assert told == {"version": "0.12.0", "ridgeline": ridgeline.__version__}  # numbers: Open WebUI


def test_loading_and_unloading_are_said_and_change_nothing(http, name):
    loaded = http.post("/api/generate", json={"model": name}).json()
    assert (loaded["done_reason"], loaded["response"]) == ("load", "")
    gone = http.post("/api/chat", json={"model": name, "messages": [], "keep_alive": 0}).json()
    assert gone["done_reason"] == "unload"


@pytest.mark.parametrize(
    ("path", "more", "status", "words"),
    [
        ("chat", {"model": "other"}, 404, "There is no model 'other'"),
        ("chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, 400, "reads text"),
        ("chat", {"options": {"mirostat": 1}}, 400, "options.mirostat: this is not done here"),
        ("chat", {"options": {"num_predict": 0}}, 400, "num_predict"),
        ("chat", {"formt": "json"}, 400, "did you mean 'format'"),
        ("generate", {"prompt": "a", "suffix": "b"}, 400, "cannot fill in the middle"),
        ("generate", {"prompt": "a", "context": [1]}, 400, "context is not kept"),
        ("generate", {"prompt": "a", "template": "x"}, 400, "template: the model's own"),
        ("generate", {"prompt": "x " * 5000}, 400, "context holds"),
        ("generate", {"prompt": "a", "raw": True, "think": True}, 400, "think has no place"),
        ("generate", {"prompt": "a", "think": True}, 400, "does not support thinking"),
        ("chat", {"think": "high"}, 400, "does not support thinking"),
        ("pull", {"model": "/etc"}, 400, "is no name on the hub"),
        ("pull", {"model": "./src"}, 400, "is no name on the hub"),
        ("pull", {"model": "~/model.gguf"}, 400, "is no name on the hub"),
        ("pull", {"model": "a\0b"}, 400, "is no name on the hub"),
    ],
)
def test_mistakes_are_a_sentence_in_ollamas_shape(http, name, path, more, status, words):
    body = {"model": name} | (CHAT if path == "chat" else {}) | {"model": name} | more
    answer = http.post(f"/api/{path}", json=body)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert words in answer.json()["error"]


def test_a_path_without_a_route_has_the_shape_too(http):
    assert "/api/nothing" in http.get("/api/nothing").json()["error"]


def test_pull_of_what_is_served_succeeds_and_delete_is_refused(http, name):
    assert lines(http, "/api/pull", {"model": name})[-1] == {"status": "success"}
    refused = http.request("DELETE", "/api/delete", json={"model": name})
    assert refused.status_code == 409


def test_pull_and_delete_of_others_go_by_the_hub(http, hub):  # noqa: F811
    found = lines(http, "/api/pull", {"model": "owner/name"})
    assert found[0] == {"status": "pulling manifest"}
    assert found[-1] == {"status": "success"}
    assert "model-1.safetensors" in hub.fetched()
    assert http.request("DELETE", "/api/delete", json={"model": "owner/name"}).status_code == 200
    again = http.request("DELETE", "/api/delete", json={"model": "owner/name"})
    assert "was not downloaded" in again.json()["error"]


@pytest.mark.parametrize(
    ("answer", "status", "words"),
    [
        ((404, "RepoNotFound"), 404, "no hub model of that name"),
        ((403, "GatedRepo"), 404, "gated"),
        ((500, ""), 502, "answered 500"),
    ],
)
def test_a_pull_that_fails_says_whose_fault_it_is(http, hub, answer, status, words):  # noqa: F811
    hub.answers["/api/models"] = answer
    found = http.post("/api/pull", json={"model": NAME, "stream": False})
    assert (found.status_code, words in found.json()["error"]) == (status, True), found.text
    *_, last = lines(http, "/api/pull", {"model": NAME})
    assert words in last["error"]


def test_a_full_disk_and_a_pickle_are_told_apart(http, hub, monkeypatch):  # noqa: F811
    full = type("Usage", (), {"free": 0})
    with monkeypatch.context() as patch:
        patch.setattr("ridgeline.weights.hub.shutil.disk_usage", lambda _: full)
        assert http.post("/api/pull", json={"model": NAME, "stream": False}).status_code == 507
    for name in [name for name in hub.files if "safetensors" in name]:
        del hub.files[name]
    found = http.post("/api/pull", json={"model": NAME, "stream": False})
    assert (found.status_code, "pickle" in found.json()["error"]) == (422, True), found.text


def test_a_name_is_never_sought_among_the_servers_files(
    http,
    hub,  # noqa: F811
    model_folder,
    monkeypatch,
):
    monkeypatch.chdir(model_folder.parent)
    found = http.post("/api/pull", json={"model": model_folder.name, "stream": False})
    assert found.status_code == 404, found.text


def test_pulls_of_one_model_are_one_and_only_so_many_are_open(
    served,
    http,
    hub,  # noqa: F811
    monkeypatch,
):
    """In threads of their own: once they were those that batches and files wait for, too."""
    monkeypatch.setattr(downloads, "MAX_OPEN", 1)
    hub.stalls["model-1.safetensors"] = 1000
    body, answers = {"model": NAME, "stream": False}, []
    pulls = [
        threading.Thread(target=lambda: answers.append(http.post("/api/pull", json=body)))
        for _ in range(2)
    ]
    for pull in pulls:
        pull.start()
    assert hub.stalled.wait(20)
    refused = http.post("/api/pull", json={"model": "owner/other", "stream": False})
    assert (refused.status_code, "retry-after" in refused.headers) == (429, True)
    assert [t.name for t in threading.enumerate() if t.name.startswith("ridgeline-download")]
    hub.released.set()
    for pull in pulls:
        pull.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert hub.fetched().count("model-1.safetensors") == 1


def test_a_server_that_ends_ends_its_downloads(roomy_folder, tmp_path, hub):  # noqa: F811
    hub.files["model-1.safetensors"] += b"x" * (1 << 22)
    hub.stalls["model-1.safetensors"] = 1 << 21
    before = set(threading.enumerate())
    with (
        running(roomy_folder, data_dir=tmp_path / "data") as server,
        server.client() as client,
        client.stream("POST", "/api/pull", json={"model": NAME}) as response,
    ):
        next(response.iter_lines())
        assert hub.stalled.wait(20)
    hub.released.set()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith(("ridgeline-download", "asyncio")):
            thread.join(10)
            assert not thread.is_alive()
    assert not [path for path in (tmp_path / "cache").rglob("model-1.safetensors") if path.exists()]


def test_a_draft_model_in_use_is_not_deleted(
    roomy_folder,
    tmp_path,
    hub,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    hub.files.clear()
    for path in roomy_folder.iterdir():
        hub.files[path.name] = path.read_bytes()
    folder = locate_model(NAME)
    write_alias("small", NAME)
    for number, draft in enumerate((NAME, "small", str(folder))):
        engine = {"speculation": "draft", "draft_model": draft}
        with (
            running(roomy_folder, data_dir=tmp_path / str(number), engine=engine) as server,
            server.client() as client,
        ):
            for name in (NAME, "small", f"{NAME}:latest"):
                refused = client.request("DELETE", "/api/delete", json={"model": name})
                assert (refused.status_code, "in use" in refused.json()["error"]) == (409, True)
    assert folder.exists()


def test_an_alias_is_deleted_with_its_model(http, hub, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    lines(http, "/api/pull", {"model": NAME})
    write_alias("mine", NAME)
    assert http.request("DELETE", "/api/delete", json={"model": "mine"}).status_code == 200
    assert read_aliases() == {}


def test_pull_needs_the_admin_where_there_are_keys(roomy_folder, tmp_path):
    with (
        running(roomy_folder, data_dir=tmp_path, api_key=("k",)) as server,
        httpx.Client(base_url=server.url, headers={"authorization": "Bearer k"}) as client,
    ):
        answer = client.post("/api/pull", json={"model": "owner/name"})
        assert answer.status_code == 403
