"""Nothing that the page shows is run: what a model writes, and names of models, adapters, files."""

import dataclasses
from pathlib import Path

import pytest
from tests.server.test_page import CHROMIUM, browser, page_server, served, wait_for  # noqa: F401

pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="needs Debian's chromium")

RUN = "document.title='run'"
ATTACKS = [
    f"<script>{RUN}</script>",
    f"<img src=x onerror={RUN}>",
    f"<svg onload={RUN}></svg>",
    f"<details open ontoggle={RUN}>",
    f'"><iframe srcdoc="<script>parent.{RUN}</script>"></iframe>',
    f"</textarea></select></option><img src=x onerror={RUN}>",
    f"javascript:{RUN}//",
    f"[link](javascript:{RUN})",
]
TEXT = "".join(ATTACKS)


@pytest.fixture(params=[False, True], ids=["as served", "without the policy"])
def page(browser, page_server, request):  # noqa: F811
    """A fresh page; escaping alone must do, so the policy against scripts is off once."""
    context = browser.new_context(bypass_csp=request.param)
    page = context.new_page()
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    yield page
    page.wait_for_timeout(100)
    assert page.title() != "run"
    assert not [url for url in requests if url.endswith("/x")], "an element of the text was made"
    context.close()


def open_page(page, page_server):  # noqa: F811
    page.goto(page_server.url)
    page.wait_for_selector("#status[data-state=ready]")


@pytest.mark.parametrize("mode", ["chat", "completion"])
@pytest.mark.parametrize("colours", [False, True])
def test_what_a_model_writes(page, page_server, says, mode, colours):  # noqa: F811
    says("<think>", TEXT, "</think>", *ATTACKS)
    open_page(page, page_server)
    page.click(f"#tab-{mode}")
    page.set_checked("#show-logprobs", colours)
    page.fill("#prompt", TEXT)
    page.click("#send")
    page.wait_for_selector("#send:enabled")
    wait_for(page, lambda: TEXT in page.text_content("#transcript"))
    assert page.query_selector_all("#transcript :is(script, img, svg, iframe)") == []


def test_names_of_models_and_adapters(page, page_server, monkeypatch):  # noqa: F811
    server = page_server.server
    named = dataclasses.replace(server.config, served_model_name=ATTACKS[0])
    monkeypatch.setattr(server, "config", named)
    monkeypatch.setattr(type(server.engine), "adapters", tuple(ATTACKS[1:]))
    open_page(page, page_server)
    wait_for(page, lambda: len(page.query_selector_all("#model option")) > 0)
    shown = [option.text_content() for option in page.query_selector_all("#model option")]
    assert shown == ATTACKS, shown
    assert page.query_selector_all("img[src=x], iframe") == []


@pytest.mark.parametrize("name", ["a.html", "a.svg", f"{ATTACKS[1]}.html"])
def test_a_file_is_never_shown_as_a_page(page, page_server, name):  # noqa: F811
    """Opened from the server's own origin, it would act as its user."""
    content = f"<!doctype html><body>{TEXT}<svg xmlns='http://www.w3.org/2000/svg'/>".encode()
    with page_server.client() as client:
        form = {"files": {"file": (name, content, "text/html")}, "data": {"purpose": "user_data"}}
        file = client.post("/v1/files", **form).json()
    for path in (f"/v1/files/{file['id']}", "/v1/files", f"/v1/models/{name}"):
        page.goto(page_server.url + path)
        assert page.title() != "run"
    url = f"{page_server.url}/v1/files/{file['id']}/content"
    with page.expect_download() as download:
        page.eval_on_selector("body", "(body, url) => location.assign(url)", url)
    assert Path(download.value.path()).read_bytes() == content
