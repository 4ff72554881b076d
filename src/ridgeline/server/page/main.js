// The playground: requests, streams, and what they look like.
import { startLive } from "/page/live.js";
import { readEvents } from "/page/events.js";

const byId = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"];

let mode = "chat";
let history = [];
let controller = null;

function requestBody(text) {
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
  body.messages = [...turns, ...history, { role: "user", content: text }];
  if (wantsLogprobs) Object.assign(body, { logprobs: true, top_logprobs: 3 });
  return body;
}

function addTurn(kind, text = "") {
  const turn = document.createElement("div");
  turn.className = `turn ${kind}`;
  turn.textContent = text;
  const transcript = byId("transcript");
  transcript.querySelector(".empty")?.remove();
  transcript.append(turn);
  transcript.scrollTop = transcript.scrollHeight;
  return turn;
}

// Likely tokens are calm, unlikely ones stand out; the alternatives are in the title.
function tokenSpan(token, logprob, alternatives) {
  const span = document.createElement("span");
  const probability = Math.exp(logprob);
  const level = [0.8, 0.4, 0.1].findIndex((bound) => probability >= bound);
  span.className = `token p${level < 0 ? 4 : level + 1}`;
  span.textContent = token;
  const others = alternatives.map(([t, p]) => `${JSON.stringify(t)} ${(Math.exp(p) * 100).toFixed(1)}%`);
  span.title = `${(probability * 100).toFixed(1)}%\n${others.join("\n")}`;
  return span;
}

function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((t) => [t.token, t.logprob, t.top_logprobs.map((o) => [o.token, o.logprob])]);
  }
  return logprobs.tokens.map((token, i) => [token, logprobs.token_logprobs[i], Object.entries(logprobs.top_logprobs[i])]);
}

// The last tokens, as far as they make up the text; none where they do not.
function tokensFor(text, tokens) {
  let joined = "";
  for (let first = tokens.length - 1; first >= 0; first--) {
    joined = tokens[first][0] + joined;
    if (joined.trim() === text.trim()) return tokens.slice(first);
  }
  return [];
}

class Output {
  constructor(turn) {
    this.turn = turn;
    this.held = []; // tokens whose text has not come yet
    this.text = "";
    this.body = document.createElement("span");
    turn.append(this.body);
    turn.classList.add("busy");
  }

  reason(text) {
    if (!this.reasoning) {
      this.reasoning = document.createElement("details");
      this.reasoning.open = true;
      this.reasoning.append(Object.assign(document.createElement("summary"), { textContent: "Reasoning" }), "");
      this.turn.prepend(this.reasoning);
    }
    this.reasoning.lastChild.textContent += text;
  }

  add(text, tokens = []) {
    this.text += text;
    if (tokens.length) for (const token of tokens) this.body.append(tokenSpan(...token));
    else if (text) this.body.append(text);
    const transcript = byId("transcript");
    transcript.scrollTop = transcript.scrollHeight;
  }

  end() {
    this.turn.classList.remove("busy");
  }
}

function takeChunk(output, chunk) {
  const choice = chunk.choices[0];
  if (!choice) return;
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

async function send(text) {
  const body = requestBody(text);
  const path = mode === "chat" ? "/v1/chat/completions" : "/v1/completions";
  let turn;
  if (mode === "chat") {
    addTurn("user", text);
    turn = addTurn("assistant");
  } else {
    turn = addTurn("completion");
    turn.append(Object.assign(document.createElement("span"), { className: "given", textContent: text }));
  }
  const output = new Output(turn);
  const clock = { start: performance.now(), first: null, tokens: 0, usage: null };
  controller = new AbortController();
  setBusy(true);
  try {
    const response = await fetch(path, {
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
    else addTurn("error", error.message);
  } finally {
    output.end();
    setBusy(false);
    if (mode === "chat" && output.text) {
      history.push({ role: "user", content: text }, { role: "assistant", content: output.text });
    }
  }
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
  if (!busy) controller = null;
}

function setMode(next) {
  if (controller || mode === next) return;
  mode = next;
  clearTranscript();
  for (const name of ["chat", "completion"]) {
    const tab = byId(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === next));
    tab.tabIndex = name === next ? 0 : -1;
  }
  byId("transcript").setAttribute("aria-labelledby", `tab-${next}`);
  byId("system").disabled = next === "completion";
}

function clearTranscript() {
  history = [];
  byId("transcript").replaceChildren(
    Object.assign(document.createElement("p"), { className: "empty", textContent: "Nothing yet." }),
  );
  byId("request-line").textContent = "\u00a0";
}

function submit() {
  const text = byId("prompt").value;
  if (controller || !text.trim()) return;
  if (mode === "chat") byId("prompt").value = "";
  send(text);
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
}

listen();
loadModels();
startLive();
