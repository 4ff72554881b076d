// The engines behind a router, once a second; a server by itself has no such view.
const byId = (id) => document.getElementById(id);
const PERIOD_MS = 1000;
let shown = null; // the engine whose figures are below
let isWatched = false;

export async function startFleet(engine) {
  shown = engine;
  if (isWatched) return;
  isWatched = true;
  while (true) {
    try {
      const response = await fetch("/fleet/state");
      if (response.ok) show(await response.json());
    } catch (error) {
      byId("fleet-line").textContent = "The router does not answer.";
    }
    await new Promise((resolve) => setTimeout(resolve, PERIOD_MS));
  }
}

function show(fleet) {
  byId("fleet").hidden = false;
  const up = fleet.engines.filter((engine) => engine.up).length;
  const parts = [`${up} of ${fleet.engines.length} engines take requests`];
  if (fleet.starting) parts.push(`${fleet.starting} start`);
  const scaler = fleet.autoscaler;
  if (scaler) parts.push(`${scaler.wanted} of ${scaler.min} to ${scaler.max} are wanted`);
  byId("fleet-line").textContent = parts.join(" · ");
  const small = fleet.cascade.map((engine) => ({ ...engine, name: `small ${engine.name}` }));
  byId("fleet-engines").replaceChildren(...[...fleet.engines, ...small].map(row));
  const last = scaler?.decisions[0];
  const decision = last ? ` ${last.seconds_ago.toFixed(0)} s ago, ${last.present} to ${last.wanted}: ${last.reason}` : "";
  byId("fleet-decision").textContent = `Figures below are of engine ${shown}.${decision}`;
}

function row(engine) {
  const line = document.createElement("tr");
  const name = document.createElement("th");
  name.scope = "row";
  name.textContent = engine.name;
  name.title = engine.url;
  const shares = [engine.kv_usage, engine.hit_rate, engine.busy, engine.mbu].map(percent);
  const cells = engine.up ? [engine.pending, engine.running, ...shares] : [engine.reason];
  line.append(name, ...cells.map((text) => cell(text, engine.up ? 1 : 6)));
  return line;
}

function cell(text, span) {
  const node = document.createElement("td");
  node.textContent = text;
  node.colSpan = span;
  return node;
}

const percent = (share) => (share === null ? "–" : `${(share * 100).toFixed(0)}%`);
