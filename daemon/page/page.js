
"use strict";
// Draws what the feed sends. Nothing here parses markup: names of models are always inserted as text, and the page's policy forbids
// the sinks that would parse them.

const WINDOWS_S = [60, 120, 300, 600], SPARK_S = 300, MAX_EVENTS = 200, SILENT_MS = 20000, HIDDEN_MS = 30000, LANES = 14;
const KEPT = "hearth.key";
const $ = (id) => document.getElementById(id);

function h(tag, props, ...children) {
  const node = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4)) : document.createElement(tag);
  for (const [name, value] of Object.entries(props || {})) {
    if (name === "style") for (const [key, text] of Object.entries(value)) node.style.setProperty(key, text);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}
const setText = (node, text) => { if (node.textContent !== text) node.textContent = text; };

// ---- words

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (count >= 1024 && at < units.length - 1) { count /= 1024; at++; }
  return `${at === 0 || count >= 100 ? Math.round(count) : count.toFixed(1)} ${units[at]}`;
}
function duration(seconds) {
  seconds = Math.max(0, Math.round(seconds));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor(seconds % 86400 / 3600)} h`;
}
const rate = (value) => value >= 100 ? Math.round(value).toLocaleString("en") : value >= 10 ? value.toFixed(0) : value > 0 ? value.toFixed(1) : "0";
const clock = (unix) => new Date(unix * 1000).toTimeString().slice(0, 8);
const several = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
const shortName = (name) => name.slice(name.lastIndexOf("/") + 1);

const colours = new Map(); // model -> its colour, by order of appearance; kept while the page is open
function colour(model) {
  if (!colours.has(model)) colours.set(model, `var(--c${colours.size % 8})`);
  return { "--c": colours.get(model) };
}
const KIND = { ready: "good", loading: "busy", draining: "busy", paused: "busy", failed: "bad", refused: "bad", incomplete: "bad", warm: "calm", cold: "calm", head: "calm", disabled: "calm", up: "good", unknown: "busy", down: "bad" };
const ON_DEVICE = ["loading", "ready", "draining"];

// ---- figures

let samples = []; // [Unix time, requests ended and tokens generated since the daemon's start, requests open]
/** Returns the shortest window, in seconds, that shows all since the daemon's start, or `longest` seconds. */
const windowOf = (state, longest) => WINDOWS_S.find((seconds) => seconds >= Math.min(longest, state.time - state.node.started));
function rates(column, from) {
  const points = [];
  for (let at = 1; at < samples.length; at++) {
    const [before, after] = [samples[at - 1], samples[at]];
    const seconds = after[0] - before[0];
    if (seconds > 0 && after[column] >= before[column] && after[0] > from)
      points.push([Math.max(before[0], from), after[0], (after[column] - before[column]) / seconds]);
  }
  return points;
}
function current(points, now) { // over the last three seconds
  let amount = 0, span = 0;
  for (const [from, to, value] of points.slice(-8)) {
    const seconds = to - Math.max(from, now - 3);
    if (seconds > 0) { amount += value * seconds; span += seconds; }
  }
  return span ? amount / span : 0;
}
function levels(column, from) {
  return samples.slice(1).map((sample, at) => [Math.max(samples[at][0], from), sample[0], sample[column]]).filter((point) => point[1] > from);
}
function spark(place, points, now, span, what) {
  const peak = Math.max(...points.map((point) => point[2]), 0);
  const x = (time) => (300 * (1 - (now - time) / span)).toFixed(1), y = (value) => (38 - 34 * value / (peak || 1)).toFixed(1);
  const line = points.map(([from, to, value]) => `${x((from + to) / 2)},${y(value)}`);
  const svg = h("svg:svg", { viewBox: "0 0 300 40", preserveAspectRatio: "none", role: "img", "aria-label": `${what}, the last ${several(span / 60, "minute")}, at most ${rate(peak)}` },
    h("svg:line", { x1: 0, x2: 300, y1: 38.5, y2: 38.5 }));
  if (line.length) {
    const ends = [`${x(points[0][0])},${y(points[0][2])}`, `${x(points.at(-1)[1])},${y(points.at(-1)[2])}`];
    const all = [ends[0], ...line, ends[1]];
    svg.append(h("svg:path", { d: `M${ends[0].split(",")[0]},38.5 L${all.join(" L")} L${ends[1].split(",")[0]},38.5 Z` }), h("svg:polyline", { points: all.join(" ") }));
  }
  place.replaceChildren(svg);
}
function drawTiles(state) {
  const now = state.time, { counters, states, node } = state, span = windowOf(state, SPARK_S);
  for (const [id, column, what] of [["tokens", 2, "Tokens per second"], ["requests", 1, "Requests per second"]]) {
    const points = rates(column, now - span);
    setText($(id), rate(current(points, now)));
    spark($(`${id}-line`), points, now, span, what);
  }
  spark($("open-line"), levels(3, now - span), now, span, "Requests open");
  for (const place of document.querySelectorAll(".span")) setText(place, `${span / 60} min`);
  setText($("open"), counters.open.toLocaleString("en"));
  setText($("queued"), counters.queued ? `${counters.queued.toLocaleString("en")} queued` : "");
  const total = Object.values(states).reduce((sum, count) => sum + count, 0);
  $("loaded").replaceChildren(String(states.ready || 0), h("small", {}, ` of ${total.toLocaleString("en")}`));
  const ranked = Object.entries(states).sort((a, b) => RANK[a[0]] - RANK[b[0]]);
  $("states-bar").replaceChildren(...ranked.map(([name, count]) => h("i", { class: KIND[name] || "calm", title: `${count} ${name}`, style: { "flex-grow": String(count) } })));
  setText($("states"), ranked.filter(([name]) => name !== "ready").map(([name, count]) => `${count} ${name}`).join(" · "));
  setText($("uptime"), `up ${duration(now - node.started)}`);
}

// ---- memory

const WORDS = { weights: "weights", kv: "KV in use", cache: "prefix cache", reserved: "KV reserved" };
function drawDevice(device) {
  const budget = device.budget_bytes, free = device.parts.filter((part) => part.kind === "free").reduce((sum, part) => sum + part.bytes, 0);
  const byModel = new Map();
  for (const part of device.parts) if (part.model) byModel.set(part.model, [...byModel.get(part.model) || [], part]);
  const stack = h("div", { class: "stack", role: "img", "aria-label": `Memory of ${device.name}: ${bytes(budget - free)} of ${bytes(budget)} given out` });
  for (const part of device.parts) {
    const share = part.bytes / budget, name = part.model ? `${part.model}: ${WORDS[part.kind]}` : part.kind === "work" ? "work space" : "free";
    const style = part.model ? colour(part.model) : {};
    if (part.kind !== "free") style.width = `${(100 * share).toFixed(3)}%`;
    stack.append(h("div", { class: `part ${part.kind}`, title: `${name}, ${bytes(part.bytes)}`, style }, part.kind === "weights" && share > .12 ? h("span", {}, shortName(part.model)) : null));
  }
  const legend = h("ul", { class: "legend" });
  const item = (dot, style, name, text) => legend.append(h("li", {}, h("i", { class: `dot ${dot}`, style, "aria-hidden": "true" }), h("b", {}, name), h("span", { class: "dim" }, text)));
  for (const [model, parts] of byModel) item("", colour(model), model, parts.map((part) => `${WORDS[part.kind]} ${bytes(part.bytes)}`).join(" · "));
  for (const part of device.parts) if (part.kind === "work" && part.bytes) item("work", {}, "Work space", `${bytes(part.bytes)} for a step's activations`);
  if (device.parts.length) item("free", {}, "Free", `${bytes(free)} for KV and the next model`);
  const engine = device.up ? "engine up" : "engine down";
  return h("article", { class: "card device" },
    h("header", {}, h("h3", {}, device.name), h("span", { class: `pill ${device.up ? "good" : "bad"}` }, engine), device.restarts ? h("span", { class: "pill busy" }, several(device.restarts, "restart")) : null,
      h("span", { class: "dim" }, device.parts.length ? `${bytes(budget - free)} of ${bytes(budget)}` : bytes(budget))),
    stack, legend, device.problem ? h("p", { class: "problem" }, device.problem) : null);
}

const HOST_PARTS = [["weights", "weights_bytes", "Warm weights"], ["cache", "kv_bytes", "Saved KV"], ["reserved", "transit_bytes", "Being written"], ["free", "free_bytes", "Free"]];
function drawHost(host) {
  const parts = HOST_PARTS.filter(([kind, field]) => host[field] || kind === "free");
  const stack = h("div", { class: "stack", role: "img", "aria-label": `Host memory: ${bytes(host.bytes - host.free_bytes)} of ${bytes(host.bytes)} in use` });
  for (const [kind, field, name] of parts) stack.append(h("div", { class: `part ${kind}`, title: `${name}, ${bytes(host[field])}`, style: kind === "free" ? {} : { width: `${(100 * host[field] / host.bytes).toFixed(3)}%` } }));
  const legend = h("ul", { class: "legend" }, ...parts.map(([kind, field, name]) => h("li", {}, h("i", { class: `dot ${kind}`, "aria-hidden": "true" }), h("b", {}, name), h("span", { class: "dim" }, bytes(host[field])))));
  return h("article", { class: "card device", id: "host-memory" },
    h("header", {}, h("h3", {}, "Host memory"), h("span", { class: "dim" }, `${bytes(host.bytes - host.free_bytes)} of ${bytes(host.bytes)}`)), stack, legend);
}

/** Updates a node's children by key. A child is made anew only if what it shows has changed, so a selection or the focus in it stays. */
function keyed(place, items, key, draw) {
  const old = place.keyed || new Map(), now = new Map();
  for (const item of items) {
    const text = JSON.stringify(item), before = old.get(key(item));
    now.set(key(item), before && before.text === text ? before : { text, node: draw(item) });
  }
  place.keyed = now;
  const nodes = [...now.values()].map((each) => each.node);
  if (nodes.length !== place.childNodes.length || nodes.some((node, at) => node !== place.childNodes[at])) place.replaceChildren(...nodes);
}

// ---- models

const RANK = { ready: 0, loading: 1, draining: 2, paused: 3, failed: 4, warm: 5, cold: 6, incomplete: 7, refused: 8, head: 9, disabled: 10, up: 3, unknown: 3, down: 4 }; // up, unknown, down: another server answers
function drawModel(row) {
  const loaded = ON_DEVICE.includes(row.state), kind = KIND[row.state] || "calm";
  const cell = (label, text, number = true) => h("td", { class: `${number ? "number" : ""} ${label === "Weights" || label === "Last used" ? "" : "live"}`, "data-label": label }, text);
  const state = h("td", { class: "state" }, h("span", { class: `pill ${kind}` }, row.state));
  if (row.bytes_total) state.append(h("progress", { max: row.bytes_total, value: row.bytes_done, "aria-label": `loading ${row.name}` }));
  const name = h("th", { scope: "row" }, h("div", { class: "name" }, loaded ? h("i", { class: "dot", style: colour(row.name), "aria-hidden": "true" }) : null, row.name, row.pinned ? h("span", { class: "badge" }, "pinned") : null));
  const telling = kind === "bad" || row.state === "loading" || row.state === "draining" || row.state === "paused" || row.state === "head" || row.state === "disabled";
  if (telling && row.reason) name.append(h("div", { class: `reason ${kind}` }, row.reason.replace(/\d+ bytes \(([\d.]+ [KMGT]iB)\)/g, "$1")));
  if (row.drained) name.append(h("div", { class: "dim" }, "takes no new requests: drained"));
  for (const line of row.lines) name.append(h("div", { class: "dim" }, line));
  if (row.host_bytes && !loaded) name.append(h("div", { class: "dim" }, `${bytes(row.host_bytes)} in host memory`));
  return h("tr", { class: loaded || row.queued ? null : "away" }, name, state, cell("Device", row.device || row.upstream || (row.num_ranks > 1 ? several(row.num_ranks, "device") : "–"), false), cell("Weights", row.weights_bytes ? bytes(row.weights_bytes) : "–"), cell("KV in use", loaded ? bytes(row.kv_bytes) : "–"),
    cell("Active", String(row.active)), cell("Queued", String(row.queued)), cell("Last used", row.last_used === null ? "never" : row.ago));
}
function drawModels(state) {
  const wanted = $("filter").value.trim().toLowerCase();
  const rows = state.models.filter((row) => !wanted || row.name.toLowerCase().includes(wanted) || row.state.includes(wanted));
  rows.sort((a, b) => (RANK[a.state] ?? 10) - (RANK[b.state] ?? 10) || (a.name < b.name ? -1 : 1));
  // rounded, because exact seconds would redraw each row twice a second
  const told = rows.map((row) => ({ ...row, drafted_tokens: 0, accepted_tokens: 0, lines: [...acceptance(row), ...adaptersOf(row)], last_used: row.last_used && 1, ago: row.last_used && ago(state.time - row.last_used) }));
  keyed($("models"), told, (row) => row.name, drawModel);
  const total = Object.values(state.states).reduce((sum, count) => sum + count, 0), left = total - state.models.length;
  $("filter-label").hidden = total < 12;
  $("models-more").hidden = rows.length > 0 && left === 0;
  setText($("models-more"), left ? `${several(left, "cold model")} more: hearth models` : wanted ? "No model is called that." : "No models yet: put a checkpoint's folder below the models folder.");
}
const DRAFTS_S = 10;
let drafts = new Map(); // model -> [[Unix time, tokens drafted, tokens accepted]] of the last seconds, and the last one before them
function noteDrafts(state) {
  const now = new Map();
  for (const { name, drafted_tokens: drafted, accepted_tokens: accepted } of state.models) {
    if (!drafted) continue;
    const all = [...drafts.get(name) || [], [state.time, drafted, accepted]];
    const first = all.findLastIndex(([time]) => time < state.time - DRAFTS_S);
    now.set(name, all.slice(Math.max(0, first)));
  }
  drafts = now;
}
function acceptance({ name }) {
  const points = drafts.get(name) || [], [from, to] = [points[0], points.at(-1)];
  const drafted = points.length ? to[1] - from[1] : 0;
  return drafted > 0 ? [`${Math.round(100 * (to[2] - from[2]) / drafted)} % of drafted tokens accepted`] : [];
}
function adaptersOf({ adapters, num_adapters: total }) {
  const names = Object.keys(adapters || {}).sort(), size = Object.values(adapters || {}).reduce((sum, one) => sum + one, 0);
  return names.length ? [`${names.length} of ${several(total, "adapter")} in memory, ${bytes(size)}: ${names.join(", ")}`] : total ? [`${several(total, "adapter")}, none in memory`] : [];
}
const ago = (seconds) => seconds < 10 ? "now" : seconds < 60 ? `${Math.floor(seconds / 10) * 10} s ago` : `${duration(seconds)} ago`;

// ---- events and the timeline that follows from them

let events = [];
function told(event) { // [badness, what, text]
  const on = event.device ? ` on ${event.device}` : "";
  switch (event.event) {
    case "state": return [["failed", "refused"].includes(event.new) ? "bad" : "", event.model, `${event.old ? `${event.old} → ` : ""}${event.new || "gone"}${ON_DEVICE.includes(event.new) || event.reason ? on : ""}${event.reason ? `: ${event.reason}` : ""}`];
    case "registered": return ["", event.model, `registered: ${(event.text || "").replace(`${event.model}: `, "")}`];
    case "removed": return ["", event.model, "its folder is gone"];
    case "engine": return [event.state === "down" ? "bad" : "", `engine ${event.device}`, event.state === "down" ? `down: ${event.reason}${event.running ? `; ${several(event.running, "request")} ran` : ""}` : `up, process ${event.pid}`];
    case "upstream": return [event.state === "down" ? "bad" : "", event.model, `${event.host} is ${event.state}: ${event.reason}`];
    case "engine_hangs": return ["bad", `engine ${event.device}`, `hangs: ${event.reason}`];
    case "reload": return ["", "settings", `read again: ${event.applied.join(", ") || "nothing changed"}${event.needs_restart.length ? `; need a restart: ${event.needs_restart.join(", ")}` : ""}`];
    default: {
      const { time, event: kind, model, device, ...rest } = event;
      return ["", model || device || kind, `${kind} ${Object.entries(rest).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ")}`];
    }
  }
}
function drawEvent(event) {
  const [bad, what, text] = told(event);
  return h("li", { class: bad || null }, h("time", { datetime: new Date(event.time * 1000).toISOString() }, clock(event.time)),
    h("div", {}, h("b", {}, what), " ", h("span", {}, text)), event.cause ? h("code", { title: "cause" }, event.cause) : h("span"));
}
let numTold = 0;
function addEvents(more) {
  for (const event of more) event.id = ++numTold;
  events = [...events, ...more].slice(-1000);
  // these would be shown twice: the states show loads and evictions, and its registration shows a new model's first state
  const shown = events.filter((event) => event.event === "state" ? event.old || event.new !== "cold" : !["loaded", "evicted"].includes(event.event)).slice(-MAX_EVENTS).reverse();
  keyed($("events"), shown, (event) => event.id, drawEvent);
}
const devicesOf = (name) => name.includes("/") ? [name] : name.split("+"); // those of a split model have one name together
function spansOf(state, span_s) { // device -> model -> [{kind, from, to}]
  const start = state.time - span_s, lanes = new Map(state.devices.map((device) => [device.name, new Map()])), open = new Map(), seen = new Set();
  const add = (span, to) => {
    for (const models of devicesOf(span.device).map((name) => lanes.get(name)))
      if (models && to >= start) models.set(span.model, [...models.get(span.model) || [], { ...span, from: Math.max(span.from, start), to }]);
  };
  for (const event of events) {
    if (event.event === "engine" && event.state === "down") {
      for (const [model, span] of [...open]) if (devicesOf(span.device).includes(event.device)) { add(span, event.time); open.delete(model); }
    }
    if (event.event !== "state") continue;
    const before = open.get(event.model), device = event.device || (before && before.device);
    if (before) { add(before, event.time); open.delete(event.model); }
    else if (!seen.has(event.model) && ON_DEVICE.includes(event.old) && event.old !== "loading" && device) add({ model: event.model, device, kind: event.old, from: start }, event.time); // it was on the device before the first event
    if (ON_DEVICE.includes(event.new) && device) open.set(event.model, { model: event.model, device, kind: event.new, from: event.time });
    seen.add(event.model);
  }
  for (const row of state.models) {
    if (!ON_DEVICE.includes(row.state) || !row.device) continue;
    const span = open.get(row.name);
    add(span && span.device === row.device ? span : { model: row.name, device: row.device, kind: row.state, from: start }, state.time);
  }
  return lanes;
}
let drawnTimeline = "";
function drawTimeline(state) {
  const span_s = windowOf(state, 600), lanes = spansOf(state, span_s), end = state.time, percent = (time) => 100 * (1 - (end - time) / span_s);
  const signature = `${Math.floor(end / 2)} ${events.length && events.at(-1).id} ${state.devices.map((device) => device.name)}`;
  if (signature === drawnTimeline) return;
  drawnTimeline = signature;
  $("timeline").replaceChildren(...state.devices.map((device) => {
    const models = [...lanes.get(device.name)].sort((a, b) => b[1].at(-1).to - a[1].at(-1).to || a[1][0].from - b[1][0].from);
    const card = h("article", { class: "card lanes" }, h("header", {}, h("h3", {}, device.name), h("span", { class: "dim" }, models.length > LANES ? `${models.length - LANES} more not shown` : "")));
    const downs = events.filter((event) => event.event === "engine" && event.state === "down" && event.device === device.name && event.time > end - span_s);
    for (const [model, spans] of models.slice(0, LANES)) {
      const words = spans.map((span) => `${span.kind} ${clock(span.from)} to ${span.to >= end - 1 ? "now" : clock(span.to)}`).join(", ");
      const track = h("div", { class: "track", role: "img", "aria-label": `${model}: ${words}` });
      for (const span of spans)
        track.append(h("i", { class: `bar ${span.kind}`, title: `${model}: ${span.kind}, ${duration(span.to - span.from)}`, style: { ...colour(model), left: `${percent(span.from)}%`, width: `${percent(span.to) - percent(span.from)}%` } }));
      for (const down of downs) track.append(h("i", { class: "down", title: `engine down at ${clock(down.time)}`, style: { left: `${percent(down.time)}%` } }));
      card.append(h("div", { class: "lane" }, h("span", { title: model }, shortName(model)), track));
    }
    card.append(models.length ? h("div", { class: "axis", "aria-hidden": "true" }, ...[`−${duration(span_s)}`, `−${duration(span_s / 2)}`, "now"].map((text) => h("span", {}, text))) : h("p", { class: "dim" }, "Nothing was loaded here."));
    return card;
  }));
}

// ---- the whole

let last = null;
function draw() {
  if (last === null) return;
  drawTiles(last);
  const shown = last.host_tier.bytes ? [...last.devices, last.host_tier] : last.devices;
  keyed($("devices"), shown, (one) => one.name || "", (one) => one.name ? drawDevice(one) : drawHost(one));
  drawModels(last);
  drawTimeline(last);
}
function onSnapshot(state) {
  addEvents(state.events);
  if (!samples.length || state.time - samples.at(-1)[0] >= .9) samples.push([state.time, state.counters.requests, state.counters.tokens, state.counters.open]);
  samples = samples.slice(-400);
  noteDrafts(state);
  last = state;
  $("main").hidden = false;
  const { node } = state;
  if (node.draining) link("busy", "draining");
  else if (!node.healthy) link("bad", "failing");
  else if (!node.ready) link("busy", node.reason || "not ready");
  else link("good", "live");
  draw();
}
let pageId = "";
function onHello(hello) {
  if (pageId && pageId !== hello.page) return location.reload(); // the daemon has another version of this page: load that
  pageId = hello.page;
  events = [];
  samples = hello.samples;
  addEvents(hello.events);
}

// ---- the connection to the daemon

function link(kind, text) {
  $("link").className = `pill ${kind}`;
  setText($("link"), text);
}
function gone(why) {
  $("notice").hidden = false;
  setText($("notice"), `${why}${last ? ` What you see is from ${clock(last.time)}.` : ""} Trying again by itself.`);
  $("main").classList.add("stale");
  link("bad", "gone");
}
function askKey(why) {
  sessionStorage.removeItem(KEPT);
  last = null;
  for (const [id, hidden] of [["login", false], ["main", true], ["notice", true], ["forget", true]]) $(id).hidden = hidden;
  setText($("login-why"), why);
  link("calm", "key needed");
  $("key").focus();
}
/** Reads one connection to its end. Returns why it ended, or null if a key is asked for. */
async function follow(abort) {
  const key = sessionStorage.getItem(KEPT);
  // without credentials, so that the browser does not put its own password window over the form
  const answer = await fetch("/status/events", { headers: key ? { Authorization: `Bearer ${key}` } : {}, credentials: "omit", cache: "no-store", signal: abort.signal });
  if (answer.status === 401) return askKey(key ? "This key is not known here." : "Its tenants' keys open this page."), null;
  if (answer.status === 403 && key) return askKey("This key is known, but only keys of a tenant with admin = true open this page."), null;
  if (!answer.ok) {
    const error = await answer.json().then((body) => body.error.message, () => "");
    return `The node answers ${answer.status}. ${error}`;
  }
  for (const [id, hidden] of [["login", true], ["notice", true], ["forget", !key]]) $(id).hidden = hidden;
  $("main").classList.remove("stale");
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  let left = "", timer = 0;
  const watch = () => { clearTimeout(timer); timer = setTimeout(() => abort.abort(), SILENT_MS); };
  try {
    for (;;) {
      watch();
      const { done, value } = await reader.read();
      if (done) return "hearthd has closed the connection.";
      const parts = (left + decoder.decode(value, { stream: true })).split("\n\n");
      left = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n"), field = (name) => lines.filter((line) => line.startsWith(`${name}: `)).map((line) => line.slice(name.length + 2)).join("\n");
        const kind = field("event");
        if (kind === "bye") return "hearthd has stopped.";
        try {
          if (kind === "hello") onHello(JSON.parse(field("data")));
          else if (kind === "snapshot") onSnapshot(JSON.parse(field("data")));
        } catch (error) {
          console.error(error);
          abort.abort();
          return "This page cannot show what the node tells; the browser's console says why.";
        }
      }
    }
  } finally {
    clearTimeout(timer);
  }
}
let connection = null, failures = 0, again = 0;
async function connect() {
  clearTimeout(again);
  if (connection) return;
  const mine = connection = new AbortController();
  let why = "";
  try {
    why = await follow(mine);
    failures = why === null ? 0 : 1;
  } catch (error) {
    why = "hearthd does not answer.";
    failures++;
  }
  if (connection !== mine) return; // ended by disconnect()
  connection = null;
  if (why === null) return;
  gone(why);
  again = setTimeout(connect, Math.min(5000, 500 * 2 ** failures));
}
function disconnect() {
  clearTimeout(again);
  const mine = connection;
  connection = null;
  if (mine) mine.abort();
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEPT, $("key").value.trim());
  $("key").value = "";
  connect();
});
$("forget").addEventListener("click", () => { disconnect(); askKey("The key is forgotten."); });
$("filter").addEventListener("input", () => last && drawModels(last));
// a page that is hidden disconnects, so that it costs nothing
let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(() => { disconnect(); link("calm", "resting"); }, HIDDEN_MS);
  else if (!connection && $("login").hidden) connect();
});
setText($("host"), location.host);
connect();
