"""The web page in Chromium: it streams, stops, shows what is going on, and calls nobody else."""

import asyncio
import json
import os
import re
from contextlib import aclosing
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright
from tests.fleet.test_forwarding import KEY, routed
from tests.server.running import running

CHROMIUM = "/usr/bin/chromium"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
SHOTS = os.environ.get("RIDGELINE_SCREENSHOTS")

pytestmark = pytest.mark.skipif(not Path(CHROMIUM).exists(), reason="needs Debian's chromium")


@pytest.fixture(scope="module")
def page_server(roomy_folder, tmp_path_factory):
    with running(roomy_folder, data_dir=tmp_path_factory.mktemp("data")) as server:
        yield server


@pytest.fixture(scope="module")
def served(page_server):
    """What `says` speaks for."""
    return page_server


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(params=[("light", 1280), ("dark", 820), ("light", 390)], ids=str)
def page(browser, page_server, request):
    """A fresh page; at the end nothing was logged, and nobody else was called."""
    scheme, width = request.param
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 820})
    page = context.new_page()
    messages, requests = [], []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto(page_server.url)
    page.wait_for_selector("#status[data-state=ready]")
    yield page
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/page-{scheme}-{width}.png", full_page=width < 500)
    context.close()
    # Chromium itself logs an answer of 400, which one test asks for.
    assert [text for text in messages if "status of 400" not in text] == []
    assert all(url.startswith(page_server.url) for url in requests)


def wait_for(page, condition):
    """Ask again and again; the page's policy lets no script be made of text, not even a test's."""
    for _ in range(200):
        if condition():
            return
        page.wait_for_timeout(50)
    raise AssertionError("this did not happen")


def set_max_tokens(page, count):
    page.eval_on_selector("#max_tokens", f"input => input.value = {count}")


def test_chat_streams(page):
    set_max_tokens(page, 12)
    page.fill("#prompt", "the cat")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".turn.assistant:not(.busy)")
    wait_for(page, lambda: "TTFT" in page.inner_text("#request-line"))
    assert page.inner_text(".turn.user") == "the cat"
    assert page.text_content(".turn.assistant")


def test_stop_works(page, page_server, monkeypatch):
    engine = page_server.server.engine
    generate = engine.generate

    async def slowly(request):
        async with aclosing(generate(request)) as chunks:
            async for chunk in chunks:
                yield chunk
                await asyncio.sleep(0.05)

    monkeypatch.setattr(engine, "generate", slowly)  # or it may end before the browser looks
    set_max_tokens(page, 1500)
    page.eval_on_selector("#temperature", "input => input.value = 0")  # which meets no end token
    page.click("#tab-completion")
    page.fill("#prompt", "the cat")
    page.press("#prompt", "Control+Enter")
    page.wait_for_selector(".turn.completion.busy", state="attached")
    wait_for(page, lambda: len(page.text_content(".turn.completion")) > 12)
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:enabled")
    assert "stopped" in page.inner_text("#request-line")
    length = len(page.text_content(".turn.completion"))
    page.wait_for_timeout(300)
    assert len(page.text_content(".turn.completion")) == length
    assert page_server.server.limits.running == 0


def test_probabilities_are_coloured(page):
    set_max_tokens(page, 8)
    page.check("#show-logprobs")
    page.click("#tab-completion")
    page.fill("#prompt", "the cat")
    page.click("#send")
    page.wait_for_selector("#send:enabled")
    tokens = page.query_selector_all(".token")
    assert len(tokens) == 8
    assert re.match(r"\d+\.\d%", tokens[0].get_attribute("title"))


def test_reasoning_is_shown_once(says, page):
    """Its tokens have probabilities, too, and so have the tags around it."""
    says("<think>", "b", "c", "</think>", "", "f", "g", "")
    page.check("#show-logprobs")
    page.fill("#prompt", "the cat")
    page.click("#send")
    page.wait_for_selector(".turn.assistant:not(.busy)")
    assert page.text_content(".turn.assistant details") == "Reasoningbc"
    assert page.text_content(".turn.assistant > span") == "fg"
    assert len(page.query_selector_all(".token")) == 2


def test_what_a_guard_takes_back_is_gone(says, guards, page):
    guards(scorer="tests.engine.guard.scorers:Late")
    says("<think>hm</think>", "so ", "bad", " it", " is", " over")
    ask(page, "the cat")
    assert page.text_content(".turn.assistant .markdown").split() == ["so", "it"]


def ask(page, text):
    page.fill("#prompt", text)
    page.click("#send")
    page.wait_for_selector("#send:enabled")


def test_answers_are_markdown_with_code_to_copy(says, page):
    says(
        "Do **this**:\n\n", "1. one\n2. two\n\n```python\nx = 1\n\ny = 2\n```\n", "[a](https://b.c)"
    )
    ask(page, "how?")
    answer = page.query_selector(".turn.assistant .markdown")
    assert answer.query_selector("strong").text_content() == "this"
    assert [item.text_content() for item in answer.query_selector_all("ol li")] == ["one", "two"]
    assert answer.query_selector("pre code").text_content() == "x = 1\n\ny = 2"
    assert answer.query_selector("a").get_attribute("rel") == "noopener noreferrer"
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("text=Copy code")
    wait_for(page, lambda: page.evaluate("navigator.clipboard.readText()") == "x = 1\n\ny = 2")


def test_conversations_are_kept_and_no_switch_erases_them(says, page):
    says("first answer")
    page.eval_on_selector("#system", "field => field.value = 'be brief'")
    ask(page, "first question")
    page.click("#new")
    assert page.query_selector_all(".turn") == []
    says("second answer")
    ask(page, "second question")
    page.click("#tab-completion")
    page.click("#tab-chat")
    assert "second answer" in page.inner_text("#transcript")
    page.reload()
    page.wait_for_selector(".turn.assistant")
    assert "second answer" in page.inner_text("#transcript")
    page.select_option("#conversation", label="first question")
    assert "first answer" in page.inner_text("#transcript")
    assert page.eval_on_selector("#system", "field => field.value") == "be brief"
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    options = page.eval_on_selector_all("#conversation option", "all => all.map(o => o.label)")
    assert options == ["second question"]


def titles(page):
    return page.eval_on_selector_all("#conversation option", "all => all.map(o => o.label)")


def test_tabs_keep_each_others_conversations(says, page, page_server):
    """Once the tab that saved last had erased what the other one had kept."""
    says("first answer")
    ask(page, "first question")
    other = page.context.new_page()
    other.goto(page_server.url)
    other.wait_for_selector(".turn.assistant")
    for tab, text in ((page, "second"), (other, "third"), (page, "fourth")):
        says(f"{text} answer")
        tab.click("#new")
        ask(tab, f"{text} question")
    wanted = [f"{text} question" for text in ("fourth", "third", "second", "first")]
    wait_for(other, lambda: set(titles(other)) == set(wanted))
    assert titles(page) == wanted
    page.once("dialog", lambda dialog: dialog.accept())
    page.click("#delete")
    wait_for(other, lambda: set(titles(other)) == set(wanted[1:]))
    says("more")
    page.select_option("#conversation", label="first question")
    other.select_option("#conversation", label="first question")
    ask(page, "and then?")
    wait_for(other, lambda: "more" in other.inner_text("#transcript"))  # goes on where that one is
    other.close()


def test_two_tabs_that_go_on_with_one_conversation_lose_no_turn(says, page):
    says("an answer")
    ask(page, "a question")
    page.evaluate(  # as another tab does while this one waits for its answer
        """() => {
            const all = JSON.parse(localStorage.getItem("ridgeline.conversations"));
            all[0].messages.push({ role: "user", content: "theirs" });
            all[0].messages.push({ role: "assistant", content: "so" });
            all[0].time += 1;
            localStorage.setItem("ridgeline.conversations", JSON.stringify(all));
        }"""
    )
    says("ours too")
    ask(page, "ours")
    kept = json.loads(page.evaluate("localStorage.getItem('ridgeline.conversations')"))
    assert [[turn["content"] for turn in each["messages"][2:]] for each in kept] == [
        ["ours", "ours too"],
        ["theirs", "so"],
    ]
    assert len({each["id"] for each in kept}) == 2


def test_turns_are_retried_and_edited(says, page):
    says("one")
    ask(page, "question")
    says("two")
    page.click("text=Retry")
    wait_for(page, lambda: page.text_content(".turn.assistant") == "two")
    page.wait_for_selector("#send:enabled")
    assert len(page.query_selector_all(".turn")) == 2
    page.click("text=Edit")
    assert page.eval_on_selector("#prompt", "field => field.value") == "question"
    assert len(page.query_selector_all(".turn")) == 2  # nothing is lost before it is sent
    says("three")
    ask(page, "better question")
    turns = [turn.text_content() for turn in page.query_selector_all(".turn")]
    assert turns == ["better question", "three"]


def test_a_conversation_is_exported(says, page):
    says("an answer")
    ask(page, "a question")
    with page.expect_download() as download:
        page.click("#export")
    found = json.loads(Path(download.value.path()).read_text())
    assert [message["content"] for message in found["messages"]] == ["a question", "an answer"]


@pytest.mark.parametrize("kind", ["python", "curl", "anthropic", "ollama"])
def test_the_code_names_this_server_and_model(page, page_server, kind):
    page.click("#code summary")
    page.select_option("#snippet-kind", kind)
    code = page.inner_text("#snippet")
    assert page_server.url in code
    assert page_server.server.model_name in code


def test_an_error_leaves_nothing_stale(says, page, page_server):
    says("an answer")
    ask(page, "a question")
    page.eval_on_selector("#temperature", "input => input.value = -3")
    page.eval_on_selector("#form", "form => form.noValidate = true")
    page.fill("#prompt", "another")
    page.eval_on_selector("#send", "button => button.click()")
    page.wait_for_selector(".turn.error")
    turns = [turn.text_content() for turn in page.query_selector_all(".turn:not(.error)")]
    assert turns == ["a question", "an answer"]
    assert page.eval_on_selector("#prompt", "field => field.value") == "another"


def test_the_live_view_moves(page):
    set_max_tokens(page, 60)
    page.click("#tab-completion")
    page.fill("#prompt", "the cat")
    page.click("#send")
    wait_for(page, lambda: page.inner_text("#output-rate") not in ("–", "0.0"))
    wait_for(page, lambda: "ms" in page.inner_text("#ttft td"))
    wait_for(page, lambda: "ms" in page.inner_text("#publish td"))
    wait_for(page, lambda: "out" in page.inner_text("#rpm"))
    assert page.inner_text("#ttft td:last-child") == "–"  # p99 of one request
    assert "--slo" in page.inner_text("#slo")
    page.wait_for_selector("#rate-line path")
    page.wait_for_selector("#roofline circle.decode")
    wait_for(page, lambda: "decode" in page.inner_text("#bound"))
    assert page.is_hidden("#fleet")  # of a server by itself


def test_behind_a_router_the_page_shows_the_fleet(browser, roomy_folder, tmp_path):
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY)
    key_file.chmod(0o600)
    with (
        running(roomy_folder, data_dir=tmp_path / "data", router_key_file=str(key_file)) as server,
        routed(tmp_path, engine=(server.url, "http://127.0.0.1:1")) as (client, _),
    ):
        behind = browser.new_page(viewport={"width": 390, "height": 820})
        behind.goto(str(client.base_url))
        wait_for(behind, lambda: "1 of 2 engines" in behind.inner_text("#fleet-line"))
        body = {"prompt": "the cat", "max_tokens": 100, "ignore_eos": True}
        client.post("/v1/completions", json=body)
        busy = "#fleet-engines tr:first-child td:nth-last-child(2)"
        wait_for(behind, lambda: behind.inner_text(busy) not in ("–", "0%"))
        assert "127.0.0.1:1" in behind.get_attribute("#fleet-engines tr:last-child th", "title")
        assert behind.inner_text("#fleet-engines tr:last-child td")  # why it takes none
        assert "of engine 0" in behind.inner_text("#fleet-decision")
        assert behind.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        if SHOTS:
            behind.screenshot(
                path=f"{SHOTS}/fleet-{page.viewport_size['width']}.png", full_page=True
            )
        behind.close()


def test_errors_are_shown(page):
    page.click("#parameters summary")
    page.fill("#temperature", "-3")
    page.eval_on_selector("#form", "form => form.noValidate = true")
    page.fill("#prompt", "the cat")
    page.eval_on_selector("#send", "button => button.click()")
    page.wait_for_selector(".turn.error")
    assert "temperature" in page.inner_text(".turn.error")


def test_nothing_is_wider_than_the_screen(page):
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_no_text_runs_into_the_next(page):
    """A note of two lines, as at 1280 × 800, has room for both."""
    notes = "[...document.querySelectorAll('aside .figures')]"
    assert page.evaluate(f"{notes}.every(each => each.scrollHeight <= each.clientHeight + 1)")


def test_every_control_has_a_name(page):
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, input, select, textarea, meter')].filter(
            c => !c.labels?.length && !c.textContent.trim() && !c.getAttribute('aria-label')
        ).map(c => c.outerHTML)"""
    )
    assert unnamed == []


def test_text_has_contrast(page):
    """At least 4.5 to 1 for text against its ground (WCAG 2.2, AA)."""
    ratios = page.evaluate(
        """() => {
            const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
            const light = (c) => rgb(c).map((v) => v / 255)
                .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
                .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
            const ground = (node) => {
                for (; node; node = node.parentElement) {
                    const colour = getComputedStyle(node).backgroundColor;
                    if (colour !== 'rgba(0, 0, 0, 0)') return colour;
                }
                return 'rgb(255, 255, 255)';
            };
            return ['h1', '.tabs [aria-selected=true]', '.tabs [aria-selected=false]', 'dt', 'dd b',
                    'caption', '.latency th', '#send', 'summary', 'nav a', '.legend', '#status']
                .map((selector) => {
                    const node = document.querySelector(selector);
                    const [a, b] = [light(getComputedStyle(node).color), light(ground(node))];
                    return [selector, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)];
                });
        }"""
    )
    assert [entry for entry in ratios if entry[1] < 4.5] == []
