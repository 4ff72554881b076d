// Conversations, kept in this browser and nowhere else.
const KEY = "ridgeline.conversations";
const MAX_TITLE = 48;

export class Conversations {
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.all = this.#read();
    this.current = this.all[0] ?? this.#fresh();
  }

  #fresh() {
    return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "New chat", system: "", messages: [] };
  }

  #read() {
    try {
      const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
      return Array.isArray(found) ? found.filter((each) => Array.isArray(each?.messages)) : [];
    } catch {
      return [];
    }
  }

  // A conversation is kept from its first turn on; the one that was used last is the first.
  save() {
    const { current } = this;
    const question = current.messages.find((message) => message.role === "user")?.content;
    if (question) current.title = question.replace(/\s+/g, " ").trim().slice(0, MAX_TITLE);
    this.all = this.all.filter((each) => each.id !== current.id);
    if (current.messages.length) this.all.unshift(current);
    try {
      localStorage.setItem(KEY, JSON.stringify(this.all));
    } catch {
      this.onProblem("This browser has no room for more conversations: export some, and delete them.");
    }
  }

  open(id) {
    this.current = this.all.find((each) => each.id === id) ?? this.#fresh();
  }

  begin() {
    this.current = this.#fresh();
  }

  remove() {
    this.current.messages = [];
    this.save();
    this.current = this.all[0] ?? this.#fresh();
  }
}
