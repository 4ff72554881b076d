// The playground: requests, streams, and the conversations that they are part of.
import { Conversations, KEY } from "/page/conversations.js";
import { startLive } from "/page/live.js";
import { readEvents } from "/page/events.js";
import { element } from "/page/markdown.js";
import { snippet } from "/page/snippets.js";
import { addTools, addTurn, copy, Output, showAnswer, tokensFor, tokensOf } from "/page/turns.js";

const byId = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

const conversations = new Conversations((problem) => addTurn("error", problem));
let mode = "chat";
let controller = null;
let editing = null; // the index of the question that the prompt is to replace
let completions = []; // the nodes of the other mode's transcript, while this one's are shown

function requestBody(text, earlier) {
  const body = { model: byId("model").value || undefined, stream: true };
  body.stream_options = { include_usage: true };
  body.max_tokens = Number(byId("max_tokens").value) || 256;
  for (const name of NUMBERS) {
    if (byId(name).value !== "") body[name] = Number(byId(name).value);
  }
  if (byId("stop").value) body.stop = byId("stop").value;
  const wantsLogprobs = byId("show-logprobs").checked;
  if (mode === "completion") {
    body.prompt = text;
    if (wantsLogprobs) body.logprobs = 3;
    return body;
  }
  const system = byId("system").value.trim();
  const turns = system ? [{ role: "system", content: system }] : [];
  const before = earlier.map(({ role, content }) => ({ role, content }));
  body.messages = [...turns, ...before, { role: "user", content: text }];
  if (wantsLogprobs) Object.assign(body, { logprobs: true, top_logprobs: 3 });
  return body;
}

function takeChunk(output, chunk) {
  const choice = chunk.choices[0];
  if (!choice) return;
  if (choice.retraction) {
    const { start, stop, content } = choice.retraction;
    const shown = [...output.text];
    output.keepOnly(content ?? shown.slice(0, start).concat(shown.slice(stop)).join(""));
    return;
  }
  if (mode === "completion") {
    output.add(choice.text, tokensOf(choice.logprobs));
    return;
  }
  const { reasoning, content, tool_calls: calls } = choice.delta;
  output.held.push(...tokensOf(choice.logprobs));
  if (reasoning) output.reason(reasoning);
  if (content) output.add(content, tokensFor(content, output.held));
  for (const call of calls ?? []) output.add((call.function.name ?? "") + (call.function.arguments ?? ""));
  if (reasoning || content || calls) output.held = [];
}

// `from`: the index of the turn that this one replaces, with all after it.
async function send(text, from = conversations.current.messages.length) {
  const body = requestBody(text, conversations.current.messages.slice(0, from));
  const isChat = mode === "chat";
  let turn;
  if (isChat) {
    dropTurns(from);
    addTurn("user", text);
    turn = addTurn("assistant");
  } else {
    turn = addTurn("completion");
    turn.append(element("span", { className: "given", textContent: text }));
  }
  const output = new Output(turn, { asMarkdown: isChat && !byId("show-logprobs").checked });
  const clock = { start: performance.now(), first: null, tokens: 0, usage: null };
  controller = new AbortController();
  setBusy(true);
  let problem = null;
  try {
    const response = await fetch(isChat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(body),
      signal: controller.signal,
    });
    for await (const chunk of readEvents(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      clock.first ??= performance.now();
      clock.tokens += chunk.choices.length;
      clock.usage = chunk.usage ?? clock.usage;
      takeChunk(output, chunk);
    }
    showFigures(clock, "");
  } catch (error) {
    if (error.name === "AbortError") showFigures(clock, "stopped · ");
    else problem = error.message;
  }
  output.end();
  if (isChat) keep(text, output, from);
  if (problem !== null) addTurn("error", problem);
  setBusy(false);
}

// A turn without an answer leaves the conversation as it was, and nothing stale on the screen.
function keep(question, output, from) {
  const { messages } = conversations.current;
  if (output.text) {
    messages.splice(from);
    const answer = { role: "assistant", content: output.text };
    if (output.thoughts) answer.reasoning = output.thoughts;
    messages.push({ role: "user", content: question }, answer);
    conversations.current.system = byId("system").value;
    conversations.current.model = byId("model").value;
    conversations.save();
    listConversations();
    addButtons();
  } else {
    drawConversation();
    byId("prompt").value ||= question; // to be sent again
  }
}

// Buttons of the turns that are shown; those of earlier turns stay.
function addButtons() {
  const { messages } = conversations.current;
  const turns = [...byId("transcript").querySelectorAll(".turn.user, .turn.assistant")];
  byId("transcript").querySelectorAll(".tools").forEach((tools) => tools.remove());
  turns.forEach((turn, index) => {
    const message = messages[index];
    if (!message) return;
    const actions = { Copy: (button) => copy(message.content, button) };
    if (message.role === "user") actions.Edit = () => edit(index);
    else if (index === messages.length - 1) actions.Retry = () => retry(index);
    addTools(turn, actions);
  });
}

function dropTurns(from) {
  const turns = [...byId("transcript").querySelectorAll(".turn.user, .turn.assistant")];
  for (const turn of turns.slice(from)) turn.remove();
  byId("transcript").querySelectorAll(".tools, .turn.error").forEach((each) => each.remove());
}

function setEditing(index) {
  editing = index;
  byId("send").textContent = index === null ? "Send" : "Send instead";
}

// Nothing is lost until the question is sent instead of the earlier one, and answered.
function edit(index) {
  if (controller) return;
  byId("prompt").value = conversations.current.messages[index].content;
  setEditing(index);
  byId("prompt").focus();
}

function retry(index) {
  if (!controller) send(conversations.current.messages[index - 1].content, index - 1);
}

function drawConversation() {
  setEditing(null);
  clearTranscript();
  for (const message of conversations.current.messages) {
    if (message.role === "user") addTurn("user", message.content);
    else showAnswer(addTurn("assistant"), message);
  }
  addButtons();
  byId("system").value = conversations.current.system ?? "";
  const { model } = conversations.current;
  if (model && [...byId("model").options].some((option) => option.value === model)) byId("model").value = model;
  showSnippet();
}

function listConversations() {
  const { all, current } = conversations;
  const shown = all.includes(current) ? all : [current, ...all];
  byId("conversation").replaceChildren(...shown.map((each) => new Option(each.title, each.id)));
  byId("conversation").value = current.id;
}

function exportConversation() {
  const { title, system, messages } = conversations.current;
  const turns = system ? [{ role: "system", content: system }, ...messages] : messages;
  const text = JSON.stringify({ title, messages: turns }, null, 1);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  const link = element("a", { href: url, download: "chat.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function showSnippet() {
  byId("snippet").textContent = snippet(byId("snippet-kind").value, byId("model").value);
}

function showFigures(clock, prefix) {
  if (clock.first === null) return;
  const end = performance.now();
  const tokens = clock.usage?.completion_tokens ?? clock.tokens;
  const parts = [`TTFT ${(clock.first - clock.start).toFixed(0)} ms`];
  if (tokens > 1) {
    const each = (end - clock.first) / (tokens - 1);
    parts.push(`TPOT ${each.toFixed(1)} ms`, `${(1000 / each).toFixed(0)} tok/s`);
  }
  if (clock.usage) {
    const cached = clock.usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`${clock.usage.prompt_tokens} + ${tokens} tokens`, `${cached} cached`);
    if (clock.usage.cost) parts.push(`cost ${clock.usage.cost.total.toPrecision(3)}`);
  }
  byId("request-line").textContent = prefix + parts.join(" · ");
}

function setBusy(busy) {
  byId("send").disabled = busy;
  byId("stop-button").disabled = !busy;
  for (const id of ["conversation", "new", "delete", "export"]) byId(id).disabled = busy || mode !== "chat";
  if (!busy) controller = null;
}

function setMode(next) {
  if (controller || mode === next) return;
  const hidden = [...byId("transcript").childNodes];
  mode = next;
  if (next === "completion") {
    clearTranscript();
    if (completions.length) byId("transcript").replaceChildren(...completions);
  } else {
    completions = hidden;
    drawConversation();
  }
  for (const name of ["chat", "completion"]) {
    const tab = byId(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === next));
    tab.tabIndex = name === next ? 0 : -1;
  }
  byId("transcript").setAttribute("aria-labelledby", `tab-${next}`);
  byId("system").disabled = next === "completion";
  byId("clear").hidden = next === "chat";
  byId("chats").hidden = next !== "chat";
  setBusy(false);
}

function clearTranscript() {
  byId("transcript").replaceChildren(element("p", { className: "empty", textContent: "Nothing yet." }));
  byId("request-line").textContent = "\u00a0";
}

function submit() {
  const text = byId("prompt").value;
  if (controller || !text.trim()) return;
  if (mode === "completion") {
    send(text);
    return;
  }
  const from = editing ?? undefined;
  byId("prompt").value = "";
  setEditing(null);
  send(text, from);
}

function listenToChats() {
  byId("conversation").addEventListener("change", () => {
    conversations.open(byId("conversation").value);
    drawConversation();
  });
  byId("new").addEventListener("click", () => {
    conversations.begin();
    listConversations();
    drawConversation();
    byId("prompt").focus();
  });
  byId("delete").addEventListener("click", () => {
    if (conversations.current.messages.length && !confirm("Delete this conversation?")) return;
    conversations.remove();
    listConversations();
    drawConversation();
  });
  byId("export").addEventListener("click", exportConversation);
  window.addEventListener("storage", (event) => {
    if (controller || (event.key !== KEY && event.key !== null)) return;
    const isAnother = conversations.refresh();
    listConversations();
    if (isAnother && mode === "chat") drawConversation();
  });
  byId("model").addEventListener("change", showSnippet);
  byId("snippet-kind").addEventListener("change", showSnippet);
  byId("copy-snippet").addEventListener("click", (event) => copy(byId("snippet").textContent, event.currentTarget));
}

function listen() {
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    const sends = event.key === "Enter" && (event.ctrlKey || event.metaKey || (mode === "chat" && !event.shiftKey));
    if (sends && !event.isComposing) {
      event.preventDefault();
      submit();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") controller?.abort();
  });
  byId("stop-button").addEventListener("click", () => controller?.abort());
  byId("clear").addEventListener("click", () => controller || clearTranscript());
  listenToChats();
  for (const name of ["chat", "completion"]) {
    const tab = byId(`tab-${name}`);
    tab.addEventListener("click", () => setMode(name));
    tab.addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = name === "chat" ? "completion" : "chat";
      setMode(other);
      byId(`tab-${other}`).focus();
    });
  }
}

async function loadModels() {
  const response = await fetch("/v1/models");
  const { data } = await response.json();
  byId("model").replaceChildren(...data.map((model) => new Option(model.id, model.id)));
  listConversations();
  drawConversation();
}

listen();
loadModels();
startLive();
