// Curves of the chosen runs over each other, live, with the alerts on them.

import { alertList } from "./alerts.js";
import { ask, isStale } from "./api.js";
import { fill, h, later } from "./dom.js";
import { stories } from "./story.js";
import { memoryUse, Panel, phaseSeconds, rewardSpread, signalShares, tokenSpeed } from "./panels.js";
import { amend, chosenRuns, colourOf, hiddenRuns, markOf, place, shared } from "./state.js";

const FIRST = [
  "eval_reward", "reward", "kl", "entropy", "completions/mean_length", "completions/clipped_ratio", "frac_reward_zero_std",
  "grad_norm", "loss", "sampling/sampling_logp_difference/mean", "seconds/step", "learning_rate",
];
const EACH = /^(eval.*_)?rewards\/.+\/mean$|^eval_.*reward$/; // by default too: held-out sets, and every reward apart
const AXES = { step: "by step", time: "by hours", tokens: "by tokens" };
const SMOOTH = [1, 10, 50, 200, 1000];
const POINTS = 600;
const MOST_ASKED = 48;
const AHEAD = 3; // curves below the screen that are asked for at a time
const PAUSE = 150; // milliseconds in which the browser shows what is drawn, and the reader may go on

/** Fill the page; what comes back keeps it live. */
export function curvesPage(main) {
  const words = place().words;
  const kept = { low: numberOf(words.get("from")), high: numberOf(words.get("to")), smooth: Number(words.get("smooth")) || 1, isLog: false, floor: numberOf(words.get("low")), ceiling: numberOf(words.get("high")), alerts: [], isOwed: false, isBusy: false, timer: 0, axis: AXES[words.get("x")] ? words.get("x") : "step", seeds: words.has("seeds"), version: 0,
    range: () => ends().slice(0, 2) };
  const panels = new Map();
  const due = new Set();
  const grid = h("div", { class: "plots" });
  const bar = toolbar(kept, { range, smooth, set, filter: later(arrange, 100) });
  const told = h("div");
  const story = h("div");
  fill(main, h("h1", {}, "Curves"), story, told, bar.element, legend(() => panels.forEach(want)), grid);

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const panel = panels.get(entry.target.dataset.metric);
      if (panel) {
        panel.isSeen = entry.isIntersecting;
        if (panel.isSeen && panel.isOld) want(panel);
      }
    }
  }, { rootMargin: "200px 0px 800px" });

  /** Draw what is due on the screen, and say so; what the reader may scroll to comes after a pause, in small pieces. */
  const flush = later(async () => {
    kept.isOwed = true;
    if (kept.isBusy) return;
    kept.isBusy = true;
    clearTimeout(kept.timer);
    while (kept.isOwed) {
      kept.isOwed = false;
      while (await piece([...due].filter(isOnScreen), MOST_ASKED));
      document.documentElement.dataset.drawn = String(performance.now());
    }
    kept.isBusy = false;
    kept.timer = setTimeout(ahead, PAUSE);
  }, 0);

  async function ahead() {
    kept.isBusy = true;
    const isMore = await piece([...due], AHEAD);
    kept.isBusy = false;
    if (kept.isOwed) flush();
    else if (isMore) kept.timer = setTimeout(ahead, 0);
  }

  /** Load and draw the first of `wanted`, at most `most` curves; false where there is none. */
  async function piece(wanted, most) {
    const runs = chosenRuns();
    const asked = wanted.slice(0, Math.max(1, Math.floor(most / runs.length)));
    for (const panel of asked) due.delete(panel);
    if (asked.length) await load(asked, runs);
    return asked.length > 0;
  }

  function want(panel) {
    panel.isOld = true;
    if (!panel.isSeen) return;
    due.add(panel);
    flush();
  }

  async function load(asked, runs) {
    for (const panel of asked) panel.isOld = false;
    const query = { run: runs, from: kept.low, to: kept.high, points: POINTS, x: kept.axis, seeds: kept.seeds };
    try {
      const plain = asked.filter((panel) => !panel.draws);
      const metrics = plain.map((panel) => panel.metric);
      const curves = async (smooth) => (metrics.length && smooth ? ask("series", { ...query, metric: metrics, smooth }) : { curves: [] });
      await Promise.all([
        Promise.all([curves(1), curves(kept.smooth > 1 ? kept.smooth : 0)]).then(([raw, even]) => plain.forEach((panel) => panel.show(raw.curves, even.curves, kept, raw.left_out))),
        ...asked.filter((panel) => panel.draws).map((panel) => panel.load(kept)),
      ]);
    } catch (error) {
      if (!isStale(error)) fill(told, h("p", { class: "bad" }, error.message));
    }
  }

  function arrange() {
    const runs = shared.runs.filter((run) => chosenRuns().includes(run.name));
    const there = new Set(runs.flatMap((run) => run.metrics));
    const wanted = bar.filter.value.toLowerCase();
    const doubles = new Set(runs.length ? runs[0].doubles?.filter((name) => runs.every((run) => !run.metrics.includes(name) || run.doubles?.includes(name))) : []);
    const each = [...there].filter((name) => EACH.test(name) && !FIRST.includes(name) && !doubles.has(name)).sort();
    const first = [...FIRST.slice(0, 2).filter((name) => there.has(name)), ...each, ...FIRST.slice(2).filter((name) => there.has(name))];
    const rest = [...there].filter((name) => !first.includes(name)).sort();
    const names = wanted ? [...first, ...rest].filter((name) => name.toLowerCase().includes(wanted)) : bar.all.checked ? [...first, ...rest] : first;
    const special = specialsOf(runs, there).filter(({ title }) => title.toLowerCase().includes(wanted));
    const keys = [...names.slice(0, 2), ...special.map((one) => one.key), ...names.slice(2)];
    for (const [key, panel] of panels) {
      if (!keys.includes(key)) {
        seen.unobserve(panel.element);
        panel.leave();
        panels.delete(key);
      }
    }
    for (const key of keys) {
      if (panels.has(key)) continue;
      const panel = new Panel(key, { draws: special.find((one) => one.key === key), onRange: range, onAlert: openAlert });
      panels.set(key, panel);
      seen.observe(panel.element);
    }
    const elements = keys.map((key) => panels.get(key).element);
    if (elements.some((element, at) => grid.children[at] !== element) || grid.children.length !== elements.length) fill(grid, elements);
    bar.count(names.length, there.size);
  }

  /** Draw all with these settings, of which the address keeps `words`. */
  function set(settings, words) {
    Object.assign(kept, settings);
    amend(words);
    panels.forEach(want);
  }

  function range(low, high) {
    bar.range(low, high);
    set({ low, high }, { from: low, to: high });
  }

  function smooth(value) {
    bar.smooth(value);
    set({ smooth: value }, { smooth: value > 1 ? value : null });
  }

  async function alerts() {
    const runs = chosenRuns();
    const now = runs.length ? (await ask("alerts", { run: runs })).alerts : [];
    if (told.firstChild && JSON.stringify(now) === JSON.stringify(kept.alerts)) return; // what the reader opened stays open
    kept.alerts = now;
    panels.forEach((panel) => panel.again(kept));
    fill(told, alertList(kept.alerts, { onStep: (step) => range(Math.max(0, step - 50), step + 50) }));
  }

  function openAlert(alert) {
    const element = told.querySelector(`[data-alert="${kept.alerts.indexOf(alert)}"]`);
    if (element) {
      element.open = true;
      const older = element.closest("details.older");
      if (older) older.open = true;
      element.scrollIntoView({ block: "center" });
      element.querySelector("summary").focus();
    }
  }

  function ends() {
    const last = Math.max(1, ...shared.runs.filter((run) => chosenRuns().includes(run.name)).map((run) => run.step));
    return [kept.low ?? 0, kept.high ?? last, last];
  }

  function move(by, scale) {
    const [low, high, last] = ends();
    const middle = (low + high) / 2 + by * (high - low);
    const half = Math.max(2, ((high - low) * scale) / 2);
    const [from, to] = [Math.max(0, Math.round(middle - half)), Math.round(middle + half)];
    if (from <= 0 && to >= last) range(null, null);
    else range(from, Math.min(to, last));
  }

  const live = () => {
    fill(story, stories(shared.runs.filter((run) => chosenRuns().includes(run.name))));
    alerts();
    kept.version += 1;
    const old = [...panels.values()];
    arrange(); // what is new here asks for itself when it is seen
    old.forEach(want);
  };
  bar.all.addEventListener("change", arrange);
  live();
  return {
    live,
    moved: live,
    theme: () => panels.forEach(want),
    leave() {
      seen.disconnect();
      clearTimeout(kept.timer);
      due.clear();
      panels.forEach((panel) => panel.leave());
    },
    key(key) {
      const moves = { "+": [0, 0.5], "=": [0, 0.5], "-": [0, 2], ArrowLeft: [-0.5, 1], ArrowRight: [0.5, 1] };
      if (moves[key]) move(...moves[key]);
      else if (key === "0") range(null, null);
      else if (key === "s") smooth(SMOOTH[(SMOOTH.indexOf(kept.smooth) + 1) % SMOOTH.length]);
      else return false;
      return true;
    },
  };
}

function isOnScreen(panel) {
  const { top, bottom } = panel.element.getBoundingClientRect();
  return top < innerHeight && bottom > 0;
}

const MOST_SPECIAL = 3;

/** The pictures that are no metric's curve. */
function specialsOf(runs, there) {
  const hidden = hiddenRuns();
  runs = runs.filter((run) => !hidden.has(run.name));
  const names = runs.map((run) => run.name);
  const few = names.slice(0, MOST_SPECIAL);
  return [
    ...few.flatMap((name) => [rewardSpread(name), signalShares(name)]),
    ...(there.has("seconds/step") ? few.map(phaseSeconds) : []),
    ...(there.has("seconds/step") && there.has("num_tokens") ? [tokenSpeed(names)] : []),
    ...runs.slice(0, MOST_SPECIAL).filter((run) => run.metrics.some((name) => name.startsWith("memory/"))).map((run) => memoryUse(run.name)),
  ];
}

/** The chosen runs; a click puts the curves of one away or brings them back. */
function legend(changed) {
  return h("ul", { class: "legend", "aria-label": "Runs; press one to hide or show it" }, chosenRuns().map((name) => {
    const mark = h("span", { class: "mark" }, markOf(name));
    mark.style.color = colourOf(name);
    const button = h("button", { "aria-pressed": String(!hiddenRuns().has(name)), onclick: () => {
      const hidden = hiddenRuns();
      hidden.has(name) ? hidden.delete(name) : hidden.add(name);
      amend({ hide: [...hidden] });
      button.setAttribute("aria-pressed", String(!hidden.has(name)));
      changed();
    } }, mark, name);
    return h("li", {}, button);
  }));
}

/** Whether two of the chosen runs differ in their seed alone. */
function hasSeeds() {
  const families = shared.runs.filter((run) => chosenRuns().includes(run.name) && run.family).map((run) => run.family);
  return new Set(families).size < families.length;
}

function toolbar(kept, calls) {
  const from = h("input", { type: "number", min: 0, value: kept.low ?? "", placeholder: "first", "aria-label": "From step" });
  const to = h("input", { type: "number", min: 0, value: kept.high ?? "", placeholder: "last", "aria-label": "To step" });
  for (const field of [from, to]) field.addEventListener("change", () => calls.range(numberOf(from.value), numberOf(to.value)));
  const even = h("select", { "aria-label": "Smoothing", onchange: () => calls.smooth(Number(even.value)) },
    SMOOTH.map((steps) => h("option", { value: steps, selected: steps === kept.smooth }, steps === 1 ? "not smoothed" : `mean of ${steps} steps`)));
  const floor = h("input", { type: "number", step: "any", value: kept.floor ?? "", placeholder: "lowest", "aria-label": "Lowest value" });
  const ceiling = h("input", { type: "number", step: "any", value: kept.ceiling ?? "", placeholder: "highest", "aria-label": "Highest value" });
  const heights = (low, high) => calls.set({ floor: low, ceiling: high }, { low, high });
  for (const field of [floor, ceiling]) field.addEventListener("change", () => heights(numberOf(floor.value), numberOf(ceiling.value)));
  const filter = h("input", { type: "search", placeholder: "Find a metric", "aria-label": "Find a metric", oninput: calls.filter });
  const all = h("input", { type: "checkbox" });
  const over = h("select", { "aria-label": "Axis", onchange: () => calls.set({ axis: over.value }, { x: over.value === "step" ? null : over.value }) },
    Object.entries(AXES).map(([name, text]) => h("option", { value: name, selected: name === kept.axis }, text)));
  const seeds = h("input", { type: "checkbox", checked: kept.seeds, onchange: () => calls.set({ seeds: seeds.checked }, { seeds: seeds.checked }) });
  const log = h("input", { type: "checkbox", onchange: () => calls.set({ isLog: log.checked }, {}) });
  const count = h("small");
  return {
    element: h("div", { class: "bar" }, filter, h("label", {}, all, "all metrics"), h("label", {}, "steps ", from, " to ", to),
      h("button", { onclick: () => calls.range(null, null) }, "all steps"), even, over, h("label", {}, log, "log scale"), h("label", {}, "values ", floor, " to ", ceiling), hasSeeds() ? h("label", {}, seeds, "mean over seeds") : null, count),
    filter, all,
    range: (low, high) => { from.value = low ?? ""; to.value = high ?? ""; },
    smooth: (value) => { even.value = String(value); },
    count: (shown, there) => fill(count, `${shown} of ${there} metrics`),
  };
}

function numberOf(text) {
  return text === null || text === "" || Number.isNaN(Number(text)) ? null : Number(text);
}
