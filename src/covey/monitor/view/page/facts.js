// What a run was: its command, options, versions, data, attempts, and what went wrong or was dropped.

import { ask } from "./api.js";
import { fill, h, visible } from "./dom.js";
import { stories } from "./story.js";
import { chosenRuns, shared } from "./state.js";

const FIRST = ["name", "state", "step", "created", "command", "working_folder", "parent", "seeds", "dataset"];
const LATER = ["config", "algorithm", "rewards", "versions", "hardware", "git", "attempts", "sources"];

/** Fill the page; what comes back keeps it live. */
export async function factsPage(main) {
  let told = [];
  const search = h("input", { type: "search", placeholder: "Filter facts", "aria-label": "Filter facts", oninput: () => draw() });
  const place = h("div");
  fill(main, h("h1", {}, "Facts"), h("div", { class: "bar" }, search), place);

  async function live() {
    const now = await Promise.all(chosenRuns().map(async (run) => {
      try {
        return { run, ...(await ask("facts", { run })) };
      } catch (error) {
        return { run, manifest: {}, events: [], troubles: [error.message] };
      }
    }));
    if (JSON.stringify(now) === JSON.stringify(told)) {
      place.querySelectorAll(".stories").forEach((old, at) => old.replaceWith(storyOf(told[at].run)));
      return;
    }
    const open = new Set([...place.querySelectorAll("details[open]")].map(keyOf));
    told = now;
    draw();
    for (const one of place.querySelectorAll("details")) one.open ||= open.has(keyOf(one)); // what the reader opened stays open
  }

  function draw() {
    const wanted = search.value.toLowerCase();
    fill(place, told.map(({ run, manifest, changed = {}, events, troubles }) => h("section", {}, h("h2", {}, run), storyOf(run),
      troubles.map((said) => h("p", { class: "bad" }, said)),
      part("options that differ from the defaults", changed, wanted, true),
      FIRST.concat(LATER).filter((name) => manifest[name] !== undefined && manifest[name] !== null).map((name) => part(name, manifest[name], wanted)),
      part(`events (the last ${events.length})`, events.map((event) => `step ${event.step}: ${event.kind}: ${event.said}`), wanted))));
  }

  await live();
  return { live, moved: live };
}

const storyOf = (run) => stories(shared.runs.filter((one) => one.name === run));

/** The same for a part of a run that is drawn anew, however many entries it has. */
const keyOf = (details) => `${details.parentElement.firstChild.textContent} ${details.firstChild.textContent.split(" (")[0]}`;

function part(name, value, wanted, isOpen = false) {
  const rows = flat(value).filter(([key, text]) => (text !== "" || key !== "") && `${name}.${key} ${text}`.toLowerCase().includes(wanted));
  if (!rows.length) return null;
  if (rows.length === 1 && rows[0][0] === "") return h("p", { class: "fact" }, h("b", {}, name), " ", h("code", {}, rows[0][1]));
  return h("details", { open: wanted !== "" || isOpen }, h("summary", {}, `${name} (${rows.length})`),
    h("div", { class: "wide" }, h("table", { class: "facts" }, h("tbody", {}, rows.map(([key, text]) => h("tr", {}, h("th", {}, key), h("td", {}, h("pre", {}, text))))))));
}

/** `[dotted name, text]` of everything in a value. */
function flat(value, where = "") {
  if (value === null || typeof value !== "object") return [[where, visible(value)]];
  if (Array.isArray(value) && value.every((item) => item === null || typeof item !== "object")) return [[where, visible(value.join(where ? ", " : " "))]];
  return Object.entries(value).flatMap(([key, item]) => flat(item, where ? `${where}.${key}` : key));
}
