// Timeline: bars over wall time that show what each worker did, which worker the others waited for, and faults and recoveries.

import { ask } from "./ask.js";
import { KINDS, SETTINGS, layout, plotly, theme } from "./chart.js";
import { badge, clock, duration, el, message, plain, replace, shown } from "./dom.js";
import { address, changed, go } from "./route.js";

const ROW = 34; // height of a lane in pixels

function bars(answer) {
  const kinds = [...new Set(answer.spans.map((span) => span[4]))].sort((a, b) => Object.keys(KINDS).indexOf(a) - Object.keys(KINDS).indexOf(b));
  return kinds.map((kind) => {
    const spans = answer.spans.filter((span) => span[4] === kind);
    return {
      type: "bar", orientation: "h", name: kind, y: spans.map((span) => plain(span[0])), base: spans.map((span) => new Date(span[2] * 1000)),
      x: spans.map((span) => Math.max((span[3] - span[2]) * 1000, 1)), marker: { color: KINDS[kind] || KINDS.other, line: { width: 0 } }, width: kind === "wait" ? 0.3 : 0.72,
      customdata: spans.map((span) => [plain(span[1]), span[5] === null ? "" : `step ${span[5]}`, duration(span[3] - span[2]), plain(span[6])]),
      hovertemplate: "<b>%{customdata[0]}</b> %{customdata[1]}<br>%{customdata[2]}<br>%{customdata[3]}<extra>%{y}</extra>",
    };
  });
}

function marks(answer) {
  const shapes = answer.marks.map((mark) => ({ type: "line", x0: new Date(mark.at_s * 1000), x1: new Date(mark.at_s * 1000), yref: "paper", y0: 0, y1: 1, line: { color: mark.kind === "fault" ? "#d0485a" : mark.kind === "recovery" ? "#3a9d5d" : "#8a94a3", width: mark.kind === "note" ? 1 : 2, dash: "dot" } }));
  const lane = (mark) => plain(mark.lane !== null && answer.lanes.includes(mark.lane) ? mark.lane : answer.lanes[0]);
  const trace = {
    type: "scatter", mode: "markers", name: "marks", x: answer.marks.map((mark) => new Date(mark.at_s * 1000)), y: answer.marks.map(lane), showlegend: false,
    marker: { symbol: answer.marks.map((mark) => (mark.kind === "fault" ? "x" : mark.kind === "recovery" ? "triangle-up" : "circle")), size: 12, color: answer.marks.map((mark) => (mark.kind === "fault" ? "#d0485a" : mark.kind === "recovery" ? "#3a9d5d" : "#8a94a3")), line: { width: 1, color: theme().card } },
    text: answer.marks.map((mark) => plain(`${mark.name}${mark.note ? ": " + mark.note.slice(0, 160) : ""}`)), hovertemplate: "%{text}<extra></extra>",
  };
  return { shapes, trace };
}

function waitedFor(answer) {
  const found = new Map();
  for (const [lane, name, start, end, kind, step, text] of answer.spans) {
    const match = /^waited for ([^;]+)/.exec(text);
    if (lane !== answer.lanes[0] || !match) continue;
    const before = found.get(match[1]) || { times: 0, seconds: 0 };
    found.set(match[1], { times: before.times + 1, seconds: before.seconds + end - start });
  }
  return [...found].sort((one, other) => other[1].times - one[1].times);
}

function tables(answer) {
  const busy = new Map(answer.lanes.map((lane) => [lane, new Map()]));
  for (const [lane, , start, end, kind] of answer.spans) busy.get(lane)?.set(kind, (busy.get(lane).get(kind) || 0) + end - start);
  const kinds = Object.keys(KINDS).filter((kind) => [...busy.values()].some((own) => own.get(kind)));
  const lanes = el("section", { class: "card scroll wide" }, el("h3", {}, "Where the time went"), el("table", {},
    el("thead", {}, el("tr", {}, el("th", {}, "lane"), el("th", { title: "share of the time without work" }, "idle"), kinds.map((kind) => el("th", {}, kind)))),
    el("tbody", {}, answer.lanes.map((lane) => el("tr", {}, el("td", {}, shown(lane)), el("td", { class: "number" }, answer.idle[lane] === undefined ? "" : `${(100 * answer.idle[lane]).toFixed(0)} %`), kinds.map((kind) => el("td", { class: "number" }, busy.get(lane).get(kind) ? duration(busy.get(lane).get(kind)) : "")))))));
  const waited = waitedFor(answer);
  const whom = el("section", { class: "card scroll" }, el("h3", {}, "Workers that others waited for"), waited.length
    ? el("table", {}, el("thead", {}, el("tr", {}, ["worker", "times", "phase time"].map((text) => el("th", {}, text)))), el("tbody", {}, waited.slice(0, 20).map(([lane, one]) => el("tr", {}, el("td", {}, shown(lane)), el("td", { class: "number" }, one.times), el("td", { class: "number" }, duration(one.seconds))))))
    : el("p", { class: "soft" }, "No phase recorded a worker that others waited for."));
  const happened = el("section", { class: "card scroll", id: "marks" }, el("h3", {}, "Faults and recoveries"), answer.marks.length
    ? el("table", {}, el("tbody", {}, answer.marks.map((mark) => el("tr", {}, el("td", { class: "soft small" }, clock(mark.at_s)), el("td", {}, badge(mark.kind, mark.kind === "fault" ? "bad" : mark.kind === "recovery" ? "good" : "")), el("td", {}, el("b", {}, shown(mark.name)), mark.lane ? [" ", ...shown(mark.lane)] : "", mark.note ? el("div", { class: "soft small" }, shown(mark.note)) : "")))))
    : el("p", { class: "soft" }, "None in these steps."));
  return el("div", { class: "three" }, lanes, happened, whom);
}

export async function show(page, context) {
  const { asked } = context;
  const run = context.ids[0];
  const aborter = new AbortController();
  const load = () => ask("timeline", { run, first: asked.get("first"), last: asked.get("last") }, aborter.signal);
  let answer = await load();
  if (!context.current()) return null;
  const live = asked.get("first") === null && asked.get("last") === null;
  const plot = el("div", { class: "gantt" });
  const below = el("div");
  const empty = el("div");
  const said = el("span", { class: "soft" });

  function draw() {
    const found = answer.spans.length > 0;
    plot.hidden = below.hidden = !found;
    replace(empty, found ? [] : message("Nothing to show", "These steps have no recorded events. Choose other steps, or wait for the first events."));
    if (!found) return;
    const { shapes, trace } = marks(answer);
    const lanes = [...answer.lanes].reverse().map(plain);
    plot.style.height = `${Math.min(Math.max(answer.lanes.length * ROW + 110, 220), 1400)}px`;
    plotly().react(plot, [...bars(answer), trace], layout({
      barmode: "overlay", bargap: 0.2, hovermode: "closest", showlegend: true, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 }, shapes, dragmode: "pan",
      xaxis: { type: "date" }, yaxis: { categoryorder: "array", categoryarray: lanes, fixedrange: true, range: [-0.6, lanes.length - 0.4] },
      margin: { l: 130, r: 14, t: 34, b: 34 }, uirevision: live ? `live ${answer.first}` : "kept",
    }), { ...SETTINGS, scrollZoom: true });
    replace(below, tables(answer));
    said.textContent = answer.left_out ? `${answer.left_out.toLocaleString("en")} of the shortest spans are left out.` : "";
  }

  const first = el("input", { type: "number", min: 0, value: answer.first ?? "", "aria-label": "First step" });
  const last = el("input", { type: "number", min: 0, value: answer.last ?? "", placeholder: "newest", "aria-label": "Last step" });
  const apply = () => go(address("timeline", { run, first: first.value, last: last.value }));
  first.addEventListener("change", apply);
  last.addEventListener("change", apply);
  const span = answer.last !== null && answer.first !== null ? answer.last - answer.first + 1 : 8;
  const shift = (offset) => {
    const end = (answer.last ?? answer.newest + 1) + offset;
    go(address("timeline", { run, first: Math.max(end - span + 1, 0), last: Math.max(end, 0) }));
  };
  replace(page,
    el("div", { class: "bar" }, el("h1", {}, "Timeline"), el("label", {}, "steps ", first), el("label", {}, "to ", last),
      el("button", { onclick: () => shift(-span) }, "‹ earlier"), el("button", { onclick: () => shift(span), disabled: live }, "later ›"),
      live ? badge("newest steps", "good") : el("a", { class: "button", href: address("timeline", { run }) }, "newest steps"), said, el("span", { class: "grow" }),
      el("span", { class: "soft small" }, "drag to move, scroll to zoom")),
    empty, el("div", { class: "card" }, plot), below);
  draw();
  return {
    async refresh() { if (live) { answer = await load(); if (context.current()) draw(); } },
    close() { aborter.abort(); plotly().purge(plot); },
  };
}
