// What the policy wrote: a list of groups to sort, filter and search, and one of them in full.

import { ask, isStale } from "./api.js";
import { fill, h, later, short, visible } from "./dom.js";
import { groupView } from "./group.js";
import { stories } from "./story.js";
import { amend, chosenRuns, place, shared } from "./state.js";

const ROWS = 50;
const MOST = 5000; // rows in the list, so that its memory has an end
const NARROW = 760; // pixels: below, the list and a group take turns
const FILTERS = ["sort", "search", "from", "to", "min_reward", "max_reward", "truncated", "signal", "uid"];

/** Fill the page; what comes back keeps it live. */
export function rolloutsPage(main) {
  const kept = { rows: [], next: 0, at: -1, isBusy: false, turn: 0, groups: 0 };
  const list = h("div", { class: "list", role: "list", "aria-label": "Groups" });
  const more = h("div", { class: "more", role: "status" });
  const fresh = h("div", { role: "status" });
  const detail = h("section", { class: "detail", "aria-label": "Group" });
  const bar = filters(() => restart());
  const layout = h("div", { class: "browser" }, h("div", { class: "side" }, fresh, list, more), detail);
  const group = groupView(detail, { step: moveBy, close: () => open(null) });
  const story = h("div");
  const tell = () => fill(story, stories(shared.runs.filter((one) => one.name === query().run)));
  fill(main, h("h1", {}, "Rollouts"), story, bar, layout);
  new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && load(), { rootMargin: "600px" }).observe(more);

  function query() {
    const words = place().words;
    return { run: words.get("run") ?? chosenRuns()[0], ...Object.fromEntries(FILTERS.map((name) => [name, words.get(name)])) };
  }

  async function restart() {
    tell();
    Object.assign(kept, { rows: [], next: 0, at: -1, isBusy: false, turn: kept.turn + 1 });
    if (!place().words.has("group")) open(null);
    await load();
  }

  async function load() {
    if (kept.isBusy || kept.next === null || kept.rows.length >= MOST || !query().run) return;
    kept.isBusy = true;
    const turn = kept.turn;
    const isFirst = kept.next === 0;
    try {
      const told = await ask("rollouts", { ...query(), start: kept.next, most: ROWS }, "rollouts");
      if (turn !== kept.turn) return;
      if (isFirst) kept.groups = told.groups;
      if (isFirst) fill(list);
      const start = kept.rows.length;
      const listed = new Set(kept.rows.map(keyOf)); // a run that goes on moves groups further down the order
      const rows = told.rows.filter((row) => !listed.has(keyOf(row)));
      kept.rows.push(...rows);
      kept.next = told.next;
      list.append(...rows.map((row, at) => rowOf(row, start + at)));
      fill(more, ending(told));
      if (isFirst && !place().words.has("group") && !query().search && innerWidth > NARROW) openTelling();
      document.documentElement.dataset.listed = String(performance.now());
      kept.isBusy = false;
      if (told.next !== null && (!told.rows.length || more.getBoundingClientRect().top < innerHeight)) setTimeout(load, 0);
    } catch (error) {
      if (turn === kept.turn) kept.isBusy = false;
      if (!isStale(error)) fill(more, h("p", { class: "bad" }, error.message));
    }
  }

  /** A list without groups is filled as soon as there are some; one that is read stays as it is, and more groups are offered. */
  async function live() {
    tell();
    if (kept.isBusy) return;
    if (!kept.groups) return restart();
    const told = await ask("rollouts", { run: query().run, most: 1 }, "count").catch((error) => error);
    if (told instanceof Error) return isStale(told) || fill(fresh, h("p", { class: "bad" }, told.message));
    const more = told.groups - kept.groups;
    return fill(fresh, more ? h("button", { onclick: () => { fill(fresh); restart(); } }, more > 0 ? `show new groups (${short(more)})` : "groups were dropped: list them anew") : null);
  }

  /** Open the group that shows most, with rewards far apart and both kinds in it, of those listed first. */
  function openTelling() {
    const at = kept.rows.reduce((best, row, here) => (contrast(row) > contrast(kept.rows[best]) ? here : best), 0);
    if (!mark(at)) return;
    list.parentElement.scrollTop = list.children[at].offsetTop - list.parentElement.clientHeight / 2; // the page itself stays at its top
    open(kept.rows[at]);
  }

  function ending(told) {
    const found = `${short(kept.rows.length)} shown of ${short(told.matching)} groups that pass`;
    const left = told.files_left ? `; ${told.files_left} files are not read yet` : "";
    const looking = query().search ? (told.next === null ? "; all were searched" : `; searched ${short(told.next)}`) : "";
    const full = kept.rows.length >= MOST && told.next !== null ? "; choose fewer by a filter to see others" : "";
    return `${found}${looking}${full} (${short(told.groups)} groups, ${short(told.completions)} completions)${left}`;
  }

  function rowOf(row, at) {
    return h("div", { class: "row", role: "listitem", tabindex: at === 0 ? 0 : -1, "data-at": at, onclick: () => select(at, true),
      onkeydown: (event) => event.key === "Enter" && select(at, true) },
    h("div", { class: "head" }, h("b", {}, `step ${row.step}`), h("span", {}, `group ${row.group}`), meter(row),
      row.truncated ? h("span", { class: "tag" }, `${row.truncated} cut`) : null,
      row.change === null ? null : h("span", { class: row.change < 0 ? "worse" : "better" }, `${row.change < 0 ? "" : "+"}${short(row.change)}`)),
    h("div", { class: "brief" }, visible(row.prompt)), h("div", { class: "brief soft" }, visible(row.first)));
  }

  function select(at, isOpened) {
    if (!mark(at)) return false;
    list.children[at].focus({ preventScroll: true });
    list.children[at].scrollIntoView({ block: "nearest" });
    if (isOpened) open(kept.rows[at]);
    return true;
  }

  function mark(at) {
    if (at < 0 || at >= kept.rows.length) return false;
    list.querySelector("[aria-current]")?.removeAttribute("aria-current");
    const element = list.children[at];
    kept.at = at;
    element.setAttribute("aria-current", "true");
    for (const other of list.querySelectorAll("[tabindex='0']")) other.tabIndex = -1; // the list is one stop of the Tab key
    element.tabIndex = 0;
    return true;
  }

  function open(row) {
    amend({ step: row?.step, group: row?.group });
    layout.classList.toggle("open", row !== null);
    if (row) group.show(query().run, row.step, row.group);
    else fill(detail, h("p", { class: "soft" }, "Choose a group."));
  }

  function moveBy(by) {
    if (kept.at + by >= kept.rows.length - 5) load();
    return select(kept.at + by, true);
  }

  function fromAddress() {
    const words = place().words;
    restart();
    open(words.get("group") === null ? null : { step: Number(words.get("step")), group: Number(words.get("group")) });
  }

  fromAddress();
  return {
    live,
    moved: () => rolloutsPage(main),
    theme: () => group.recolour(),
    key(key) {
      if (key === "j") return select(kept.at + 1, false);
      if (key === "k") return select(kept.at - 1, false);
      if (key === "n") return moveBy(1);
      if (key === "p") return moveBy(-1);
      if (key === "Escape") return open(null), true;
      return group.key(key);
    },
  };
}

const keyOf = (row) => `${row.step} ${row.group}`;

/** The spread of a group's rewards, less where nearly all are alike. */
function contrast({ reward, lowest, highest }) {
  const spread = (highest ?? 0) - (lowest ?? 0);
  return spread > 0 ? spread * (1 - Math.abs((2 * (reward - lowest)) / spread - 1)) : 0;
}

function meter(row) {
  const text = row.reward === null ? "not scored" : `${short(row.reward)} (${short(row.lowest)} to ${short(row.highest)})`;
  return h("span", { class: "meter", title: "mean reward (lowest to highest)" }, text);
}

function filters(changed) {
  const words = place().words;
  const set = (name, value) => {
    amend({ [name]: value, step: null, group: null });
    changed();
  };
  const field = (name, label, properties) => {
    const input = h("input", { value: words.get(name) ?? "", "aria-label": label, ...properties });
    input.addEventListener("input", later(() => set(name, input.value), 40));
    return h("label", {}, `${label} `, input);
  };
  const box = (name, label) => {
    const input = h("input", { type: "checkbox", checked: words.has(name), onchange: () => set(name, input.checked) });
    return h("label", {}, input, label);
  };
  const run = words.get("run") ?? chosenRuns()[0];
  const select = (name, label, options, now) => h("select", { "aria-label": label, onchange: (event) => set(name, event.target.value) },
    options.map((option) => h("option", { value: option, selected: option === now }, option)));
  const search = h("input", { type: "search", class: "long", value: words.get("search") ?? "", placeholder: "Search prompts and completions",
    "aria-label": "Search prompts and completions" });
  search.addEventListener("input", later(() => set("search", search.value), 40));
  const uid = words.has("uid") ? h("button", { onclick: (event) => { event.target.remove(); set("uid", null); } }, "one prompt only ×") : null;
  return h("div", { class: "bar" }, select("run", "Run", shared.runs.map((one) => one.name), run), search,
    select("sort", "Order", shared.sorts, words.get("sort") ?? "newest"),
    h("span", { class: "pair" }, field("from", "step", { type: "number", min: 0 }), field("to", "to", { type: "number", min: 0 })),
    h("span", { class: "pair" }, field("min_reward", "reward", { type: "number", step: "any" }), field("max_reward", "to", { type: "number", step: "any" })),
    box("truncated", "cut off"), box("signal", "rewards differ"), uid);
}
