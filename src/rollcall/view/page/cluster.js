// Cluster: where each role runs, what it is doing now, and what the run has written.

import { ask } from "./ask.js";
import { badge, bytes, clock, duration, el, message, number, replace, shown } from "./dom.js";
import { address } from "./route.js";

const KIND = { busy: "good", idle: "", stopped: "warn", silent: "warn", lost: "bad" };

// The last report is outdated if the run has ended or its disk is full.
function stateOf(worker, isNow, isAlive) {
  return isNow || worker.state === "lost" ? worker.state : isAlive ? "not known" : "ended";
}

function slot(one, worker, isNow, isAlive) {
  const state = worker ? stateOf(worker, isNow, isAlive) : "";
  const doing = worker ? (isNow && worker.doing) || state : "";
  return el("div", { class: `slot ${state}`, title: worker ? `${worker.lane}: ${doing}` : "no process was found in this slot" },
    el("div", { class: "soft small" }, `slot ${one.slot}`),
    el("div", { class: "roles" }, (one.roles.length ? one.roles : Object.keys(worker?.roles || {})).map((role) => el("span", { class: `role ${role}` }, role))),
    el("div", { class: "small doing" }, worker ? shown(doing) : "not seen"));
}

function map(answer, isNow, isAlive) {
  const of = new Map(answer.workers.map((worker) => [worker.lane, worker]));
  const missing = new Set(answer.live?.missing_nodes || []);
  const alone = answer.nodes.length === 1 && !answer.nodes[0].address;
  return el("div", { class: "nodes" }, answer.nodes.map((node) => el("section", { class: missing.has(node.node) ? "card node gone" : "card node" },
    el("div", { class: "entry-head" }, el("h3", {}, alone ? "this process" : `node ${node.node}`), el("span", { class: "soft small" }, node.address), el("span", { class: "grow" }), missing.has(node.node) ? badge("missing", "bad") : null),
    el("div", { class: "slots" }, node.slots.map((one) => slot(one, of.get(one.lane) || (alone ? of.get("controller") : undefined), isNow, isAlive))))));
}

function workers(answer, isNow, isAlive, opened) {
  const rows = answer.workers.map((worker) => {
    const since = worker.since_s === null ? "" : duration(Math.max((isNow ? answer.now_s : answer.live.time_s) - worker.since_s, 0));
    const lines = worker.lines.length
      ? el("details", { open: opened.has(worker.lane), ontoggle: (event) => (event.target.open ? opened.add(worker.lane) : opened.delete(worker.lane)) }, el("summary", { class: "small" }, `last ${worker.lines.length} lines`), el("pre", { class: "log", dir: "ltr" }, worker.lines.flatMap((line) => [...shown(line), "\n"])))
      : el("span", { class: "soft small" }, worker.log ? shown(worker.log) : "");
    return el("tr", {},
      el("td", { class: "strong" }, shown(worker.lane)), el("td", {}, badge(stateOf(worker, isNow, isAlive), isNow ? KIND[worker.state] || "" : "")),
      el("td", {}, shown(worker.doing || "–"), worker.why ? el("div", { class: "bad-text small" }, shown(worker.why)) : null), el("td", { class: "number" }, since),
      el("td", { class: "number" }, worker.memory_bytes ? bytes(worker.memory_bytes) : "–", worker.device_bytes ? el("div", { class: "soft small" }, `${bytes(worker.device_bytes)} on the GPU`) : null),
      el("td", { class: "number" }, worker.num_calls ? number(worker.num_calls) : ""), el("td", { class: "number soft" }, worker.pid || ""), el("td", {}, lines));
  });
  const heads = ["worker", "state", "doing", "since", "memory", "calls", "pid", "log"];
  return el("section", { class: "card scroll" }, el("h2", {}, "Workers"), el("table", {}, el("thead", {}, el("tr", {}, heads.map((head) => el("th", {}, head)))), el("tbody", {}, rows)));
}

function disk(answer) {
  const total = Object.entries(answer.sizes).map(([name, count]) => el("tr", {}, el("td", {}, name), el("td", { class: "number" }, bytes(count))));
  const saved = answer.checkpoints.slice().reverse().map((one) => el("tr", {}, el("td", {}, `step ${one.step}`), el("td", { class: "number" }, one.score === null ? "–" : number(one.score)), el("td", { class: "number" }, bytes(one.bytes)), el("td", { class: "soft small" }, clock(one.saved_s)), el("td", {}, one.whole ? "" : badge("torn", "bad"))));
  return [
    el("section", { class: "card" }, el("h3", {}, "On disk"), el("table", {}, total)),
    el("section", { class: "card scroll" }, el("h3", {}, "Checkpoints"), saved.length ? el("table", {}, el("thead", {}, el("tr", {}, ["", "score", "size", "saved", ""].map((head) => el("th", {}, head)))), el("tbody", {}, saved)) : el("p", { class: "soft" }, "None yet.")),
  ];
}

function happened(answer) {
  return el("section", { class: "card scroll" }, el("h3", {}, "Faults and recoveries"), answer.marks.length
    ? el("table", {}, el("tbody", {}, answer.marks.map((mark) => el("tr", {}, el("td", { class: "soft small" }, clock(mark.at_s)), el("td", {}, badge(mark.kind, mark.kind === "fault" ? "bad" : mark.kind === "recovery" ? "good" : "")), el("td", {}, shown(mark.name), mark.lane ? [" ", ...shown(mark.lane)] : "", mark.note ? el("div", { class: "soft small" }, shown(mark.note)) : "")))))
    : el("p", { class: "soft" }, "Nothing was lost."));
}

export async function show(page, context) {
  const run = context.ids[0];
  const aborter = new AbortController();
  const opened = new Set();

  async function draw() {
    const answer = await ask("cluster", { run }, aborter.signal);
    if (!context.current()) return;
    const isNow = answer.live !== null && !answer.live.is_over && !answer.live.is_stale;
    const isAlive = answer.state === "running" || answer.state === "waiting";
    const said = answer.live === null
      ? "This run has not recorded what its processes are doing. The map shows where the run file places its roles."
      : isNow ? `reported ${duration(Math.max(answer.now_s - answer.live.time_s, 0))} ago by the controller on ${answer.live.host}` : `the controller on ${answer.live.host} last reported ${duration(Math.max(answer.now_s - answer.live.time_s, 0))} ago; ${isAlive ? "the run continues, but has written no report since then" : "nothing is running now"}`;
    replace(page,
      el("div", { class: "bar" }, el("h1", {}, "Cluster"), el("span", { class: "soft" }, shown(said))),
      answer.problem ? el("p", { class: "bad-text" }, shown(answer.problem)) : null,
      answer.nodes.length ? map(answer, isNow, isAlive) : message("No placement", "The run file cannot be read, so the placement is unknown."),
      answer.workers.length ? workers(answer, isNow, isAlive, opened) : null,
      el("div", { class: "three" }, disk(answer), happened(answer)));
  }

  await draw();
  return { refresh: draw, close() { aborter.abort(); } };
}
