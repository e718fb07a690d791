// Elements and text. Text from a model, a run or a user always becomes a text node and is never parsed as HTML.

export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function replace(parent, ...children) {
  parent.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

// Characters that are invisible, or that change how the text around them looks.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const MOST_NAMED = 500;

export function wellFormed(text) {
  return text.toWellFormed ? text.toWellFormed() : text.replace(/[\ud800-\udfff]/g, "\ufffd");
}

// Turns text into nodes with its hidden characters made visible.
export function shown(text) {
  text = wellFormed(String(text));
  const nodes = [];
  let at = 0;
  let named = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (++named > MOST_NAMED) break;
    if (match.index > at) nodes.push(text.slice(at, match.index));
    const code = "U+" + match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    nodes.push(el("span", { class: "hidden-char", title: `the character ${code}` }, code));
    at = match.index + match[0].length;
  }
  const rest = text.slice(at);
  nodes.push(named > MOST_NAMED ? rest.replace(HIDDEN, "\u00b7") : rest);
  return nodes;
}

// Escapes text for Plotly, which interprets some HTML in labels.
export function plain(text) {
  return wellFormed(String(text)).replace(HIDDEN, "\u00b7").replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: Math.min(digits, 2) });
}

// A number with its noun, in the plural unless the number is 1.
export function counted(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const minutes = seconds / 60;
  if (minutes < 60) return `${Math.floor(minutes)} min ${Math.round(seconds % 60)} s`;
  const hours = minutes / 60;
  if (hours < 48) return `${Math.floor(hours)} h ${Math.round(minutes % 60)} min`;
  return `${Math.floor(hours / 24)} d ${Math.round(hours % 24)} h`;
}

export function bytes(count) {
  for (const [power, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (count >= power) return `${(count / power).toFixed(count / power < 10 ? 2 : 1)} ${unit}`;
  }
  return `${count} bytes`;
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleString();
}

export function message(title, text, kind = "") {
  return el("div", { class: `message ${kind}` }, el("h2", {}, title), el("p", {}, text));
}

export function badge(text, kind = "") {
  return el("span", { class: `badge ${kind}` }, text);
}

export function choice(label, options, value, onchange) {
  const select = el("select", { "aria-label": label, onchange: () => onchange(select.value) });
  for (const [key, text] of options) select.append(el("option", { value: key, selected: key === value }, text));
  return el("label", {}, label, " ", select);
}
