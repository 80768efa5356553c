// Draws what /events says. Text only ever becomes text: nothing here makes markup from data.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const find = (id) => document.getElementById(id);
const count = (number) => number.toLocaleString("en", { maximumFractionDigits: number < 100 ? 1 : 0 });
const short = (peer) => "…" + peer.slice(-8);

function make(name, attributes, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

function draw(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function chart(id, lines, meaning, floor = Infinity) {
  const svg = find(id), title = svg.querySelector("title");
  const points = lines.flatMap((line) => line.points);
  svg.replaceChildren(title);
  if (!points.length) return;
  const left = 84, right = 590, top = 12, bottom = 228;
  const steps = points.map((point) => point[0]), values = points.map((point) => point[1]);
  const first = Math.min(...steps), last = Math.max(first + 1, ...steps);
  const low = Math.min(floor, ...values), high = Math.max(...values, low + 1e-9);
  const x = (step) => left + ((step - first) / (last - first)) * (right - left);
  const y = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  for (const share of [0, 0.5, 1]) {
    const value = low + share * (high - low);
    svg.append(draw("line", { x1: left, x2: right, y1: y(value), y2: y(value) }));
    const text = high >= 100 ? count(value) : value.toFixed(2);
    svg.append(draw("text", { x: left - 6, y: y(value) + 5, "text-anchor": "end" }, text));
  }
  svg.append(draw("text", { x: left, y: 250 }, count(first)));
  svg.append(draw("text", { x: right, y: 250, "text-anchor": "end" }, count(last)));
  for (const line of lines) {
    if (!line.points.length) continue;
    const path = line.points.map(([step, value], at) => `${at ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`);
    svg.append(draw("path", { d: path.join(""), class: line.kind }));
    if (line.kind === "two") {
      for (const [step, value] of line.points) svg.append(draw("circle", { cx: x(step), cy: y(value), r: 3.5 }));
    }
  }
  title.textContent = meaning;
}

function rows(id, entries, nothing, columns) {
  const body = find(id);
  const made = entries.map((entry) => make("tr", {}, ...columns(entry).map((cell) => make("td", {}, cell))));
  const width = body.parentElement.querySelectorAll("th").length;
  body.replaceChildren(...(made.length ? made : [make("tr", {}, make("td", { colspan: width }, nothing))]));
}

function word(state) {
  return state.local_steps > 1 ? "window" : "step";
}

function spread(of) {
  const share = (number) => `${(100 * number).toFixed(1)}`;
  return of.reporters ? `${share(of.median_share)} / ${share(of.share_of_two)} / ${share(of.largest_share)} %` : "–";
}

function links([direct, punched, relayed]) {
  const told = [[direct, "direct"], [punched, "punched"], [relayed, "relayed"]];
  return told.filter(([number]) => number).map(([number, way]) => `${count(number)} ${way}`).join(", ") || "–";
}

function figures(state) {
  const loss = state.loss.at(-1), held = state.held_out.at(-1);
  const shown = {
    [word(state)]: `${count(state.version)} of ${count(state.total_steps)}${state.local_steps > 1 ? `, of ${count(state.local_steps)} inner steps` : ""}`,
    "training loss": loss ? loss[1].toFixed(3) : "–",
    "held-out loss": held ? held[1].toFixed(3) : "–",
    "tokens": count(state.tokens),
    "tokens a second": count(state.tokens_per_s),
    "peers": count(state.stages.reduce((sum, stage) => sum + stage.replicas, 0)),
  };
  const pairs = Object.entries(shown).map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value)));
  find("figures").replaceChildren(...pairs);
}

function noted(notice) {
  if (!notice) return ["nothing so far"];
  const where = notice.stage === null ? "" : `, stage ${notice.stage}`;
  const more = notice.num_peers - notice.peers.length;
  const peers = notice.peers.map(short).join(", ") + (more ? ` and ${count(more)} more` : "");
  const work = notice.num_microbatches ? `; in ${count(notice.num_microbatches)} microbatches` : "";
  return [make("span", { class: "bad" }, notice.kind.replaceAll("_", " ")),
    ` at step ${count(notice.step)}${where}: ${notice.reason}${work}${peers ? `; peers ${peers}` : ""}`];
}

function show(state) {
  document.title = `${state.name}: ${word(state)} ${state.version}`;
  find("name").textContent = state.name;
  find("run").textContent = state.run_id.slice(0, 16);
  find("key").textContent = state.run_key;
  const share = Math.min(100, (100 * state.version) / state.total_steps);
  const missing = state.stages.filter((stage) => stage.missing).map((stage) => `${stage.missing} for stage ${stage.stage}`);
  find("progress").textContent = state.begun
    ? [`${word(state)} ${count(state.version)} of ${count(state.total_steps)}`, state.waits_for].filter(Boolean).join(": ")
    : `waiting for peers: ${missing.join(", ")}`;
  find("amended").textContent = state.amendments.map((one) => `amended at step ${one.version}: ${one.changes.join("; ")}`).join(". ");
  find("bar").setAttribute("aria-valuenow", share.toFixed(0));
  find("done").setAttribute("width", share);
  figures(state);
  const loss = state.loss.at(-1), speed = state.speed.at(-1);
  find("reference").hidden = !state.reference.length;
  chart("loss", [{ points: state.loss, kind: "one" }, { points: state.held_out, kind: "two" }, { points: state.reference, kind: "three" }],
    loss ? `training loss ${state.loss[0][1].toFixed(2)} at step ${state.loss[0][0]}, ${loss[1].toFixed(2)} at step ${loss[0]}` : "no loss yet");
  chart("speed", [{ points: state.speed, kind: "one" }], speed ? `${count(speed[1])} tokens a second at step ${speed[0]}` : "no step yet", 0);
  rows("stages", state.stages, "none", (stage) => [
    String(stage.stage), String(stage.replicas), String(stage.version),
    stage.busy === null ? "–" : `${(100 * stage.busy).toFixed(0)} %`, links(stage.links),
    stage.missing ? make("span", { class: "bad" }, `${stage.missing} more wanted`)
      : stage.bottleneck ? make("span", { class: "bad" }, "bottleneck") : "",
  ]);
  rows("leaders", state.leaders, "nobody yet", (leader) => [
    String(leader.rank), make("code", { title: leader.peer }, short(leader.peer)), count(leader.tokens), count(leader.steps),
  ]);
  rows("scores", state.scores, "none tried", (score) => [
    String(score.version), score.task, score.metric, score.value.toFixed(4),
  ]);
  rows("audits", state.audits, "none yet", (pair) => [
    pair.auditor, pair.audited || "not said", String(pair.reporters),
    ...["activation", "gradient", "contribution"].map((kind) => spread(pair[kind])),
  ]);
  const changed = Object.entries(state.bounds).filter(([, factor]) => factor !== 1);
  find("bounds").textContent = changed.map(([kind, factor]) => `The run's owner has set what ${kind}s may be off to ${factor} times the usual.`).join(" ");
  rows("bans", state.shut_out, "nobody", (ban) => [
    make("code", { title: ban.peer }, short(ban.peer)), `${ban.verdict}: ${ban.kind.replaceAll("_", " ")}`,
    `${ban.stage}, ${ban.step}`,
    ban.evidence ? make("a", { href: `/evidence/${ban.evidence}`, download: "" }, "download") : "–",
  ]);
  find("notices").replaceChildren(...(state.notices.length ? state.notices : [null]).map((notice) => make("li", {}, ...noted(notice))));
  const open = new Set([...document.querySelectorAll("details[open]")].map((item) => item.dataset.version));
  find("checkpoints").replaceChildren(...(state.checkpoints.length ? state.checkpoints.map((one) => {
    const bytes = one.files.reduce((sum, file) => sum + file.bytes, 0);
    const links = one.files.map((file) => make("li", {}, make("a", { href: `/checkpoints/${one.version}/${file.name}`, download: "" }, file.name),
      ` ${(file.bytes / 1e6).toFixed(1)} MB`));
    const details = make("details", { "data-version": one.version },
      make("summary", {}, `version ${one.version}, ${(bytes / 1e6).toFixed(1)} MB${one.anchored ? "" : ", not anchored"}`), make("ul", {}, ...links));
    details.open = open.has(String(one.version));
    return details;
  }) : ["none yet"]));
}

// What has the focus keeps it: a page that redraws under a keyboard is no use.
let waiting = null;
function take(state) {
  const busy = document.activeElement && document.activeElement.closest("#checkpoints, #bans a");
  if (busy) { waiting = state; return; }
  waiting = null;
  show(state);
}
document.addEventListener("focusout", () => { if (waiting) setTimeout(() => waiting && take(waiting), 0); });

const events = new EventSource("/events");
events.onopen = () => { find("live").textContent = "live"; };
events.onerror = () => { find("live").textContent = "the host does not answer; trying again"; };
events.onmessage = (event) => { find("live").textContent = "live"; take(JSON.parse(event.data)); };
