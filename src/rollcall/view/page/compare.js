// Two or more runs side by side: numbers, differences between the run files, and the most important curves.

import { ask } from "./ask.js";
import { colour } from "./chart.js";
import { Section } from "./curves.js";
import { duration, el, message, number, replace, shown } from "./dom.js";
import { address } from "./route.js";

const SHOWN = ["eval/accuracy", "eval/reward_mean", "train/reward_mean", "rollout/response_length_mean", "train/entropy", "train/kl", "rollout/logprob_mismatch", "time/step_s"];
const NUMBERS = [
  ["state", (row) => row.state], ["step", (row) => number(row.step)], ["held-out, first", (row) => number(row.headline.first)], ["held-out, last", (row) => number(row.headline.last)],
  ["held-out, best", (row) => number(row.headline.best)], ["training reward, last", (row) => number(row.reward)], ["step time", (row) => duration(row.step_s)], ["rollout tokens/s", (row) => number(row.tokens_per_s === null ? null : Math.round(row.tokens_per_s))],
];

function heads(names) {
  return names.map((name, place) => {
    const dot = el("span", { class: "dot" });
    dot.style.backgroundColor = colour(place);
    return el("th", {}, dot, shown(name));
  });
}

export async function show(page, context) {
  const ids = context.asked.getAll("run").filter((id) => context.runs.some((run) => run.id === id));
  if (ids.length < 2) {
    replace(page, message("Nothing to compare", "Choose two or more runs in the list of runs."), el("p", {}, el("a", { href: "#/runs" }, "Go to the list of runs")));
    return null;
  }
  const names = ids.map((id) => context.runs.find((run) => run.id === id).name);
  const [found, { metrics }] = await Promise.all([ask("difference", { run: ids }), ask("metrics", { run: ids })]);
  if (!context.current()) return null;
  const aborter = new AbortController();
  const say = el("span", { class: "bad-text" });
  const own = { ids, names, settings: { smooth: 0, log: false, axis: "step", low: null, high: null }, signal: aborter.signal, kept: () => ({}), zoomed: () => {}, failed: (error) => { if (error.name !== "AbortError") say.textContent = error.message; } };
  const section = new Section("Curves", SHOWN.map((name) => metrics.find((metric) => metric.name === name)).filter(Boolean), own);
  const settings = found.settings.filter((one) => one.key !== "run.name");
  const problems = found.problems.map((problem, place) => (problem ? el("p", { class: "bad-text" }, shown(`${names[place]}: ${problem}`)) : null));
  replace(page,
    el("div", { class: "bar" }, el("h1", {}, "Compare"), say, el("span", { class: "grow" }), el("a", { href: address("curves", { run: ids }) }, "all curves overlaid")),
    el("div", { class: "two" },
      el("section", { class: "card scroll" }, el("h2", {}, "Numbers"),
        el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, ""), heads(names))),
          el("tbody", {}, NUMBERS.map(([title, of]) => el("tr", {}, el("td", { class: "soft" }, title), found.rows.map((row) => el("td", { class: "number" }, of(row)))))))),
      el("section", { class: "card scroll", id: "settings" }, el("h2", {}, "Differences between the run files"), problems,
        settings.length
          ? el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "key"), heads(names))),
            el("tbody", {}, settings.map((one) => el("tr", {}, el("td", { class: "mono" }, one.key), one.values.map((value) => el("td", { class: "mono wrap" }, value === null ? el("span", { class: "soft" }, "not known") : shown(value)))))))
          : el("p", { class: "soft" }, "All settings are the same."))),
    section.box);
  return { refresh: () => section.load(), close() { aborter.abort(); section.close(); } };
}
