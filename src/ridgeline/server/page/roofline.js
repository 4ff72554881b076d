// What each phase did in half a second, as points of arithmetic intensity and speed, on logarithmic axes, under the measured roof.
const SIZE = { width: 420, height: 260, left: 46, right: 12, top: 12, bottom: 36 };
const KEPT = 300;
const NAMESPACE = "http://www.w3.org/2000/svg";

export class Roofline {
  constructor(svg, line) {
    this.svg = svg;
    this.line = line;
    this.steps = [];
  }

  take(roof, levels, steps) {
    this.levels = levels;
    const priced = steps.filter((step) => step.flops > 0 && step.bytes > 0 && step.seconds > 0);
    this.steps = [...this.steps, ...priced].slice(-KEPT);
    if (priced.length || (roof && !this.drawn)) this.draw(roof);
  }

  draw(roof) {
    this.drawn = true;
    const points = this.steps.map((step) => ({
      x: step.flops / step.bytes,
      y: step.flops / step.seconds,
      kind: step.kind,
    }));
    if (!points.length && !roof) return;
    const xs = points.map((p) => p.x);
    const ys = points.map((p) => p.y);
    if (roof) {
      const ridge = roof.flops / roof.bandwidth;
      xs.push(ridge * 4, ridge / 30, ...Object.values(this.levels).map((bandwidth) => roof.flops / bandwidth));
      ys.push(roof.flops * 1.5, (roof.bandwidth * ridge) / 100);
    }
    const x = logScale(xs, SIZE.left, SIZE.width - SIZE.right);
    const y = logScale(ys, SIZE.height - SIZE.bottom, SIZE.top);
    const ridges = roof ? Object.entries(this.levels).map(([name, bandwidth]) => ridgeMark(name, roof.flops / bandwidth, roof, x, y)) : [];
    this.svg.replaceChildren(...axis(x, y), ...ridges.flat(), ...(roof ? [roofPath(roof, x, y)] : []));
    points.forEach((point, index) => {
      const age = 1 - index / points.length;
      const dot = element("circle", { cx: x.at(point.x), cy: y.at(point.y), r: 3.2, class: point.kind });
      dot.setAttribute("opacity", (0.85 - 0.65 * age).toFixed(2));
      this.svg.append(dot);
    });
    this.describe(roof);
  }

  describe(roof) {
    const last = this.steps.at(-1);
    if (!last) return;
    const speed = last.flops / last.seconds;
    const parts = [`Last: ${last.kind}, ${last.tokens} tokens in ${(last.seconds * 1e3).toFixed(1)} ms`];
    if (roof) {
      const compute = speed / roof.flops;
      const memory = last.bytes / last.seconds / roof.bandwidth;
      parts.push(`MFU ${percent(compute)}`, `MBU ${percent(memory)}`);
      parts.push(compute > memory ? "compute-bound" : "memory-bound");
    } else {
      parts.push("no roof: run ridgeline roofline --calibrate");
    }
    this.line.textContent = parts.join(" · ");
  }
}

const percent = (share) => `${(share * 100).toFixed(0)}%`;

function logScale(values, from, to) {
  const low = Math.floor(Math.log10(Math.min(...values)));
  const high = Math.max(low + 1, Math.ceil(Math.log10(Math.max(...values))));
  const at = (value) => from + ((Math.log10(value) - low) / (high - low)) * (to - from);
  return { low, high, at };
}

function element(name, attributes) {
  const node = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

function text(content, attributes) {
  const node = element("text", attributes);
  node.textContent = content;
  return node;
}

function axis(x, y) {
  const nodes = [];
  const bottom = SIZE.height - SIZE.bottom;
  for (let power = x.low; power <= x.high; power += 1) {
    const at = x.at(10 ** power);
    nodes.push(element("line", { x1: at, x2: at, y1: SIZE.top, y2: bottom, class: "grid-line" }));
    nodes.push(text(plain(power), { x: at, y: bottom + 14, "text-anchor": "middle" }));
  }
  for (let power = y.low; power <= y.high; power += 1) {
    const at = y.at(10 ** power);
    nodes.push(element("line", { x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: at, y2: at, class: "grid-line" }));
    nodes.push(text(plain(power - 9), { x: SIZE.left - 5, y: at + 4, "text-anchor": "end" }));
  }
  nodes.push(text("FLOPs per byte", { x: (SIZE.left + SIZE.width) / 2, y: SIZE.height - 4, "text-anchor": "middle" }));
  nodes.push(text("GFLOP/s", { x: 12, y: SIZE.height / 2, transform: `rotate(-90 12 ${SIZE.height / 2})`, "text-anchor": "middle" }));
  return nodes;
}

const plain = (power) => (power >= -3 && power <= 4 ? String(Number((10 ** power).toPrecision(1))) : `1e${power}`);

// Where arithmetic begins to bind for data that lies in a level of memory.
function ridgeMark(name, ridge, roof, x, y) {
  const at = x.at(ridge);
  const label = text(name, { x: at, y: y.at(roof.flops) - 4, "text-anchor": "middle" });
  const hint = document.createElementNS(NAMESPACE, "title");
  hint.textContent = `ridge of ${name}: ${ridge.toPrecision(3)} FLOPs per byte`;
  label.append(hint);
  return [element("line", { x1: at, x2: at, y1: y.at(roof.flops), y2: SIZE.height - SIZE.bottom, class: "ridge" }), label];
}

function roofPath(roof, x, y) {
  const ridge = roof.flops / roof.bandwidth;
  const left = 10 ** x.low;
  const right = 10 ** x.high;
  const points = [
    [left, left * roof.bandwidth],
    [ridge, roof.flops],
    [right, roof.flops],
  ].filter(([px]) => px >= left && px <= right);
  const bottom = 10 ** y.low;
  if (points[0][1] < bottom) points[0] = [bottom / roof.bandwidth, bottom];
  return element("path", { class: "roof", d: `M${points.map(([px, py]) => `${x.at(px)},${y.at(py)}`).join("L")}` });
}
