// Markdown as nodes: what models write, and no HTML. Nothing is ever parsed as markup.
const INLINE = /(`+)(.+?)\1|\*\*(.+?)\*\*|__(.+?)__|\*([^*\s][^*]*?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/s;
const FENCE = /^\s{0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;

export function element(name, settings = {}, ...children) {
  const node = Object.assign(document.createElement(name), settings);
  node.append(...children);
  return node;
}

function inline(text) {
  const nodes = [];
  for (let rest = text; rest; ) {
    const match = INLINE.exec(rest);
    if (!match) return [...nodes, rest];
    if (match.index) nodes.push(rest.slice(0, match.index));
    const [whole, , code, strong, bold, emphasis, label, address] = match;
    if (code !== undefined) nodes.push(element("code", {}, code.trim() || code));
    else if (strong ?? bold) nodes.push(element("strong", {}, ...inline(strong ?? bold)));
    else if (emphasis) nodes.push(element("em", {}, ...inline(emphasis)));
    else nodes.push(element("a", { href: address, target: "_blank", rel: "noopener noreferrer" }, label));
    rest = rest.slice(match.index + whole.length);
  }
  return nodes;
}

function codeBlock(lines, language, copy) {
  const text = lines.join("\n");
  const button = element("button", { type: "button", className: "quiet", textContent: "Copy code" });
  button.addEventListener("click", () => copy(text, button));
  const head = element("div", { className: "code-head" }, element("span", {}, language || "code"), button);
  return element("div", { className: "code" }, head, element("pre", {}, element("code", {}, text)));
}

// A list and its nested ones; the index of the line after it.
function list(lines, start, depth) {
  const first = ITEM.exec(lines[start]);
  const isOrdered = /\d/.test(first[2]);
  const node = element(isOrdered ? "ol" : "ul", isOrdered ? { start: parseInt(first[2], 10) } : {});
  let at = start;
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    if (!match) {
      const goesOn = /^\s+\S/.test(lines[at]) && node.lastChild;
      if (!goesOn) break;
      node.lastChild.append(" ", ...inline(lines[at].trim()));
      at += 1;
    } else if (match[1].length > first[1].length && node.lastChild && depth < 8) {
      const [nested, next] = list(lines, at, depth + 1);
      node.lastChild.append(nested);
      at = next;
    } else if (match[1].length < first[1].length || /\d/.test(match[2]) !== isOrdered) break;
    else {
      node.append(element("li", {}, ...inline(match[3])));
      at += 1;
    }
  }
  return [node, at];
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

function table(lines) {
  const row = (line, name) => element("tr", {}, ...cells(line).map((cell) => element(name, {}, ...inline(cell))));
  const body = element("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  const whole = element("table", {}, element("thead", {}, row(lines[0], "th")), body);
  return element("div", { className: "table" }, whole);
}

// `copy(text, button)` is called when somebody wants a block of code.
export function markdown(text, copy) {
  const lines = text.split("\n");
  const nodes = [];
  const starts = (at) =>
    FENCE.test(lines[at]) || ITEM.test(lines[at]) || RULE.test(lines[at]) || /^\s{0,3}(#{1,6}\s|>)/.test(lines[at]);
  for (let at = 0; at < lines.length; ) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = /^\s{0,3}(#{1,6})\s+(.*?)#*\s*$/.exec(line);
    if (!line.trim()) at += 1;
    else if (fence) {
      let end = at + 1;
      while (end < lines.length && !lines[end].trim().startsWith(fence[1])) end += 1;
      nodes.push(codeBlock(lines.slice(at + 1, end), fence[2], copy));
      at = end + 1;
    } else if (heading) {
      nodes.push(element(`h${Math.min(6, heading[1].length + 2)}`, {}, ...inline(heading[2])));
      at += 1;
    } else if (RULE.test(line)) {
      nodes.push(element("hr"));
      at += 1;
    } else if (/^\s{0,3}>/.test(line)) {
      let end = at;
      while (end < lines.length && /^\s{0,3}>/.test(lines[end])) end += 1;
      const inner = lines.slice(at, end).map((each) => each.replace(/^\s{0,3}> ?/, ""));
      nodes.push(element("blockquote", {}, ...inner.flatMap((each) => [...inline(each), element("br")])));
      at = end;
    } else if (ITEM.test(line)) {
      const [node, next] = list(lines, at, 0);
      nodes.push(node);
      at = next;
    } else if (line.includes("|") && /^[\s|:-]*-[\s|:-]*$/.test(lines[at + 1] ?? "") && (lines[at + 1] ?? "").includes("|")) {
      let end = at;
      while (end < lines.length && lines[end].includes("|")) end += 1;
      nodes.push(table(lines.slice(at, end)));
      at = end;
    } else {
      let end = at + 1;
      while (end < lines.length && lines[end].trim() && !starts(end)) end += 1;
      const parts = lines.slice(at, end).flatMap((each, i) => (i ? [element("br"), ...inline(each)] : inline(each)));
      nodes.push(element("p", {}, ...parts));
      at = end;
    }
  }
  return nodes;
}
