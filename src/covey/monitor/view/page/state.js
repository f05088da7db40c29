// Where the reader is: the part of the address after `#`, so that every view can be linked to.

import { addTo } from "./dom.js";

/** `{page, words}` of the address: `#curves?run=a&run=b`. */
export function place() {
  const [page, query] = location.hash.slice(1).split("?");
  return { page: page || "runs", words: new URLSearchParams(query ?? "") };
}

/** The address of a page with these words; lists repeat. Empty values are left out. */
export function link(page, words = {}) {
  const query = addTo(new URLSearchParams(), words);
  return `#${page}${query.size ? `?${query}` : ""}`;
}

/** Change words of the present address without leaving the page or its history entry. */
export function amend(changes) {
  const { page, words } = place();
  for (const name of Object.keys(changes)) words.delete(name);
  addTo(words, changes);
  history.replaceState(null, "", `#${page}${words.size ? `?${words}` : ""}`);
}

/** What all pages share: the runs as the server last told, and those that are chosen. */
export const shared = { runs: [], sorts: [], chosen: [] };

/** The runs that a page shows: those of the address, else the chosen ones, else the newest. */
export function chosenRuns() {
  const known = new Set(shared.runs.map((run) => run.name));
  const named = place().words.getAll("run").filter((name) => known.has(name));
  if (named.length) shared.chosen = named;
  const kept = shared.chosen.filter((name) => known.has(name));
  if (kept.length) return kept;
  const newest = [...shared.runs].sort((a, b) => String(b.created ?? "").localeCompare(String(a.created ?? "")))[0];
  return newest ? [newest.name] : [];
}

/** Remember which runs are looked at. */
export function choose(names) {
  shared.chosen = names;
  dispatchEvent(new Event("covey-chosen"));
}

const LINES = ["#2f7fc1", "#d9730d", "#3a9d5d", "#a34fb5", "#c23b4b", "#7a6a00", "#008b94", "#8c5a3c"];

/** The colour of a run, the same on every page. */
export function colourOf(name) {
  const at = shared.runs.findIndex((run) => run.name === name);
  return LINES[(at < 0 ? 0 : at) % LINES.length];
}

const MARKS = ["●", "■", "▲", "◆", "▼", "★", "✚"];

/** The mark of a run on its curves and in legends, the same on every page: colours alone are not told apart by everyone. */
export function markOf(name) {
  const at = shared.runs.findIndex((run) => run.name === name);
  return MARKS[(at < 0 ? 0 : at) % MARKS.length];
}

/** Runs whose curves the reader has put away. */
export const hiddenRuns = () => new Set(place().words.getAll("hide"));
