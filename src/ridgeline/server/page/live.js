// The live view: figures twice a second, and each recent step under the roof.
import { readEvents } from "/page/events.js";
import { startFleet } from "/page/fleet.js";
import { Roofline } from "/page/roofline.js";

const byId = (id) => document.getElementById(id);
const KEPT = 120; // one minute
const RETRY_MS = 2000;

export async function startLive() {
  const roofline = new Roofline(byId("roofline"), byId("bound"));
  const rates = { output: [], prompt: [] };
  while (true) {
    try {
      const response = await fetch("/live");
      const engine = response.headers.get("x-ridgeline-engine");
      if (engine !== null) startFleet(engine);
      for await (const snapshot of readEvents(response)) show(snapshot, rates, roofline);
    } catch (error) {
      setStatus("bad", "disconnected");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function show(live, rates, roofline) {
  setStatus(live.status === "ready" ? "ready" : "bad", live.status);
  byId("output-rate").textContent = rate(live.output_tok_s);
  byId("prompt-rate").textContent = rate(live.prompt_tok_s);
  byId("running").textContent = live.running;
  byId("waiting").textContent = live.waiting;
  byId("kv").textContent = percent(live.kv_usage);
  byId("kv-meter").value = live.kv_usage;
  byId("hits").textContent = live.prefix_hit_rate === null ? "–" : percent(live.prefix_hit_rate);
  byId("hits-meter").value = live.prefix_hit_rate ?? 0;
  byId("rpm").textContent = `${live.rpm.received.toFixed(0)} in, ${live.rpm.completed.toFixed(0)} out`;
  const share = live.good_share === null ? "" : ` (${percent(live.good_share)})`;
  byId("goodput").textContent = live.slo ? live.rpm.good.toFixed(0) + share : "–";
  byId("good-meter").value = live.slo ? (live.good_share ?? 0) : 0;
  byId("slo").textContent = `${live.slo ? `Good: ${live.slo}` : "No limits for good requests (--slo)"}. p99 from 1,000 requests on.`;
  for (const name of ["ttft", "publish", "tpot", "stall"]) quantiles(name, live[`${name}_s`]);
  spark(byId("rate-line"), rates.output, live.output_tok_s);
  spark(byId("prompt-line"), rates.prompt, live.prompt_tok_s);
  roofline.take(live.roof, live.levels, live.points);
}

function setStatus(state, text) {
  const status = byId("status");
  if (status.textContent !== text) status.textContent = text;
  status.dataset.state = state;
}

const rate = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(1));
const percent = (share) => `${(share * 100).toFixed(0)}%`;

function quantiles(id, values) {
  const cells = byId(id).querySelectorAll("td");
  ["p50", "p90", "p95", "p99"].forEach((name, index) => {
    cells[index].textContent = values[name] === undefined ? "–" : seconds(values[name]);
  });
}

function seconds(value) {
  if (value < 0.01) return `${(value * 1e3).toFixed(2)} ms`;
  return value < 1 ? `${(value * 1e3).toFixed(0)} ms` : `${value.toFixed(2)} s`;
}

function spark(svg, values, value) {
  values.push(value);
  if (values.length > KEPT) values.shift();
  const top = Math.max(...values, 1e-9);
  const points = values.map((v, i) => `${i},${(25 - (v / top) * 23).toFixed(2)}`);
  svg.setAttribute("viewBox", `0 0 ${KEPT} 26`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.innerHTML = `<path d="M${points.join("L")}"/>`;
}
