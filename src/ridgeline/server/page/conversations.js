// Conversations, kept in this browser and nowhere else, and shared by its tabs.
export const KEY = "ridgeline.conversations";
const MAX_TITLE = 48;

const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

export class Conversations {
  constructor(onProblem) {
    this.onProblem = onProblem;
    this.unsaved = new Map(); // by id: those that the browser had no room for
    this.all = this.#read();
    this.current = this.all[0] ?? this.#fresh();
  }

  #fresh() {
    return { id: newId(), title: "New chat", system: "", messages: [] };
  }

  // What any tab has kept, and what this one could not.
  #read() {
    let found;
    try {
      found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    } catch {
      found = null;
    }
    const kept = Array.isArray(found) ? found.filter((each) => Array.isArray(each?.messages)) : [];
    return [...this.unsaved.values(), ...kept.filter((each) => !this.unsaved.has(each.id))];
  }

  #write(all) {
    this.all = all;
    try {
      localStorage.setItem(KEY, JSON.stringify(all));
      this.unsaved.clear();
    } catch {
      if (all.includes(this.current)) this.unsaved.set(this.current.id, this.current);
      this.onProblem("This browser has no room for more conversations: export some, and delete them.");
    }
  }

  // A conversation is kept from its first turn on; the one that was used last is the first. If another
  // tab has gone on with it meanwhile, this tab's becomes one of its own.
  save() {
    const { current } = this;
    const question = current.messages.find((message) => message.role === "user")?.content;
    if (question) current.title = question.replace(/\s+/g, " ").trim().slice(0, MAX_TITLE);
    const all = this.#read();
    const kept = all.find((each) => each.id === current.id);
    if (kept && kept.time !== current.time) current.id = newId();
    current.time = Date.now();
    this.#write([current, ...all.filter((each) => each.id !== current.id)]);
  }

  // Take over what other tabs have kept; whether the current conversation is another one now.
  refresh() {
    this.all = this.#read();
    const kept = this.all.find((each) => each.id === this.current.id);
    if (!kept) return false;
    const isNewer = kept.time !== this.current.time;
    this.current = kept;
    return isNewer;
  }

  open(id) {
    this.refresh();
    this.current = this.all.find((each) => each.id === id) ?? this.#fresh();
  }

  begin() {
    this.current = this.#fresh();
  }

  remove() {
    this.unsaved.delete(this.current.id);
    this.#write(this.#read().filter((each) => each.id !== this.current.id));
    this.current = this.all[0] ?? this.#fresh();
  }
}
