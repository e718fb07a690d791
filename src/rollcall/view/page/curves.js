// Curves: every metric of one or more runs. Zooming in one chart zooms all of them.

import { ask } from "./ask.js";
import { SETTINGS, colour, faint, layout, plotly } from "./chart.js";
import { el, message, number, plain, replace, shown } from "./dom.js";
import { address, changed, go, note } from "./route.js";

const POINTS = 400;
const MANY_POINTS = 2000;
const TOGETHER = 40; // metrics in one request

function traces(name, answer, names, settings) {
  const found = [];
  answer.forEach((curve, place) => {
    const x = settings.axis === "time" ? curve.x.map((second) => new Date(second * 1000)) : curve.x;
    const single = curve.x.length < 2;
    const line = { color: colour(place), width: 1.6 };
    const about = { x, type: "scatter", mode: single || curve.num <= 40 ? "lines+markers" : "lines", name: plain(names[place]), marker: { size: single ? 8 : 4, color: colour(place) } };
    const hover = { meta: plain(names[place]), hovertemplate: "%{y:.5g}<extra>%{meta}</extra>" };
    if (curve.even) {
      found.push({ ...about, y: curve.y, mode: "lines", line: { color: faint(colour(place)), width: 1 }, hoverinfo: "skip" });
      found.push({ ...about, y: curve.even, line, ...hover });
    } else found.push({ ...about, y: curve.y, line, ...hover });
  });
  return found;
}

function marked(marks, settings) {
  const shapes = [];
  const points = { x: [], y: [], text: [], colours: [] };
  for (const mark of marks.flat()) {
    const x = settings.axis === "time" ? new Date(mark.x * 1000) : mark.x;
    const tint = mark.kind === "fault" ? "#d0485a" : "#3a9d5d";
    shapes.push({ type: "line", x0: x, x1: x, yref: "paper", y0: 0, y1: 1, line: { color: tint, width: 1, dash: "dot" } });
    points.x.push(x);
    points.y.push(1);
    points.colours.push(tint);
    points.text.push(plain(`${mark.name}${mark.lane ? ` (${mark.lane})` : ""}${mark.note ? `: ${mark.note.slice(0, 120)}` : ""}`));
  }
  const trace = points.x.length
    ? [{ x: points.x, y: points.y, text: points.text, yaxis: "y2", type: "scatter", mode: "markers", marker: { symbol: "triangle-down", size: 9, color: points.colours }, hovertemplate: "%{text}<extra></extra>", cliponaxis: false }]
    : [];
  return { shapes, trace };
}

// One chart of one metric. Plotly draws it only when it is near the screen.
class Chart {
  constructor(metric, context, large) {
    this.metric = metric;
    this.context = context;
    this.place = el("div", { class: large ? "plot large" : "plot" });
    this.empty = el("div", { class: "soft small pad" }, "no values yet");
    const link = large
      ? el("a", { href: changed({ one: null }), class: "small" }, "all metrics")
      : el("a", { href: address("curves", { ...context.kept(), run: context.ids, one: metric.name }), class: "small", title: "show only this metric" }, "enlarge");
    this.value = el("span", { class: "value" });
    this.box = el("section", { class: large ? "card chart wide" : "card chart", "data-metric": metric.name },
      el("div", { class: "chart-head" }, el("h3", { title: metric.meaning }, shown(metric.name)), el("span", { class: "soft small" }, metric.unit), el("span", { class: "grow" }), this.value, link),
      this.place);
    this.large = large;
    this.drawn = false;
  }

  draw(curves, marks) {
    const { settings, names } = this.context;
    const num = curves.reduce((total, curve) => total + curve.num, 0);
    if (curves.length === 1 && curves[0].y.length) {
      this.value.textContent = number(curves[0].y.at(-1));
      this.value.title = "the last value";
    }
    this.box.dataset.points = String(num);
    if (num === 0) return;
    const { shapes, trace } = marked(marks, settings);
    const range = settings.low !== null ? [settings.low, settings.high].map((end) => (settings.axis === "time" ? new Date(end * 1000) : end)) : undefined;
    const y = { type: settings.log ? "log" : "linear" };
    const several = curves.length > 1;
    const how = layout({
      xaxis: { range, autorange: range ? false : true, title: this.large ? { text: settings.axis === "time" ? "time" : "step" } : undefined },
      yaxis: y,
      yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
      shapes,
      showlegend: several && this.large,
      legend: { orientation: "h", y: 1.08 },
      uirevision: `${settings.axis} ${settings.low} ${settings.high} ${settings.log}`,
    });
    const made = plotly().react(this.place, [...traces(this.metric.name, curves, names, settings), ...trace], how, SETTINGS);
    if (!this.drawn) {
      this.drawn = true;
      Promise.resolve(made).then(() => this.place.on("plotly_relayout", (event) => this.context.zoomed(event)));
    }
  }

  close() {
    if (this.drawn) plotly().purge(this.place);
  }
}

// A group of charts, requested when it comes near the screen.
export class Section {
  constructor(title, metrics, context, large = false) {
    this.context = context;
    this.metrics = metrics;
    this.charts = metrics.map((metric) => new Chart(metric, context, large));
    this.box = el("div", { class: "group", id: `group-${title}` }, title ? el("h2", {}, title) : null, el("div", { class: large ? "" : "charts" }, this.charts.map((chart) => chart.box)));
    this.large = large;
    this.seen = null;
    this.near = false;
    this.watch = new IntersectionObserver((entries) => {
      this.near = entries.some((entry) => entry.isIntersecting);
      if (this.near) this.load().catch((error) => this.context.failed(error));
    }, { rootMargin: "300px" });
    this.watch.observe(this.box);
  }

  async load() {
    if (!this.near || this.busy) return;
    this.busy = true;
    try {
      const { settings, ids } = this.context;
      const key = JSON.stringify([settings.smooth, settings.axis, settings.low, settings.high, settings.log]);
      let mark = null;
      for (let first = 0; first < this.charts.length; first += TOGETHER) {
        const charts = this.charts.slice(first, first + TOGETHER);
        const answer = await ask("curves", {
          run: ids, name: charts.map((chart) => chart.metric.name), axis: settings.axis,
          points: this.large || settings.low !== null ? MANY_POINTS : POINTS, smooth: settings.smooth || null, low: settings.low, high: settings.high,
          seen: key === this.key ? this.seen : null,
        }, this.context.signal);
        mark ??= answer.mark; // the first answer's mark, so that newer data is requested again
        if (answer.same) continue;
        for (const chart of charts) chart.draw(answer.curves[chart.metric.name], answer.marks);
      }
      this.seen = mark;
      this.key = key;
    } finally {
      this.busy = false;
    }
  }

  close() {
    this.watch.disconnect();
    this.charts.forEach((chart) => chart.close());
  }
}

function legend(context) {
  if (context.ids.length < 2) return null;
  return el("div", { class: "legend" }, context.ids.map((id, place) => {
    const dot = el("span", { class: "dot" });
    dot.style.backgroundColor = colour(place);
    return el("span", {}, dot, shown(context.names[place]), el("button", { class: "plainly", title: "remove this run", onclick: () => go(changed({ run: context.ids.filter((one) => one !== id) })) }, "×"));
  }));
}

export async function show(page, context) {
  const { asked, ids, runs } = context;
  const one = asked.get("one");
  const aborter = new AbortController();
  const bound = (name) => (asked.get(name) === null || asked.get(name) === "" || Number.isNaN(Number(asked.get(name))) ? null : Number(asked.get(name)));
  const settings = { smooth: Number(asked.get("smooth")) || 0, log: asked.get("log") === "1", axis: asked.get("axis") === "time" ? "time" : "step", low: bound("low"), high: bound("high") };
  const own = {
    ids, settings, signal: aborter.signal, kept,
    names: ids.map((id) => runs.find((run) => run.id === id).name),
    zoomed, failed: (error) => { if (error.name !== "AbortError") say.textContent = error.message; },
  };
  const { metrics } = await ask("metrics", { run: ids }, aborter.signal);
  if (!context.current()) return null;
  if (metrics.length === 0) {
    replace(page, message("No metrics yet", "This run has not finished an evaluation or a step. Its curves will appear here once it has."));
    return { refresh: async () => { if ((await ask("metrics", { run: ids })).metrics.length) window.dispatchEvent(new Event("hashchange")); } };
  }
  const say = el("span", { class: "bad-text" });
  const sections = [];
  const groups = [...new Set(metrics.map((metric) => metric.group))];
  const body = el("div", { class: "sections" });

  function build(filter) {
    sections.forEach((section) => section.close());
    sections.length = 0;
    if (one) sections.push(new Section("", metrics.filter((metric) => metric.name === one), own, true));
    else {
      for (const group of groups) {
        const found = metrics.filter((metric) => metric.group === group && metric.name.includes(filter));
        if (found.length) sections.push(new Section(group, found, own));
      }
    }
    replace(body, sections.length ? sections.map((section) => section.box) : message("No matches", "No metric name contains this text."));
  }

  function kept() {
    return { smooth: settings.smooth || null, log: settings.log ? "1" : null, axis: settings.axis === "time" ? "time" : null, low: settings.low, high: settings.high };
  }

  function again() {
    note(kept());
    reset.hidden = settings.low === null;
    sections.forEach((section) => { section.seen = null; section.load().catch(own.failed); });
  }

  function zoomed(event) {
    let low = event["xaxis.range[0]"];
    let high = event["xaxis.range[1]"];
    if (event["xaxis.range"]) [low, high] = event["xaxis.range"];
    if (event["xaxis.autorange"]) low = high = null;
    else if (low === undefined) return;
    const plainly = (end) => (end === null ? null : settings.axis === "time" ? new Date(end).getTime() / 1000 : Number(end));
    settings.low = plainly(low);
    settings.high = plainly(high);
    again();
  }

  const reset = el("button", { hidden: settings.low === null, onclick: () => { settings.low = settings.high = null; again(); } }, "Whole run");
  const smooth = el("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: settings.smooth, "aria-label": "Smoothing", oninput: () => { settings.smooth = Number(smooth.value); shownSmooth.textContent = settings.smooth.toFixed(2); }, onchange: again });
  const shownSmooth = el("span", { class: "small mono" }, settings.smooth.toFixed(2));
  const log = el("input", { type: "checkbox", checked: settings.log, onchange: () => { settings.log = log.checked; again(); } });
  const axis = el("select", { "aria-label": "Horizontal axis", onchange: () => { settings.axis = axis.value; settings.low = settings.high = null; again(); } },
    el("option", { value: "step", selected: settings.axis === "step" }, "by step"), el("option", { value: "time", selected: settings.axis === "time" }, "by time"));
  const filter = el("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", oninput: () => build(filter.value.trim()) });
  const add = el("select", { "aria-label": "Add a run", onchange: () => go(changed({ run: [...ids, add.value] })) },
    el("option", { value: "" }, "add a run …"), runs.filter((run) => !ids.includes(run.id)).map((run) => el("option", { value: run.id }, run.name)));
  const jump = one ? null : el("nav", { class: "jump" }, groups.map((group) => el("button", { class: "plainly", onclick: () => document.getElementById(`group-${group}`)?.scrollIntoView({ behavior: "smooth" }) }, group)));
  build("");
  replace(page,
    el("div", { class: "bar sticky" }, el("label", {}, "Smoothing ", smooth, " ", shownSmooth), el("label", {}, log, " log scale"), axis, reset, say, el("span", { class: "grow" }), one ? null : filter, runs.length > ids.length ? add : null),
    legend(own), jump, body);
  return {
    refresh: () => Promise.all(sections.map((section) => section.load())),
    close() { aborter.abort(); sections.forEach((section) => section.close()); },
  };
}
