// The current place in the page: the part of the address after '#', which can be bookmarked.

export function read() {
  const [path, query] = (location.hash.slice(1) || "/runs").split("?");
  return { view: path.replace(/^\//, "") || "runs", ask: new URLSearchParams(query || "") };
}

export function address(view, parameters = {}) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    if (value === null || value === undefined || value === "" || value === false) continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(key, one);
  }
  const text = query.toString();
  return `#/${view}${text ? "?" + text : ""}`;
}

// The current address with some parameters changed.
export function changed(changes) {
  const { view, ask } = read();
  for (const [key, value] of Object.entries(changes)) {
    ask.delete(key);
    if (value === null || value === undefined || value === "" || value === false) continue;
    for (const one of Array.isArray(value) ? value : [value]) ask.append(key, one);
  }
  const text = ask.toString();
  return `#/${view}${text ? "?" + text : ""}`;
}

export function go(hash) {
  location.hash = hash;
}

// Changes the address without reloading, for settings that the current view already shows.
export function note(changes) {
  history.replaceState(null, "", changed(changes));
}
