"""What clients of peers send: their words for our fields, unknown fields, several names, paths."""

import base64
import dataclasses
import json
import ssl
import time
from types import SimpleNamespace

import httpx
import pytest
from tests.server.running import running

from ridgeline.core.errors import SettingsError
from ridgeline.server.config import ServerConfig
from ridgeline.server.logs import as_text
from ridgeline.server.routes.plain import _page

CHAT = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 4}


def set_config(served, monkeypatch, **changes):
    config = dataclasses.replace(served.server.config, **changes)
    monkeypatch.setattr(served.server, "config", config)


def test_unknown_fields_are_refused_or_ignored_with_a_warning(served, http, monkeypatch):
    body = CHAT | {"logit_bais": {}, "stream_options": {"x": 1}, "stream": True}
    message = {"role": "user", "content": [{"type": "text", "text": "a", "colour": 1}]}
    body["messages"] = [message, message]
    refused = http.post("/v1/chat/completions", json=body)
    assert refused.status_code == 400
    assert "this field is not known" in refused.json()["error"]["message"]
    set_config(served, monkeypatch, unknown_fields="ignore")
    taken = http.post("/v1/chat/completions", json=body)
    assert taken.status_code == 200, taken.text
    warning = taken.headers["x-ridgeline-warning"]
    assert warning.startswith("ignored fields: ")
    names = set(warning.removeprefix("ignored fields: ").split(", "))
    assert names == {"logit_bais", "stream_options.x", "messages[...].content[...].colour"}
    assert "x-ridgeline-warning" not in http.post("/v1/chat/completions", json=CHAT).headers
    wrong = http.post("/v1/chat/completions", json=CHAT | {"temperature": "hot", "x": 1})
    assert wrong.status_code == 400


def test_query_parameters_are_refused_or_ignored_as_fields_are(served, http, monkeypatch):
    for name in ("limt=3", "limt"):
        refused = http.get(f"/v1/files?{name}")
        assert refused.status_code == 400
        message = refused.json()["error"]["message"]
        assert message == "limt: this query parameter is not known; did you mean 'limit'?"
    assert http.post("/v1/chat/completions?stream=true", json=CHAT).status_code == 400
    set_config(served, monkeypatch, unknown_fields="ignore")
    taken = http.post("/v1/chat/completions?stream=true", json=CHAT | {"x": 1})
    assert taken.status_code == 200
    assert taken.headers["x-ridgeline-warning"] == "ignored fields: stream, x"


def test_query_parameters_of_clients_and_probes_are_taken(http):
    for path in ("/health?probe=1", "/metrics?name=x", "/v1/models?beta=true&limit=1000",
                 "/v1/models?api-version=2026-01-01", "/v1/files?limit=2&order=asc"):  # fmt: skip
        assert http.get(path).status_code == 200, path
    assert http.post("/v1/chat/completions?beta=true", json=CHAT).status_code == 200


def test_models_come_in_pages(http):
    headers = {"anthropic-version": "2023-06-01"}
    first = http.get("/v1/models", params={"limit": 1}, headers=headers).json()
    name = first["last_id"]
    after = http.get("/v1/models", params={"after_id": name}, headers=headers).json()
    assert [len(first["data"]), first["has_more"]] == [1, len(after["data"]) > 0]
    for cursor in ("after_id", "before_id"):
        refused = http.get("/v1/models", params={cursor: "x"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, cursor)
    assert http.get("/v1/models", params={"after_id": name, "before_id": name}).status_code == 400
    before = http.get("/v1/models", params={"before_id": name}, headers=headers).json()
    assert (before["data"], before["has_more"]) == ([], False)


def test_models_before_one_of_them():
    call = SimpleNamespace(query={"before_id": "d", "limit": "2"})
    assert _page(call, ["a", "b", "c", "d", "e"]) == (["b", "c"], True)
    call = SimpleNamespace(query={"before_id": "c", "limit": "2"})
    assert _page(call, ["a", "b", "c", "d", "e"]) == (["a", "b"], False)


def test_a_query_parameter_is_there_once(served, http, monkeypatch):
    refused = http.get("/v1/files?limit=1&order=asc&limit=2")
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "limit")
    assert error["message"] == "limit: this query parameter is there twice."
    assert http.get("/health?a=1&a=2").status_code == 200
    set_config(served, monkeypatch, unknown_fields="ignore")
    assert http.get("/v1/files?limit=1&include[]=a&include[]=b").status_code == 200
    assert http.get("/v1/files?limit=1&limit=2").status_code == 400


def test_a_route_without_fields_takes_none(served, http, monkeypatch):
    for path in ("/v1/batches/x/cancel", "/v1/messages/batches/x/cancel"):
        for body, status in ((b"", 404), (b"{}", 404), (b'{"now": true}', 400), (b"x", 400)):
            assert http.post(path, content=body).status_code == status, (path, body)
    refused = http.request("DELETE", "/v1/files/x", json={"after": 3})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
    set_config(served, monkeypatch, unknown_fields="ignore")
    taken = http.post("/v1/batches/x/cancel", json={"now": True})
    assert (taken.status_code, taken.headers["x-ridgeline-warning"]) == (404, "ignored fields: now")


def test_a_list_of_files_has_the_purposes_that_there_are(http):
    for purpose in ("batch", "user_data", "batch_output", ""):
        assert http.get("/v1/files", params={"purpose": purpose}).status_code == 200
    refused = http.get("/v1/files?purpose=btach").json()["error"]
    assert (refused["param"], "batch_output" in refused["message"]) == ("purpose", True)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_fields_that_are_settings_of_the_server_say_so(http, path):
    message = http.post(path, json={"max_model_len": 4}).json()["error"]["message"]
    assert message.endswith("it is a setting of the server, by --max-model-len.")


def test_a_header_of_ignored_names_is_one_header(served, http, monkeypatch):
    set_config(served, monkeypatch, unknown_fields="ignore")
    answer = http.post("/v1/chat/completions", json=CHAT | {"a\r\nset-cookie: b": 1})
    assert answer.status_code == 200
    assert "set-cookie" not in answer.headers
    many = http.post("/v1/chat/completions", json=CHAT | {f"x{'y' * 99}{n}": 1 for n in range(40)})
    assert many.headers["x-ridgeline-warning"].endswith("yyy, and 8 more")
    assert len(many.headers["x-ridgeline-warning"]) < 3000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_words_of_peers(http, path):
    body = CHAT if "chat" in path else {"prompt": "the cat", "max_tokens": 4}
    body = body | {"temperature": 0, "seed": 1}
    ours = http.post(path, json=body | {"repetition_penalty": 1.8}).json()
    more = {"repeat_penalty": 1.8, "n_predict": 4, "cache_prompt": True, "id_slot": -1, "ttl": 60}
    theirs = http.post(path, json=body | more).json()
    assert theirs["choices"] == ours["choices"]
    differ = http.post(path, json=body | {"n_predict": 3})
    assert "max_tokens and n_predict differ" in differ.json()["error"]["message"]


def test_a_schema_may_stand_in_the_format_itself(http):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    for kind in ("json_object", "json_schema"):
        body = CHAT | {"max_tokens": 60, "response_format": {"type": kind, "schema": schema}}
        text = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
        assert json.loads(text["content"]) == {"a": 1}
    wrapped = {"name": "x", "schema": schema}
    both = {"type": "json_schema", "schema": schema, "json_schema": wrapped}
    assert http.post("/v1/chat/completions", json=CHAT | {"response_format": both}).is_error


def test_a_model_may_have_several_names(served, http, monkeypatch):
    set_config(served, monkeypatch, served_model_name=("first", "gpt-4o"))
    assert [each["id"] for each in http.get("/v1/models").json()["data"]] == ["first", "gpt-4o"]
    answer = http.post("/v1/chat/completions", json=CHAT | {"model": "gpt-4o"}).json()
    assert answer["model"] == "gpt-4o"
    assert http.post("/v1/chat/completions", json=CHAT).json()["model"] == "first"
    assert http.post("/v1/chat/completions", json=CHAT | {"model": "x"}).status_code == 404


def test_anthropics_clients_get_their_list_of_models(served, http):
    headers = {"anthropic-version": "2023-06-01"}
    found = http.get("/v1/models", headers=headers).json()
    (model,) = found["data"]
    assert (model["type"], found["has_more"]) == ("model", False)
    assert found["first_id"] == found["last_id"] == model["id"] == served.server.model_name
    assert http.get(f"/v1/models/{model['id']}", headers=headers).json() == model


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions"),
        ("/api/v1/chat/completions", "did you mean /v1/chat/completions"),
        ("/v1/metrics", "did you mean /metrics"),
        ("/v1/chat/completion", "did you mean '/v1/chat/completions'"),
        ("/api/create", "There is no route /api/create: there are no Modelfiles"),
        ("/api/copy", "--served-model-name gives the served model other names"),
        ("/api/push", "never uploaded."),
        (
            "/api/blobs/sha256:12",
            "There is no route /api/blobs/sha256:12: models come by /api/pull",
        ),
        ("/v1/images/generations", "no route /v1/images/generations: the models here read"),
        ("/pages/conversations.js", "There is no route /pages/conversations.js."),
        ("/nothing/like/it", "There is no route /nothing/like/it."),
    ],
)
def test_a_path_that_is_none_is_named_with_the_one_that_was_meant(http, path, words):
    answer = http.post(path, json={})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert words in (error if isinstance(error, str) else error["message"])


def test_a_line_of_the_log_for_people():
    entry = {
        "time": time.time(), "method": "POST", "route": "/v1/completions", "status": 200,
        "seconds": 1.25, "ttft_s": 0.0421, "tenant": "ann", "prompt_tokens": 1200,
        "cached_tokens": 1024, "output_tokens": 34, "outcome": "ok",
    }  # fmt: skip
    line = as_text(entry)
    assert line.endswith(
        "POST /v1/completions 200 1.250 s · TTFT 42 ms · 1,200 (1,024 cached) + 34 tokens · ann"
    )
    lost = entry | {"route": "other", "path": "/a\n\x1b[2J", "status": 404, "outcome": "error 404"}
    assert "\\n\\u001b[2J 404" in as_text(lost)
    assert as_text(entry | {"outcome": "disconnected"}).endswith("disconnected")


def test_https_by_files(roomy_folder, tmp_path):
    certificate(tmp_path)
    files = {"ssl_keyfile": str(tmp_path / "key.pem"), "ssl_certfile": str(tmp_path / "cert.pem")}
    with running(roomy_folder, data_dir=tmp_path / "data", **files) as server:
        url = server.url.replace("http://", "https://")
        trusted = ssl.create_default_context(cafile=tmp_path / "cert.pem")
        with httpx.Client(base_url=url, verify=trusted) as client:
            answer = client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 200
            with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as s:
                assert list(s.iter_lines())[-2] == "data: [DONE]"


def test_files_of_https_that_cannot_be_used_are_a_sentence(tmp_path):
    from ridgeline.server.serving import check_certificate

    with pytest.raises(SettingsError, match="no effect without ssl_certfile"):
        ServerConfig(ssl_keyfile="k")
    certificate(tmp_path)
    (tmp_path / "bad.pem").write_text("no key")
    for key in ("bad.pem", "none.pem"):
        config = ServerConfig(
            ssl_keyfile=str(tmp_path / key), ssl_certfile=str(tmp_path / "cert.pem")
        )
        with pytest.raises(SettingsError, match="cannot be used for HTTPS"):
            check_certificate(config)


def certificate(folder):
    """A key and a certificate of 127.0.0.1, signed by itself."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def test_anthropics_tool_runner_is_told_that_no_conversation_is_held(http):
    body = CHAT | {"thread": {"type": "create"}}
    refused = http.post("/v1/messages", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }
    assert "details" not in http.post("/v1/messages", json={"messages": []}).json()["error"]


def base64_of(text):
    return base64.b64encode(text.encode()).decode()


def test_files_of_text_are_read(http):
    file = {"filename": "a.txt", "file_data": f"data:text/plain;base64,{base64_of('the mat')}"}
    plain = {"role": "user", "content": "a.txt\nthe mat"}
    asked = [
        http.post("/v1/chat/completions", json=CHAT | {"messages": [message]}).json()["usage"]
        for message in (plain, plain | {"content": [{"type": "file", "file": file}]})
    ]
    assert asked[0]["prompt_tokens"] == asked[1]["prompt_tokens"]
    counts = [
        http.post("/v1/responses/input_tokens", json={"input": [message]}).json()
        for message in (plain, plain | {"content": [{"type": "input_file", **file}]})
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ({"file_id": "file-1"}, "this model reads files of text, as file_data: data:text/plain;"),
        ({"file_data": "data:application/pdf;base64,AAAA"}, "this model reads files of text"),
        ({"file_data": "data:text/plain;base64,/w=="}, "the file is not UTF-8 text in base64."),
        ({"file_data": "data:text/plain;base64,a"}, "the file is not UTF-8 text in base64."),
    ],
)
def test_other_files_are_refused(http, file, said):
    part = {"type": "file", "file": file}
    asked = CHAT | {"messages": [{"role": "user", "content": [part]}]}
    for path, body in (
        ("/v1/chat/completions", asked),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_file", **file}]}]},
        ),
    ):
        refused = http.post(path, json=body)
        assert refused.status_code == 400
        assert said in refused.json()["error"]["message"]


def test_documents_of_text_are_read(http):
    source = {"type": "text", "media_type": "text/plain", "data": "the mat"}
    document = {"type": "document", "source": source, "title": "the cat", "context": "the hat"}
    count = [
        http.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": c}]})
        for c in ([document], "the cat\nthe hat\nthe mat")
    ]
    assert count[0].json() == count[1].json()
    document["source"] = {
        "type": "base64",
        "media_type": "text/plain",
        "data": base64_of("the mat"),
    }
    body = {"messages": [{"role": "user", "content": [document]}]}
    assert http.post("/v1/messages/count_tokens", json=body).json() == count[1].json()
    document["source"] = {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}
    assert http.post("/v1/messages/count_tokens", json=body).status_code == 400
    document["source"] = {"type": "url", "url": "https://example.com/a.pdf"}
    body = CHAT | {"messages": [{"role": "user", "content": [document]}]}
    error = http.post("/v1/messages", json=body).json()["error"]
    assert error["message"] == "messages[0]: this model reads documents of plain text."


def test_calls_come_back_as_openais_package_dumps_them(http):
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"}
    call |= {"async": None, "async_": None, "caller": None, "namespace": None}
    output = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    body = {"input": [call, output], "max_output_tokens": 2}
    assert http.post("/v1/responses", json=body).status_code == 200
