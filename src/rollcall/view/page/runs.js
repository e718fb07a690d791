// Runs: the state of each run. Two or more runs can be compared.

import { badge, clock, counted, duration, el, number, replace, shown } from "./dom.js";
import { address, go } from "./route.js";

const KIND = { running: "good", finished: "done", failed: "bad", killed: "bad", waiting: "warn", stopped: "warn", new: "" };
const chosen = new Set();

function course(run) {
  const { words, first, last, best } = run.headline;
  if (last === null) return el("span", { class: "soft" }, run.evaluates ? "no evaluation yet" : "no validation data");
  const share = words === "held-out accuracy";
  const text = (value) => (share ? `${(100 * value).toFixed(1)} %` : number(value));
  return el("span", { title: `${words}: first, last, best` },
    text(first), el("span", { class: "soft" }, " → "), el("b", {}, text(last)),
    el("div", { class: "soft small" }, `best ${text(best)}`));
}

function progress(run) {
  const share = run.steps ? Math.min(run.step / run.steps, 1) : 0;
  const bar = el("progress", { value: share, max: 1, title: `${(100 * share).toFixed(0)} %` });
  return el("div", { class: "progress" }, `${run.step.toLocaleString("en")}${run.steps ? ` / ${run.steps.toLocaleString("en")}` : ""}`, bar);
}

// A row that is updated in place, so that a checkbox is not replaced while it is being clicked.
class Row {
  constructor(id, tell) {
    const box = el("input", { type: "checkbox", checked: chosen.has(id), "aria-label": "choose this run", onchange: () => { box.checked ? chosen.add(id) : chosen.delete(id); tell(); } });
    this.first = el("td", {}, box);
    this.row = el("tr", {}, this.first);
  }

  draw(run, now) {
    while (this.first.nextSibling) this.first.nextSibling.remove();
    this.row.append(...cells(run, now));
    return this.row;
  }
}

function cells(run, now) {
  const began = run.began_s ? now - run.began_s : null;
  const moved = run.moved_s ? Math.max(now - run.moved_s, 0) : null;
  return [
    el("td", {}, el("a", { class: "strong", href: address("curves", { run: run.id }) }, shown(run.name)),
      el("div", { class: "soft small nowrap" }, [run.algorithm, run.model].filter(Boolean).flatMap((text, place) => [place ? " · " : "", ...shown(text)]))),
    el("td", {}, badge(run.state, KIND[run.state] || ""), el("div", { class: "soft small" }, shown(run.text)),
      run.no_signal ? el("div", { class: "bad-text small" }, run.no_signal) : null),
    el("td", { class: "number" }, progress(run)),
    el("td", { class: "nowrap" }, course(run)),
    el("td", { class: "number" }, number(run.reward)),
    el("td", { class: "number" }, run.step_s === null ? "–" : `${duration(run.step_s)} / step`,
      el("div", { class: "soft small" }, run.tokens_per_s === null ? "" : `${Math.round(run.tokens_per_s).toLocaleString("en")} tokens/s`)),
    el("td", { class: "number", title: run.began_s ? `began ${clock(run.began_s)}` : "" }, began === null ? "–" : duration(began),
      el("div", { class: "soft small" }, run.left_s !== null ? `${duration(run.left_s)} left` : moved === null ? "" : `quiet for ${duration(moved)}`)),
    el("td", { class: "links" },
      [["curves", "curves"], ["samples", "samples"], ["timeline", "timeline"], ["cluster", "cluster"]].map(([view, text]) =>
        el("a", { href: address(view, { run: run.id }) }, text))),
  ];
}

export async function show(page, context) {
  let answer = context.answer;
  const rows = new Map();
  const body = el("tbody");
  const button = el("button", { class: "primary", onclick: () => go(address("compare", { run: [...chosen] })) }, "Compare");
  const overlay = el("button", { onclick: () => go(address("curves", { run: [...chosen] })) }, "Overlay curves");
  const filter = el("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter by name", oninput: () => draw() });
  const count = el("span", { class: "soft" });

  function draw() {
    const text = filter.value.toLowerCase();
    const found = answer.runs.filter((run) => run.name.toLowerCase().includes(text));
    for (const id of chosen) if (!answer.runs.some((run) => run.id === id)) chosen.delete(id);
    const order = { running: 0, waiting: 1 };
    found.sort((one, other) => (order[one.state] ?? 2) - (order[other.state] ?? 2) || (other.moved_s || 0) - (one.moved_s || 0));
    const drawn = found.map((run) => {
      if (!rows.has(run.id)) rows.set(run.id, new Row(run.id, buttons));
      return rows.get(run.id).draw(run, answer.now_s);
    });
    if (drawn.length !== body.children.length || drawn.some((one, place) => body.children[place] !== one)) replace(body, drawn);
    count.textContent = `${found.length < answer.runs.length ? `${found.length} of ` : ""}${counted(answer.runs.length, "run")}`;
    buttons();
  }

  function buttons() {
    button.disabled = overlay.disabled = chosen.size < 2;
    button.textContent = chosen.size < 2 ? "Compare (choose two or more)" : `Compare ${chosen.size} runs`;
  }

  draw();
  const heads = ["", "run", "state", "step", "held-out", "reward", "speed", "age", ""];
  replace(page,
    el("div", { class: "bar" }, el("h1", {}, "Runs"), count, el("span", { class: "grow" }), filter, overlay, button),
    el("div", { class: "card scroll" }, el("table", { class: "runs" }, el("thead", {}, el("tr", {}, heads.map((head) => el("th", {}, head)))), body)));
  return { refresh(news) { answer = news; draw(); } };
}
