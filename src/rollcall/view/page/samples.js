// Samples: a list of the journal's groups, and one group with its completions side by side.

import { ask } from "./ask.js";
import { SETTINGS, layout, plotly } from "./chart.js";
import { badge, choice, counted, duration, el, message, number, replace, shown } from "./dom.js";
import { address, changed, go, note } from "./route.js";

const PAGE = 50;
const SORTS = [["newest", "newest"], ["oldest", "oldest"], ["best", "best reward"], ["worst", "worst reward"], ["spread", "largest spread"], ["longest", "longest"]];
const FILTERS = [["", "all groups"], ["mixed", "rewards differ"], ["zero", "zero variance"], ["truncated", "truncated"], ["failed", "failed rewards"]];
const ORDERS = [["number", "as sampled"], ["best", "best first"], ["worst", "worst first"], ["long", "longest first"]];
const CARDS = 24; // completions shown at once

export function tone(reward, low = 0, high = 1) {
  if (reward === null || reward === undefined) return "";
  if (high <= low) return reward > 0 ? "good" : "bad";
  const share = (reward - low) / (high - low);
  return share > 0.66 ? "good" : share > 0.33 ? "warn" : "bad";
}

function listed(row, isOn) {
  const range = row.lowest === row.highest ? number(row.lowest, 2) : `${number(row.lowest, 2)} … ${number(row.highest, 2)}`;
  return el("a", { class: isOn ? "entry on" : "entry", href: changed({ s: row.step, draw: row.draw }), "data-draw": String(row.draw) },
    el("div", { class: "entry-head" }, el("span", { class: "strong" }, `step ${row.step}`), el("span", { class: "soft small" }, `draw ${row.draw}`), el("span", { class: "grow" }), badge(number(row.reward, 2), tone(row.reward, Math.min(row.lowest, 0), Math.max(row.highest, 1)))),
    el("div", { class: "entry-text" }, shown(row.text || row.prompt)),
    el("div", { class: "soft small" }, `${counted(row.completions, "completion")} · rewards ${range}`, row.truncated ? ` · ${row.truncated} truncated` : "", row.failed ? ` · ${row.failed} failed` : ""));
}

// A message in an episode. In `who`, "turn N" means the model, and an empty name means the text of a single turn.
function spoken([who, text]) {
  if (who === "reward") return el("div", {}, badge(`reward ${text}`, tone(Number(text))));
  const box = el("div", { class: "text", dir: "ltr" }, text ? shown(text) : el("span", { class: "soft" }, "(nothing)"));
  const name = who.startsWith("turn ") ? "model" : who;
  return name ? el("div", { class: `said ${name}`, title: who }, el("div", { class: "soft small" }, name === "call" ? "tool call" : name), box) : box;
}

function talk(said) {
  return said.length === 1 && said[0][0] === "" ? spoken(said[0]) : el("div", { class: "talk" }, said.map(spoken));
}

function cut(said, length, load) {
  const box = el("div", {}, talk(said));
  if (length <= said.reduce((sum, [, text]) => sum + text.length, 0)) return box;
  const more = el("button", { class: "small", onclick: async () => {
    more.disabled = true;
    more.textContent = "loading …";
    try {
      replace(box, talk((await load()).said));
      more.remove();
    } catch (error) { more.textContent = error.message; }
  } }, `show all ${length.toLocaleString("en")} characters`);
  return el("div", {}, box, more);
}

function parts(one) {
  const rows = Object.entries(one.parts).map(([name, value]) => el("tr", {}, el("td", {}, shown(name)), el("td", { class: "number" }, one.errors[name] ? badge("failed", "bad") : number(value))));
  return el("table", { class: "parts" }, rows);
}

function completion(run, group, one, place, range) {
  const which = { run, step: group.step, draw: group.draw };
  const failed = Object.entries(one.errors);
  return el("article", { class: "card completion", "data-completion": String(place) },
    el("div", { class: "entry-head" },
      badge(`reward ${number(one.reward)}`, tone(one.reward, ...range)),
      one.advantage === null ? null : el("span", { class: "small", title: "advantage: how much better than expected for this group" }, `advantage ${one.advantage > 0 ? "+" : ""}${number(one.advantage)}`),
      el("span", { class: "grow" }),
      one.finish === "stop" ? null : badge(one.finish === "length" ? "truncated" : one.finish, "warn"),
      el("a", { href: address("tokens", { ...which, n: place || null }), title: "token by token" }, "tokens")),
    el("div", { class: "soft small" }, `#${place + 1} · ${counted(one.tokens, "token")} · mean log-prob ${number(one.logprob)} · weights ${one.versions.join(", ") || "–"}`, one.masked ? ` · ${one.masked} masked` : ""),
    Object.keys(one.parts).length > 1 || failed.length ? parts(one) : null,
    Object.entries(one.notes).map(([name, said]) => el("details", { class: "small" }, el("summary", {}, shown(`note from ${name}`)), el("pre", {}, shown(said)))),
    failed.map(([name, why]) => el("details", { class: "bad-text small" }, el("summary", {}, shown(`${name} failed`)), el("pre", {}, shown(why)))),
    cut(one.said, one.length, () => ask("text", { ...which, completion: place })));
}

function answer(text) {
  return text ? el("div", { class: "answer" }, el("span", { class: "soft" }, "answer "), el("span", { class: "text-inline", dir: "ltr" }, shown(text))) : null;
}

function metadata(group) {
  const rows = Object.entries(group.prompt.metadata);
  if (!rows.length) return null;
  return el("details", { class: "small" }, el("summary", {}, counted(rows.length, "other column")), el("table", {}, rows.map(([name, value]) => el("tr", {}, el("td", { class: "soft" }, shown(name)), el("td", { class: "mono wrap" }, shown(value))))));
}

function drawGroup(place, run, group, order) {
  const numbered = group.completions.map((one, index) => [one, index]);
  const by = { best: (a, b) => b[0].reward - a[0].reward, worst: (a, b) => a[0].reward - b[0].reward, long: (a, b) => b[0].tokens - a[0].tokens };
  if (by[order]) numbered.sort(by[order]);
  const rewards = group.completions.map((one) => one.reward);
  const range = [Math.min(0, ...rewards), Math.max(1, ...rewards)];
  const cards = el("div", { class: "completions" });
  let drawn = 0;
  const more = el("button", { onclick: () => add() }, "");
  function add() {
    cards.append(...numbered.slice(drawn, drawn + CARDS).map(([one, index]) => completion(run, group, one, index, range)));
    drawn = Math.min(drawn + CARDS, numbered.length);
    more.hidden = drawn >= numbered.length;
    more.textContent = `show ${Math.min(CARDS, numbered.length - drawn)} more of ${numbered.length}`;
  }
  add();
  const trained = group.trained_in === null ? "not trained on yet" : group.trained_in === group.step ? "trained on" : `trained on in step ${group.trained_in}`;
  replace(place,
    el("div", { class: "card" },
      el("div", { class: "entry-head" }, el("h2", {}, `Step ${group.step}, draw ${group.draw}`), el("span", { class: "soft small" }, trained), el("span", { class: "grow" }),
        el("a", { href: address("samples", { run, prompt: group.prompt.id, sort: "oldest" }), title: "every group of this prompt" }, "this prompt across steps")),
      el("div", { class: "soft small" }, "prompt ", shown(group.prompt.id), ` · ${counted(group.prompt.tokens, "token")} · sampled in ${duration(group.finished_s - group.started_s)} by `, shown(group.worker)),
      group.prompt.length ? cut(group.prompt.said, group.prompt.length, () => ask("text", { run, step: group.step, draw: group.draw })) : null,
      answer(group.prompt.answer),
      metadata(group),
      group.advantages ? el("div", { class: "soft small" }, `No advantages: ${group.advantages}.`) : null),
    el("div", { class: "bar" }, el("h3", {}, counted(group.completions.length, "completion")), choice("order", ORDERS, order, (value) => { note({ order: value === "number" ? null : value }); drawGroup(place, run, group, value); })),
    cards, more);
}

function acrossSteps(rows) {
  const box = el("div", { class: "plot" });
  const x = rows.map((row) => row.step);
  const line = (name, key, style) => ({ x, y: rows.map((row) => row[key]), name, type: "scatter", mode: "lines+markers", ...style });
  queueMicrotask(() => plotly().react(box, [
    line("highest", "highest", { line: { width: 0 }, marker: { size: 4, color: "#3a9d5d" } }),
    line("mean", "reward", { line: { width: 2, color: "#2f7ed8" } }),
    line("lowest", "lowest", { line: { width: 0 }, marker: { size: 4, color: "#d0485a" } }),
  ], layout({ xaxis: { title: { text: "step" } }, yaxis: { title: { text: "reward" } } }), SETTINGS));
  return el("div", { class: "card" }, el("h3", {}, "Reward of this prompt across steps"), box);
}

async function showHeldOut(page, context, run, tabs) {
  const { asked } = context;
  const found = await ask("held_out", { run, step: asked.get("step"), search: asked.get("q") });
  if (!context.current()) return null;
  if (!found.steps.length) {
    replace(page, tabs, message("No held-out samples yet", "The first completions of each evaluation appear here. This run has not finished an evaluation, or has no held-out prompts."));
    return null;
  }
  const step = choice("after step", found.steps.map((one) => [String(one), String(one)]), String(found.step), (value) => go(changed({ step: value })));
  const search = el("input", { type: "search", value: asked.get("q") || "", placeholder: "Search", "aria-label": "Search", onchange: () => go(changed({ q: search.value })) });
  replace(page, tabs, el("div", { class: "bar" }, step, search, el("span", { class: "soft" }, counted(found.rows.length, "completion"))),
    found.rows.length ? el("div", { class: "completions" }, found.rows.map((row) => el("article", { class: "card completion" },
      el("div", { class: "entry-head" }, badge(`reward ${number(row.reward)}`, tone(row.reward)), el("span", { class: "grow" }), row.finish === "stop" ? null : badge(row.finish === "length" ? "truncated" : row.finish, "warn")),
      el("div", { class: "soft small" }, shown(row.prompt_id), ` · ${counted(row.num_tokens ?? 0, "token")}`),
      row.prompt ? el("div", { class: "text quiet", dir: "ltr" }, shown(row.prompt)) : null, talk(row.said), answer(row.answer)))) : message("Nothing found", "No held-out completion of this step contains this text."));
  return null;
}

export async function show(page, context) {
  const { asked } = context;
  const run = context.ids[0];
  const source = asked.get("from") === "held-out" ? "held-out" : "journal";
  const tabs = el("div", { class: "bar" }, el("h1", {}, "Samples"),
    el("a", { class: source === "journal" ? "tab on" : "tab", href: address("samples", { run }) }, "training"),
    el("a", { class: source === "held-out" ? "tab on" : "tab", href: address("samples", { run, from: "held-out" }) }, "held-out"));
  if (source === "held-out") return showHeldOut(page, context, run, tabs);
  const aborter = new AbortController();
  const wanted = { step: asked.get("at") || "", sort: asked.get("sort") || "newest", only: asked.get("only") || "", q: asked.get("q") || "", prompt: asked.get("prompt") || "" };
  const list = el("div", { class: "entries" });
  const detail = el("div", { class: "detail" });
  const state = el("div", { class: "soft small" });
  const more = el("button", { hidden: true, onclick: () => load(true) }, "show more");
  let rows = [];
  let cursor = null;
  let open = asked.get("draw") === null ? null : { step: asked.get("s"), draw: asked.get("draw") };
  let busy = false;

  async function load(goOn = false) {
    if (busy) return;
    busy = true;
    try {
      if (!goOn) { rows = []; cursor = null; }
      const target = rows.length + PAGE;
      let searched = 0;
      for (;;) {
        const answer = await ask("groups", {
          run, step: wanted.step, sort: wanted.sort, only: wanted.only, prompt: wanted.prompt, limit: wanted.prompt ? 200 : PAGE, offset: rows.length,
          search: wanted.q, after: cursor ? cursor.join(".") : null,
        }, aborter.signal);
        rows = rows.concat(answer.rows);
        const { files, total, groups } = answer.index;
        const reading = files < total ? ` The journal is being read: ${files.toLocaleString("en")} of ${counted(total, "file")}.` : "";
        if (wanted.q) {
          searched += answer.looked_at;
          cursor = answer.cursor;
          const where = cursor ? `, down to step ${cursor[0]}` : "";
          state.textContent = `${rows.length} found in ${counted(searched, "group")}${where}.${reading}`;
          more.hidden = !cursor;
          draw();
          if (cursor && rows.length < target) continue;
        } else {
          state.textContent = `${answer.total < groups ? `${answer.total.toLocaleString("en")} of ` : ""}${counted(groups, "group")}.${reading}`;
          more.hidden = rows.length >= answer.total;
          draw();
        }
        if (files < total || total === 0) again = setTimeout(() => load(false), 700);
        break;
      }
    } finally { busy = false; }
  }
  let again = 0;

  function draw() {
    replace(list, rows.length
      ? rows.map((row) => listed(row, open !== null && String(row.step) === String(open.step) && String(row.draw) === String(open.draw)))
      : message(wanted.q || wanted.only || wanted.step || wanted.prompt ? "Nothing found" : "No groups yet", wanted.q || wanted.only || wanted.step || wanted.prompt ? "No group matches. Change the search or the filter." : "The journal contains no finished groups yet."));
    if (!open && rows.length) {
      open = { step: rows[0].step, draw: rows[0].draw };
      list.firstChild.classList.add("on");
      drawDetail();
    }
  }

  async function drawDetail() {
    if (!open) return;
    try {
      const group = await ask("group", { run, step: open.step, draw: open.draw }, aborter.signal);
      if (context.current()) drawGroup(detail, run, group, asked.get("order") || "number");
    } catch (error) {
      if (error.name !== "AbortError") replace(detail, message("This group cannot be shown", error.message, "bad"));
    }
  }

  const change = (name) => (value) => go(address("samples", { run, ...keep(), [name]: value }));
  const keep = () => ({ at: wanted.step, sort: wanted.sort === "newest" ? "" : wanted.sort, only: wanted.only, q: wanted.q, prompt: wanted.prompt });
  const step = el("input", { type: "number", min: 0, value: wanted.step, placeholder: "all", "aria-label": "Step", onchange: () => change("at")(step.value) });
  const search = el("input", { type: "search", value: wanted.q, placeholder: "Search prompts, answers and completions", "aria-label": "Search", class: "long", onchange: () => change("q")(search.value) });
  replace(page, tabs,
    el("div", { class: "bar" }, search, el("label", {}, "step ", step), choice("sort", SORTS, wanted.sort, change("sort")), choice("show", FILTERS, wanted.only, change("only")),
      wanted.prompt ? el("span", { class: "chip" }, "prompt ", shown(wanted.prompt), el("a", { href: address("samples", { run }), title: "all prompts" }, " ×")) : null),
    el("div", { class: "split" }, el("aside", {}, state, list, more), detail));
  await Promise.all([load(), open ? drawDetail() : null]);
  if (!context.current()) return null;
  if (wanted.prompt && rows.length > 1) {
    const chart = acrossSteps(rows);
    page.querySelector(".split").before(chart);
  }
  return {
    async refresh() { if (!wanted.q && wanted.sort === "newest" && rows.length <= PAGE && page.scrollTop === 0) await load(false); },
    close() { aborter.abort(); clearTimeout(again); },
  };
}
