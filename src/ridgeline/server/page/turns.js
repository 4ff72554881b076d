// What a turn looks like, while it is written and afterwards.
import { element, markdown } from "/page/markdown.js";

const byId = (id) => document.getElementById(id);

function follow() {
  const transcript = byId("transcript");
  transcript.scrollTop = transcript.scrollHeight;
}

export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here"; // browsers want https for pages that are not local
  }
  setTimeout(() => (button.textContent = label), 1500);
}

export function addTurn(kind, text = "") {
  const turn = element("div", { className: `turn ${kind}`, textContent: text });
  byId("transcript").querySelector(".empty")?.remove();
  byId("transcript").append(turn);
  follow();
  return turn;
}

// Buttons after a turn: {label: action(button)}.
export function addTools(turn, actions) {
  const buttons = Object.entries(actions).map(([label, action]) => {
    const button = element("button", { type: "button", className: "quiet", textContent: label });
    button.addEventListener("click", () => action(button));
    return button;
  });
  turn.after(element("div", { className: `tools ${turn.classList[1]}` }, ...buttons));
}

export function showAnswer(turn, { content, reasoning }) {
  if (reasoning) {
    const summary = element("summary", { textContent: "Reasoning" });
    turn.append(element("details", {}, summary, reasoning));
  }
  turn.append(element("div", { className: "markdown" }, ...markdown(content, copy)));
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

export function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) {
    return logprobs.content.map((t) => [t.token, t.logprob, t.top_logprobs.map((o) => [o.token, o.logprob])]);
  }
  return logprobs.tokens.map((token, i) => [token, logprobs.token_logprobs[i], Object.entries(logprobs.top_logprobs[i])]);
}

// The last tokens, as far as they make up the text; none where they do not.
export function tokensFor(text, tokens) {
  let joined = "";
  for (let first = tokens.length - 1; first >= 0; first--) {
    joined = tokens[first][0] + joined;
    if (joined.trim() === text.trim()) return tokens.slice(first);
  }
  return [];
}

export class Output {
  constructor(turn, { asMarkdown = false } = {}) {
    this.turn = turn;
    this.held = []; // tokens whose text has not come yet
    this.text = "";
    this.thoughts = "";
    this.asMarkdown = asMarkdown;
    this.body = element(asMarkdown ? "div" : "span", { className: asMarkdown ? "markdown" : "" });
    turn.append(this.body);
    turn.classList.add("busy");
  }

  reason(text) {
    if (!this.reasoning) {
      this.reasoning = element("details", { open: true }, element("summary", { textContent: "Reasoning" }), "");
      this.turn.prepend(this.reasoning);
    }
    this.thoughts += text;
    this.reasoning.lastChild.textContent += text;
  }

  add(text, tokens = []) {
    this.text += text;
    if (this.asMarkdown) this.#drawSoon();
    else if (tokens.length) for (const token of tokens) this.body.append(tokenSpan(...token));
    else if (text) this.body.append(text);
    follow();
  }

  // A guard has taken back some of what was shown: of the answer only this stays.
  keepOnly(text) {
    this.text = text;
    this.thoughts = "";
    this.reasoning?.remove();
    this.reasoning = null;
    this.body.replaceChildren(...(this.asMarkdown ? markdown(text, copy) : [text]));
  }

  // Once a frame at the most: the whole text is read again.
  #drawSoon() {
    this.frame ??= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.frame = null;
    this.body.replaceChildren(...markdown(this.text, copy));
    follow();
  }

  end() {
    if (this.frame) cancelAnimationFrame(this.frame);
    if (this.asMarkdown) this.#draw();
    if (this.reasoning) this.reasoning.open = !this.text;
    this.turn.classList.remove("busy");
  }
}
