// The frame: pages, keys, theme, and the heartbeat that keeps them live.

import { ask, isStale } from "./api.js";
import { comparePage } from "./compare.js";
import { curvesPage } from "./curves.js";
import { fill, h, isPressed } from "./dom.js";
import { factsPage } from "./facts.js";
import { promptsPage } from "./prompts.js";
import { rolloutsPage } from "./rollouts.js";
import { runsPage } from "./runs.js";
import { lengthsPage, policyPage, rewardsPage } from "./spread.js";
import { chosenRuns, link, place, shared } from "./state.js";

const PAGES = {
  runs: ["Runs", runsPage],
  curves: ["Curves", curvesPage],
  rollouts: ["Rollouts", rolloutsPage],
  prompts: ["Prompts", promptsPage],
  lengths: ["Lengths", lengthsPage],
  policy: ["Policy", policyPage],
  rewards: ["Rewards", rewardsPage],
  compare: ["Differences", comparePage],
  facts: ["Facts", factsPage],
};
const KEYS = [
  ["1 … 9", "runs, curves, rollouts, prompts, lengths, policy, rewards, differences, facts"],
  ["j  k", "next, previous in a list"],
  ["Enter", "open"],
  ["n  p", "next, previous group"],
  ["c", "colour tokens by the next quantity"],
  ["/", "search"],
  ["+  −  ←  →  0", "curves: closer, wider, earlier, later, all steps"],
  ["s", "curves: smoother, and back to none"],
  ["Esc", "leave a field, close"],
  ["t", "light or dark"],
];
const HEARTBEAT = 2000;
const IMPATIENT = 150; // while a chosen run shows nothing yet because it is still being read

const main = document.getElementById("main");
const status = document.getElementById("status");
let page = null;
const ids = new Map(); // of the last run of each name
let isNew = false; // the runs have changed since the page was last told

/** Whether another run than before has this name. */
function isAnother({ name, id }) {
  const before = ids.get(name) ?? id;
  if (id) ids.set(name, id);
  return id !== null && before !== id;
}

/** Offer the runs there are now where one is chosen. */
function offerRuns() {
  const names = shared.runs.map((run) => run.name);
  for (const select of main.querySelectorAll("select[aria-label='Run']")) {
    const now = select.value;
    if (String([...select.options].map((option) => option.value)) === String(names)) continue;
    fill(select, names.map((name) => h("option", { value: name }, name)));
    select.value = now;
  }
}

/** Tell the reader, in the header. */
export function say(text, isBad = false) {
  status.textContent = text;
  status.className = isBad ? "bad" : "";
}

/** The links between pages, which carry the chosen runs along. */
function drawLinks(name) {
  fill(document.getElementById("nav"), Object.entries(PAGES).map(([key, [label]]) =>
    h("a", { href: link(key, key === "runs" ? {} : { run: chosenRuns() }), "aria-current": key === name ? "page" : null }, label)));
  const here = document.querySelector("nav [aria-current]");
  if (here) here.parentElement.scrollLeft = here.offsetLeft - 8; // on a phone the row of pages is wider than the screen
}

async function show() {
  const { page: name } = place();
  const [title, make] = PAGES[name] ?? PAGES.runs;
  document.title = `${title} · Covey`;
  drawLinks(name);
  page?.leave?.();
  if (page?.name === name && page.moved) {
    page.moved();
  } else {
    try {
      page = { name, ...(await make(main)) };
    } catch (error) {
      page = { name };
      fill(main, h("h1", {}, title), h("p", { class: "bad" }, error.message));
    }
  }
  document.documentElement.dataset.ready = name;
}

async function beat() {
  if (document.hidden) return;
  try {
    const before = JSON.stringify(shared.runs);
    const told = await ask("runs");
    shared.runs = told.runs;
    shared.sorts = told.sorts;
    const left = told.runs.filter((run) => run.indexed.bytes < run.indexed.of || run.indexed.files_left > 0);
    say(left.length ? `reading ${left.map((run) => `${run.name} (${share(run)})`).join(", ")}` : "");
    isNew ||= JSON.stringify(shared.runs) !== before;
    const hadRuns = before !== "[]";
    if ((shared.runs.filter(isAnother).length || hadRuns !== shared.runs.length > 0) && page) {
      page.leave?.();
      page = null; // nothing of what was there before stays
      await show();
    }
    offerRuns();
    if (!isNew || isPressed()) return;
    isNew = false;
    page?.live?.();
  } catch (error) {
    if (!isStale(error)) say("The server does not answer; it may have been stopped.", true);
  }
}

/** Beats for as long as the page is open. */
function again() {
  const empty = shared.runs.some((run) => chosenRuns().includes(run.name) && !run.metrics.length && run.indexed.bytes < run.indexed.of);
  setTimeout(() => beat().finally(again), empty ? IMPATIENT : HEARTBEAT);
}

function share(run) {
  const { bytes, of, files_left: files } = run.indexed;
  return bytes < of ? `${Math.floor((100 * bytes) / of)}% of the metrics` : `${files} files of rollouts left`;
}

function onKey(event) {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName);
  if (event.key === "Escape" && typing) event.target.blur();
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const names = Object.keys(PAGES);
  const at = Number(event.key) - 1;
  if (event.key === "?") showKeys();
  else if (event.key === "t") switchTheme();
  else if (names[at]) location.hash = link(names[at], at ? { run: chosenRuns() } : {});
  else if (event.key === "/" && document.querySelector("input[type=search]")) document.querySelector("input[type=search]").focus();
  else if (!page?.key?.(event.key)) return;
  event.preventDefault();
}

function showKeys() {
  const dialog = document.getElementById("keys");
  fill(dialog, h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])),
    h("form", { method: "dialog" }, h("button", {}, "Close")));
  if (!dialog.open) dialog.showModal();
}

function switchTheme() {
  const root = document.documentElement;
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  page?.theme?.();
}

async function start() {
  const theme = localStorage.getItem("theme");
  if (theme) document.documentElement.dataset.theme = theme;
  document.getElementById("theme").addEventListener("click", switchTheme);
  document.getElementById("help").addEventListener("click", showKeys);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => page?.theme?.());
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address says which page this is
    main.focus();
  });
  addEventListener("hashchange", show);
  addEventListener("covey-chosen", () => drawLinks(place().page));
  addEventListener("keydown", onKey);
  addEventListener("storage", () => { isNew = true; }); // notes and columns of another tab are drawn with the next beat
  await beat();
  await show();
  again();
}

start();
