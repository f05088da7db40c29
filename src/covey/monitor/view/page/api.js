// Questions to the server. A newer question of the same kind cancels the older one.

import { addTo } from "./dom.js";

const running = new Map();

/** The JSON of an endpoint; `kind` names questions of which only the newest counts. Throws Error with the server's sentence. */
export async function ask(call, query = {}, kind = null) {
  const words = addTo(new URLSearchParams(), query);
  const stop = new AbortController();
  if (kind) {
    running.get(kind)?.abort();
    running.set(kind, stop);
  }
  const reply = await fetch(`api/${call}?${words}`, { signal: stop.signal });
  if (reply.ok) return reply.json();
  const said = await reply.text();
  throw new Error([404, 422].includes(reply.status) && said.startsWith("{") ? JSON.parse(said).error ?? said : said);
}

/** Whether an error only says that a newer question took over. */
export const isStale = (error) => error.name === "AbortError";
