// Every prompt with its history: solved, flaky, unsolved, forgotten; where it was seen and how it went.

import { ask, isStale } from "./api.js";
import { fill, h, later, letGo, short, visible, walk } from "./dom.js";
import { amend, chosenRuns, link, place, shared } from "./state.js";

const ROWS = 20;
const MOST = 2000;
const STATES = [["all", "all"], ["solved", "every answer of its newest group reaches the threshold"], ["flaky", "some answers do"], ["unsolved", "none does"], ["forgotten", "unsolved now, and was better before"]];

export function promptsPage(main) {
  const kept = { rows: [], next: 0, isBusy: false, turn: 0, isGone: false };
  const states = h("div", { class: "bar states", role: "group", "aria-label": "State" });
  const body = h("tbody");
  const more = h("div", { class: "more", role: "status" });
  const word = (name) => place().words.get(name);
  const run = () => word("run") ?? chosenRuns()[0];
  const query = () => ({ run: run(), state: word("state"), sort: word("sort"), threshold: word("threshold") });
  const set = (name, value) => { amend({ [name]: value }); restart(); };
  const threshold = h("input", { type: "number", step: "any", value: word("threshold") ?? "", "aria-label": "Threshold of a right answer" });
  threshold.addEventListener("input", later(() => set("threshold", threshold.value), 150));
  const orders = h("select", { "aria-label": "Order", onchange: (event) => set("sort", event.target.value) });
  const save = h("a", { class: "button", download: "prompts.csv" }, "CSV");
  const bar = h("div", { class: "bar" }, h("select", { "aria-label": "Run", onchange: (event) => set("run", event.target.value) },
    shared.runs.map((one) => h("option", { value: one.name, selected: one.name === run() }, one.name))), orders,
  h("label", {}, "right from reward ", threshold), save);
  fill(main, h("h1", {}, "Prompts"), bar, states, h("div", { class: "wide" }, h("table", { class: "prompts" },
    h("thead", {}, h("tr", {}, ["prompt", "state", "seen", "reward over its visits", "first", "last", "gain"].map((name, at) => h("th", { class: at > 3 || at === 2 ? "number" : null, scope: "col" }, name)))), body)), more);
  const watcher = new IntersectionObserver((entries) => entries.some((entry) => entry.isIntersecting) && load(), { rootMargin: "600px" });

  function restart() {
    Object.assign(kept, { rows: [], next: 0, isBusy: false, turn: kept.turn + 1 });
    return load();
  }

  async function load() {
    if (kept.isBusy || kept.next === null || kept.rows.length >= MOST || !run() || kept.isGone) return;
    kept.isBusy = true;
    const turn = kept.turn;
    try {
      const told = await ask("prompts", { ...query(), start: kept.next, most: ROWS }, "prompts");
      await letGo();
      if (turn !== kept.turn || kept.isGone) return;
      const isFirst = kept.next === 0;
      const listed = new Set(kept.rows.map((row) => row.uid)); // a run that goes on moves prompts down the order
      const rows = told.rows.filter((row) => !listed.has(row.uid));
      kept.rows.push(...rows);
      kept.next = told.next;
      if (isFirst) head(told);
      if (isFirst) fill(body);
      body.append(...rows.map((row) => rowOf(row, told.threshold)));
      fill(more, `${short(kept.rows.length)} shown of ${short(told.matching)} prompts that pass, of ${short(told.prompts)}`, told.files_left ? `; ${short(told.files_left)} files are not read yet` : "",
        kept.rows.length >= MOST && kept.next !== null ? "; the CSV has all" : "");
      document.documentElement.dataset.prompts = String(performance.now());
      watcher.unobserve(more);
      watcher.observe(more); // it is told of a change only: with few rows the end of the list stays in sight
    } catch (error) {
      if (!isStale(error)) fill(more, h("span", { class: "bad" }, error.message));
    }
    if (turn === kept.turn) kept.isBusy = false;
  }

  function head(told) {
    fill(orders, told.orders.map((name) => h("option", { value: name, selected: name === (word("sort") ?? "last seen") }, name)));
    threshold.placeholder = short(told.threshold);
    save.href = `api/prompts?${new URLSearchParams(Object.entries({ ...query(), csv: "1" }).filter(([, value]) => value))}`;
    const now = word("state") ?? "all";
    fill(states, STATES.map(([name, title]) => h("button", { title, "aria-pressed": String(name === now), onclick: () => set("state", name === "all" ? null : name) },
      `${name} ${short(name === "all" ? told.prompts : told.counts[name])}`)));
  }

  function rowOf(row, limit) {
    return h("tr", {}, h("td", { class: "said" }, h("a", { href: link("rollouts", { run: run(), uid: row.uid }) }, visible(row.prompt) || "(no text)")),
      h("td", { "data-label": "state" }, h("span", { class: `state ${row.state}` }, row.state), row.forgotten ? h("small", { class: "bad" }, " forgotten") : null),
      h("td", { class: "number", "data-label": "seen" }, short(row.visits)), h("td", { "data-label": "visits" }, visitsOf(row, limit)),
      h("td", { class: "number", "data-label": "first" }, short(row.first)), h("td", { class: "number", "data-label": "last" }, short(row.last)),
      h("td", { class: `number ${row.gain < 0 ? "worse" : row.gain > 0 ? "better" : ""}`, "data-label": "gain" }, `${row.gain > 0 ? "+" : ""}${short(row.gain)}`));
  }

  /** A bar a visit, from its lowest to its highest reward, with a dot at the mean; each opens that group. */
  function visitsOf(row, limit) {
    const shown = row.history;
    const low = Math.min(...shown.map((one) => one.lowest), limit);
    const range = Math.max(...shown.map((one) => one.highest), limit) - low || 1;
    return h("span", { class: "visits" }, shown.map((one) => {
      const bar = h("i");
      bar.style.bottom = `${(85 * (one.lowest - low)) / range}%`;
      bar.style.height = `${15 + (85 * (one.highest - one.lowest)) / range}%`;
      const dot = h("b");
      dot.style.bottom = `${(88 * (one.reward - low)) / range}%`;
      const said = `step ${one.step}: ${short(one.reward)} (${short(one.lowest)} to ${short(one.highest)})`;
      return h("a", { href: link("rollouts", { run: run(), uid: row.uid, step: one.step, group: one.group }), title: said, "aria-label": said,
        class: one.lowest >= limit - 1e-6 ? "all" : one.highest >= limit - 1e-6 ? "some" : "none" }, bar, dot);
    }));
  }

  restart();
  return {
    leave() { kept.isGone = true; watcher.disconnect(); },
    moved: restart,
    live: () => { if (scrollY < 200 && !body.contains(document.activeElement)) restart(); },
    key: (pressed) => walk(pressed, [...body.querySelectorAll(".said a")]),
  };
}
