// The page: selects the view and the run, and refreshes them.

import { ask } from "./ask.js";
import { el, message, replace } from "./dom.js";
import { address, changed, go, read } from "./route.js";
import * as cluster from "./cluster.js";
import * as compare from "./compare.js";
import * as curves from "./curves.js";
import * as runs from "./runs.js";
import * as samples from "./samples.js";
import * as timeline from "./timeline.js";
import * as tokens from "./tokens.js";

const VIEWS = { runs, compare, curves, samples, tokens, timeline, cluster };
const TABS = [["runs", "Runs"], ["curves", "Curves"], ["samples", "Samples"], ["tokens", "Tokens"], ["timeline", "Timeline"], ["cluster", "Cluster"]];
const SOON_MS = 3000; // while a run is active
const LATER_MS = 15000;

const page = document.getElementById("main");
let current = null; // what the view returned: {refresh, close}
let turn = 0; // view counter: an answer for an old view is dropped
let known = []; // the listed runs
let timer = 0;
let chosen = null; // the run that was shown last

function wanted(asked) {
  const ids = asked.getAll("run").filter((id) => known.some((run) => run.id === id));
  if (ids.length) return ids;
  const last = known.find((run) => run.id === chosen);
  const lively = known.find((run) => run.state === "running");
  const first = last || lively || known[0];
  return first ? [first.id] : [];
}

function drawTop(view, ids) {
  const tabs = TABS.map(([name, title]) =>
    el("a", {
      class: name === view || (name === "runs" && view === "compare") ? "tab on" : "tab",
      href: name === "runs" ? "#/runs" : address(name, { run: name === "curves" ? ids : ids.slice(0, 1) }),
    }, title));
  replace(document.getElementById("tabs"), tabs);
  const picker = document.getElementById("picker");
  const select = document.getElementById("run");
  picker.hidden = view === "runs" || view === "compare" || known.length === 0;
  replace(select, known.map((run) => el("option", { value: run.id, selected: run.id === ids[0] }, run.name)));
  const run = known.find((one) => one.id === ids[0]);
  document.title = run && view !== "runs" ? `${run.name} · ${view} · Rollcall` : "Rollcall";
}

async function askRuns() {
  const answer = await ask("runs");
  known = answer.runs;
  return answer;
}

async function show() {
  const mine = ++turn;
  if (current && current.close) current.close();
  current = null;
  const { view, ask: asked } = read();
  const make = VIEWS[view];
  try {
    const answer = await askRuns();
    if (mine !== turn) return;
    const ids = wanted(asked);
    if (view !== "runs" && view !== "compare" && ids.length) chosen = ids[0];
    drawTop(view, ids);
    if (!make) {
      replace(page, message("No such view", "This address names a view that does not exist. Choose a view above."));
    } else if (known.length === 0) {
      replace(page, message("No runs yet", "The folder contains no runs yet. A new run appears here within seconds."));
    } else {
      page.className = `view-${view}`;
      const made = await make.show(page, { asked, ids, runs: known, answer, current: () => mine === turn });
      if (mine === turn) current = made;
      else if (made && made.close) made.close();
    }
    fresh(true);
  } catch (error) {
    if (error.name === "AbortError" || mine !== turn) return;
    replace(page, message("This cannot be shown", error.message, "bad"));
    fresh(false, error);
  }
  plan();
}

async function refresh() {
  if (document.hidden) return plan();
  const mine = turn;
  try {
    const before = known.length;
    const answer = await askRuns();
    if (mine !== turn) return;
    if ((before === 0) !== (known.length === 0)) return show();
    if (current && current.refresh) await current.refresh(answer);
    fresh(true);
  } catch (error) {
    if (error.name !== "AbortError") fresh(false, error);
  }
  if (mine === turn) plan();
}

function plan() {
  clearTimeout(timer);
  const lively = known.length === 0 || known.some((run) => run.state === "running" || run.state === "waiting");
  timer = setTimeout(refresh, lively ? SOON_MS : LATER_MS);
}

function fresh(is, error = null) {
  const mark = document.getElementById("live");
  const lively = known.some((run) => run.state === "running");
  mark.className = is ? (lively ? "live on" : "live") : "live off";
  mark.textContent = is ? (lively ? "live" : "up to date") : "no answer";
  mark.title = is ? "The page is updated every few seconds." : error.message;
}

document.getElementById("run").addEventListener("change", (event) => {
  const { view } = read();
  chosen = event.target.value;
  // A step, group or zoom of one run has no meaning in another run.
  go(view === "tokens" ? address("samples", { run: chosen }) : address(view, { run: chosen }));
});
window.addEventListener("hashchange", show);
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
if (!location.hash) history.replaceState(null, "", "#/runs");
show();
export { changed };
