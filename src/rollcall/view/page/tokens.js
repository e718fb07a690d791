// Tokens: one completion, with each token coloured by one of its numbers. One listener serves all tokens, so the page stays fast with
// thousands of them.

import { ask } from "./ask.js";
import { isDark } from "./chart.js";
import { badge, choice, counted, el, message, number, replace, shown, wellFormed } from "./dom.js";
import { address, changed, note } from "./route.js";
import { tone } from "./samples.js";

// How a number becomes a colour: share of the strongest colour, from -1 to 1.
const SHADES = {
  logprob: { title: "log-prob", share: (value) => -Math.min(-value / 6, 1), low: "certain (0)", high: "unlikely (−6 or less)" },
  entropy: { title: "entropy", share: (value) => -Math.min(value / 4, 1), low: "0", high: "4 nats or more" },
  mismatch: { title: "mismatch (learner − engine)", share: (value) => Math.max(-1, Math.min(1, value / 0.5)), low: "−0.5", high: "+0.5" },
  ratio: { title: "ratio (learner / engine)", share: (value) => Math.max(-1, Math.min(1, Math.log(Math.max(value, 1e-6)) / Math.log(1.5))), low: "1/1.5", high: "1.5" },
  advantage: { title: "advantage", share: (value) => Math.max(-1, Math.min(1, value / 2)), low: "−2", high: "+2" },
  mask: { title: "mask", share: (value) => (value ? 0 : -1), low: "trained on", high: "not from the policy" },
  version: { title: "weight version", classes: true },
};
const NAMES = { id: "token id", logprob: "log-prob", learner: "learner's log-prob", mask: "mask", version: "weight version", advantage: "advantage", entropy: "entropy", mismatch: "mismatch", ratio: "ratio" };
const HUES = ["#2f7ed8", "#e0803a", "#3a9d5d", "#b657b8", "#c8a217", "#d0485a", "#1aa3a3", "#7a6ff0"];

function tint(share) {
  const strength = Math.abs(share);
  if (strength < 0.02) return "";
  const most = isDark() ? 0.75 : 0.65;
  return share < 0 ? `rgba(224, 96, 58, ${(strength * most).toFixed(3)})` : `rgba(47, 126, 216, ${(strength * most).toFixed(3)})`;
}

function label(text, piece, id, isSpecial) {
  if (text === null) return `#${id}`;
  if (isSpecial) return text || piece || `#${id}`;
  if (text === "") return "·";
  // A line break is shown as a symbol and still breaks the line.
  return text.replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t").replace(/\r/g, "␍");
}

function token(text, { piece, id, place, isSpecial, isPrompt }) {
  const box = document.createElement("span");
  box.className = isPrompt ? "t prompt" : "t";
  if (isSpecial) box.classList.add("special");
  if (text === "" && !isSpecial) box.classList.add("part");
  box.append(...shown(label(text, piece, id, isSpecial)));
  if (!isPrompt) box.dataset.place = String(place);
  return box;
}

function paint(boxes, columns, by) {
  const shade = SHADES[by];
  const values = columns[by];
  const versions = shade.classes ? [...new Set(values)].sort((a, b) => a - b) : [];
  boxes.forEach((box, place) => {
    const value = values[place];
    box.style.backgroundColor = value === null ? "" : shade.classes ? HUES[versions.indexOf(value) % HUES.length] + "66" : tint(shade.share(value));
  });
  return versions;
}

function key(by, versions) {
  const shade = SHADES[by];
  if (shade.classes) return versions.slice(0, 12).map((version, place) => { const dot = el("span", { class: "dot" }); dot.style.backgroundColor = HUES[place % HUES.length]; return el("span", {}, dot, String(version)); });
  const swatch = (share) => { const box = el("span", { class: "swatch" }); box.style.backgroundColor = tint(share); return box; };
  const sided = ["mismatch", "ratio", "advantage"].includes(by);
  return [shade.low, " ", (sided ? [-1, -0.5, 0, 0.5, 1] : [0, -0.25, -0.5, -0.75, -1]).map(swatch), " ", shade.high];
}

function numbers(answer, place) {
  const { columns, texts, pieces } = answer;
  const id = columns.id[place];
  const text = texts === null ? null : texts[place];
  const row = (name, value) => el("tr", {}, el("td", { class: "soft" }, name), el("td", { class: "mono number" }, value));
  const rows = [row("token", `${(place + 1).toLocaleString("en")} of ${columns.id.length.toLocaleString("en")}`), row("text", text === null ? "–" : shown(JSON.stringify(wellFormed(text))))];
  if (pieces[id] !== undefined) rows.push(row("piece", shown(pieces[id])));
  for (const [name, values] of Object.entries(columns)) {
    const value = values[place];
    if (name === "mask") rows.push(row("mask", value ? "trained on" : "not from the policy"));
    else rows.push(row(NAMES[name] || name, value === null ? "–" : name === "id" || name === "version" ? String(value) : number(value, 5)));
    if (name === "logprob" && value !== null) rows.push(row("probability", `${(100 * Math.exp(value)).toPrecision(3)} %`));
  }
  return el("table", {}, rows);
}

export async function show(page, context) {
  const { asked } = context;
  const run = context.ids[0];
  if (asked.get("draw") === null) {
    replace(page, message("Choose a completion", "Open a group under Samples and follow the “tokens” link of a completion."), el("p", {}, el("a", { href: address("samples", { run }) }, "Go to the samples")));
    return null;
  }
  const which = { run, step: asked.get("step"), draw: asked.get("draw") };
  const completion = Number(asked.get("n") || 0);
  const answer = await ask("tokens", { ...which, completion });
  if (!context.current()) return null;
  const { columns, texts } = answer;
  const special = new Set(answer.special);
  const boxes = columns.id.map((id, place) => token(texts === null ? null : texts[place], { piece: answer.pieces[id], id, place, isSpecial: special.has(place) }));
  const modes = Object.entries(SHADES).filter(([name]) => columns[name]).map(([name, shade]) => [name, shade.title]);
  let by = modes.some(([name]) => name === asked.get("by")) ? asked.get("by") : "logprob";
  const legend = el("span", { class: "key" });
  const side = el("div", { class: "card numbers", id: "numbers" }, el("p", { class: "soft" }, "Point at a token to see its numbers. Click it to keep them on the screen."));
  const stream = el("div", { class: "tokens", dir: "ltr" });
  const promptSpecial = new Set(answer.prompt.special);
  const prompt = answer.prompt.ids.map((id, place) => token(answer.prompt.texts === null ? null : answer.prompt.texts[place], { id, place, isSpecial: promptSpecial.has(place), isPrompt: true }));
  const showPrompt = el("input", { type: "checkbox", checked: asked.get("prompt") !== "0", onchange: () => { note({ prompt: showPrompt.checked ? null : "0" }); lay(); } });
  let kept = null;

  function lay() {
    const left = answer.prompt.left_out ? el("span", { class: "soft" }, `${counted(answer.prompt.left_out, "earlier prompt token")} left out … `) : null;
    replace(stream, showPrompt.checked ? [left, ...prompt, el("span", { class: "seam", title: "the completion begins here" })] : [], boxes);
  }

  function repaint() { replace(legend, key(by, paint(boxes, columns, by))); }

  function point(event, keep) {
    const box = event.target.closest?.(".t[data-place]");
    if (!box || (kept !== null && !keep)) return;
    if (keep) {
      boxes[kept]?.classList.remove("kept");
      kept = kept === Number(box.dataset.place) ? null : Number(box.dataset.place);
      if (kept === null) return;
      box.classList.add("kept");
    }
    replace(side, numbers(answer, Number(box.dataset.place)));
  }

  stream.addEventListener("pointerover", (event) => point(event, false));
  stream.addEventListener("click", (event) => point(event, true));
  lay();
  repaint();
  const step = (offset, text) => {
    const target = completion + offset;
    return el("a", { class: target < 0 || target >= answer.of ? "button off" : "button", href: target < 0 || target >= answer.of ? location.hash : changed({ n: target || null }) }, text);
  };
  const missing = [];
  if (!answer.has_text) missing.push("The run directory has no tokenizer, so tokens are shown by their ids.");
  if (!columns.mismatch) missing.push("The learner's numbers (entropy, ratio, mismatch) are kept only for the first groups of each saved step; this group is not one of them.");
  replace(page,
    el("div", { class: "bar" }, el("h1", {}, "Tokens"), el("span", {}, `step ${answer.step}, draw ${answer.draw}, completion ${completion + 1} of ${answer.of}`), badge(`reward ${number(answer.reward)}`, tone(answer.reward)), answer.finish === "length" ? badge("truncated", "warn") : null,
      el("span", { class: "grow" }), step(-1, "‹ previous"), step(1, "next ›"), el("a", { class: "button", href: address("samples", { run, s: answer.step, draw: answer.draw }) }, "the group")),
    el("div", { class: "bar" }, choice("colour by", modes, by, (value) => { by = value; note({ by: value === "logprob" ? null : value }); repaint(); }), legend, el("span", { class: "grow" }), el("label", {}, showPrompt, " show the prompt"), el("span", { class: "soft" }, counted(columns.id.length, "token"))),
    missing.length ? el("p", { class: "soft small" }, missing.join(" ")) : null,
    el("div", { class: "split right" }, el("div", { class: "card" }, stream), side));
  return null;
}
