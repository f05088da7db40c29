// Lengths, Policy and Rewards: pages that show how numbers of single completions are spread, from a sample of steps.

import { ask, isStale } from "./api.js";
import { entry, fill, h, later, short } from "./dom.js";
import { begins, csvOf, heatMap, histogram, matrix, stretch } from "./heat.js";
import { areas, line, Plot } from "./plot.js";
import { amend, chosenRuns, place, shared } from "./state.js";

const AGAIN = 30; // milliseconds until the rest of the sample is asked for
const [BLUE, ORANGE, GREY] = ["#2f7fc1", "#d9730d", "#9aa3ad"];

/** A page around `draw(told)`, which gives pictures: `{element, paint, leave}` or plain elements. */
function samplePage(main, { title, call, sentence, extra = () => [], draw }) {
  const kept = { pictures: [], told: null, count: -1, timer: 0, isGone: false };
  const notes = h("p", { class: "soft", role: "status" });
  const pictures = h("div", { class: "plots big" });
  const more = h("div", { class: "bar" });
  const set = (name, value) => { amend({ [name]: value }); load(); };
  const field = (name, label) => {
    const input = h("input", { type: "number", min: 0, value: place().words.get(name) ?? "", "aria-label": `${label} step` });
    input.addEventListener("input", later(() => set(name, input.value), 150));
    return h("label", {}, `${label} `, input);
  };
  const run = () => place().words.get("run") ?? chosenRuns()[0];
  const bar = h("div", { class: "bar" }, h("select", { "aria-label": "Run", onchange: (event) => set("run", event.target.value) },
    shared.runs.map((one) => h("option", { value: one.name, selected: one.name === run() }, one.name))),
  h("span", { class: "pair" }, field("from", "step"), field("to", "to")), more);
  fill(main, h("h1", {}, title), h("p", { class: "soft" }, sentence), bar, notes, pictures);

  async function load() {
    clearTimeout(kept.timer);
    if (!run()) return fill(notes, "No run here yet.");
    const words = place().words;
    try {
      const told = await ask(call, { run: run(), from: words.get("from"), to: words.get("to"), score: words.get("score") }, call);
      if (kept.isGone) return;
      show(told);
      if (told.left) kept.timer = setTimeout(load, AGAIN);
    } catch (error) {
      if (!isStale(error) && !kept.isGone) fill(notes, h("span", { class: "bad" }, error.message));
    }
  }

  function show(told) {
    kept.told = told;
    kept.count = told.of;
    const all = told.of === 1 ? "the only recorded step" : told.read === told.of ? `all ${short(told.of)} recorded steps` : `${short(told.read)} of ${short(told.of)} recorded steps, evenly spread; choose a stretch to see it closer`;
    fill(notes, told.of ? `From ${all}.` : "No completions are recorded (rollout_log_steps).", told.left ? ` ${told.left} more are being read.` : "");
    leave();
    kept.pictures = told.read ? draw(told).filter(Boolean) : [];
    fill(more, told.read ? extra(told, set) : []);
    fill(pictures, kept.pictures.map((one) => one.element ?? one));
    for (const one of kept.pictures) one.paint?.();
    if (!told.left) document.documentElement.dataset.spread = String(performance.now());
  }

  function leave() {
    for (const one of kept.pictures) one.leave?.();
  }

  load();
  return {
    leave() { kept.isGone = true; clearTimeout(kept.timer); leave(); },
    theme: () => kept.told && show(kept.told),
    live: load,
    moved: () => load(),
  };
}

/** A plot of lines by step in a figure of its own. */
function plotOf(title, note, series, options = {}) {
  const picture = h("div", { class: "picture", role: "img", "aria-label": title });
  const plot = new Plot(picture, {});
  return {
    element: h("figure", {}, h("figcaption", {}, h("b", {}, title), h("small", {}, note)), picture),
    paint: () => plot.draw(series, options),
    leave: () => plot.leave(),
  };
}

export function lengthsPage(main) {
  return samplePage(main, {
    title: "Lengths", call: "lengths", sentence: "Tokens of completions, and whether the update favours longer or shorter ones.",
    draw(told) {
      const rows = told.edges.slice(0, -1).map((_, at) => stretch(told.edges, at, true));
      const steps = told.steps;
      const has = (list) => list.some((value) => value !== null);
      return [
        heatMap("length by step", "tokens; each step by its own fullest row", { steps, rows, cells: told.counts, unit: "completions" }),
        told.above.some(Boolean) || told.below.some(Boolean) ? histogram("lengths by advantage", "blue: made likelier; orange: made less likely", { rows, what: "tokens",
          lists: [{ name: "advantage above 0:", counts: told.above }, { name: "below 0:", counts: told.below }] }) : null,
        plotOf("mean length", [entry("all", GREY), entry("advantage above 0", BLUE), entry("below 0", ORANGE)], [["all", told.mean, GREY], ["advantage above 0", told.mean_above, BLUE], ["advantage below 0", told.mean_below, ORANGE]]
          .filter(([, values]) => has(values)).map(([name, values, colour]) => line({ steps, values }, { name, colour }))),
        plotOf("cut off at the limit", "share of completions", areas(steps, [{ name: "cut off", values: told.cut, colour: ORANGE }]), { top: 1 }),
      ];
    },
  });
}

export function policyPage(main) {
  return samplePage(main, {
    title: "Policy", call: "policy", sentence: "Where in a completion the policy is unsure, and where learner and sampler disagree. By token position, later ones in wider rows. Of each step at most the first 200,000 tokens are counted.",
    draw(told) {
      const { entropy, ratio } = told.by_position;
      const rows = told.positions.slice(0, -1).map((_, at) => stretch(told.positions, at, true));
      const bars = (name, title, note, what) => {
        const found = told.histograms[name];
        return found ? histogram(title, note, { rows: found.counts.map((_, at) => stretch(found.edges, at, false)), marks: begins(found.edges), lists: [{ name: "", counts: found.counts }], what }) : null;
      };
      const missing = (name, why) => h("p", { class: "soft" }, `${name} is not in the recorded completions: ${why}`);
      return [
        entropy ? heatMap("entropy by position", "nats, mean over tokens; strong blue: unsure", { steps: told.steps, rows, cells: entropy, unit: "nats", isAbsolute: true })
          : missing("Entropy by token", "the learner writes it for the steps that it computed."),
        ratio ? heatMap("learner against sampler by position", "mean absolute log-ratio, nats", { steps: told.steps, rows, cells: ratio, unit: "nats", isAbsolute: true })
          : missing("The ratio", "it needs log-probabilities of both the sampler and the learner (old_logp)."),
        bars("entropy", "entropy of tokens", "all sampled tokens", "nats"),
        bars("ratio", "log-ratio of learner to sampler", "0: both agree", "nats"),
      ];
    },
  });
}

export function rewardsPage(main) {
  return samplePage(main, {
    title: "Rewards", call: "correlations", sentence: "Which rewards go together, which pull against each other, and whether one of them pays for length.",
    extra: (told, set) => [
      h("label", {}, "spread of ", h("select", { "aria-label": "Reward", onchange: (event) => set("score", event.target.value) },
        told.names.slice(0, -1).map((name) => h("option", { value: name, selected: name === told.score }, name)))),
      h("a", { class: "button", download: "correlations.csv", href: `data:text/csv;charset=utf-8,${encodeURIComponent(csvOf([["", ...told.names], ...told.table.map((row, at) => [told.names[at], ...row])]))}` }, "correlations as CSV"),
    ],
    draw(told) {
      const rows = told.edges.slice(0, -1).map((_, at) => stretch(told.edges, at, false));
      return [
        h("figure", {}, h("figcaption", {}, h("b", {}, "correlations"), h("small", {}, `Pearson, over ${short(told.completions)} completions; – does not vary`)), matrix(told.names, told.table)),
        told.score ? heatMap(`${told.score} by step`, "each step by its own fullest row", { steps: told.steps, rows, marks: begins(told.edges), cells: told.counts, unit: "completions" }) : null,
      ];
    },
  });
}
