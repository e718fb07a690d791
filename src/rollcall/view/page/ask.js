// Requests to the server.

export class Refused extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export async function ask(name, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    if (value === null || value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) query.append(key, one);
  }
  let answer;
  try {
    answer = await fetch(`/api/${name}?${query}`, { signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server does not answer. Is `rollcall view` still running?");
  }
  if (answer.status === 401) {
    throw new Refused(401, "This server does not recognise this browser. Open the newest address that Rollcall printed.");
  }
  let body;
  try {
    body = await answer.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(answer.status, `The server could not answer (status ${answer.status}).`);
  }
  if (!answer.ok) throw new Refused(answer.status, body.error || `The server answered with status ${answer.status}.`);
  return body;
}
