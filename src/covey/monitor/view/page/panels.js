// The pictures of the page of curves: one metric of all chosen runs, or how rewards lie among the groups of one.

import { ask } from "./api.js";
import { entry, fill, h, short } from "./dom.js";
import { areas, band, line, Plot } from "./plot.js";
import { chosenRuns, colourOf, hiddenRuns, markOf } from "./state.js";

const MOST_ALERTS = 60;

/** A title, a picture and what is to be known about it. `draws` replaces the metric's curves by something else. */
export class Panel {
  constructor(metric, { draws, onRange, onAlert }) {
    this.metric = metric;
    this.draws = draws;
    this.calls = { onRange, onAlert };
    this.isSeen = false;
    this.isOld = true;
    this.plot = null;
    this.drawn = null;
    this.picture = h("div", { class: "picture", role: "img", "aria-label": draws?.title ?? metric });
    this.note = h("small");
    const save = h("button", { class: "plain", title: "Save as PNG", "aria-label": `Save ${metric} as PNG`, onclick: () => this.save() }, "↓");
    this.values = h("a", { class: "plain", title: "Save all values as CSV", "aria-label": `Save ${metric} as CSV`, download: `${fileOf(metric)}.csv` }, "csv");
    this.element = h("figure", { "data-metric": metric }, h("figcaption", {}, h("b", {}, draws?.title ?? metric), this.note, draws ? null : this.values, save), this.picture);
  }

  /** Draw the curves of this metric among `raw` and, smoothed, `even`. */
  show(raw, even, kept, leftOut = 0) {
    const hidden = hiddenRuns();
    const mine = (curves) => curves.filter((curve) => curve.metric === this.metric && curve.steps.length && !(curve.runs ?? [curve.run]).every((run) => hidden.has(run)));
    const look = (curve) => ({ name: curve.run, colour: colourOf((curve.runs ?? [curve.run])[0]), mark: markOf((curve.runs ?? [curve.run])[0]) });
    this.values.href = `api/values?${new URLSearchParams([["metric", this.metric], ...chosenRuns().filter((run) => !hidden.has(run)).map((run) => ["run", run])])}`;
    const isSmooth = even.length > 0;
    const series = [
      ...mine(isSmooth ? even : raw).filter((curve) => curve.low).flatMap((curve) => band(curve.x, curve.low, curve.high, { colour: look(curve).colour, opacity: 0.18 })),
      ...mine(raw).map((curve) => line(curve, { ...look(curve), isFaint: isSmooth })),
      ...mine(even).map((curve) => line(curve, look(curve))),
    ];
    const shown = mine(raw).flatMap((curve) => curve.runs ?? [curve.run]);
    this.drawn = { series, isLog: kept.isLog, axis: kept.axis, heights: [kept.floor, kept.ceiling], runs: shown };
    this.again(kept);
    fill(this.note, notes(mine(raw), kept.alerts.length - MOST_ALERTS), leftOut ? h("span", { class: "bad" }, ` ${short(leftOut)} more runs are not drawn; choose fewer`) : null);
    this.note.title = this.note.textContent.trim(); // where there is no room for all of it
  }

  /** Draw what `draws` finds. */
  async load(kept) {
    const { note, ...drawn } = await this.draws.load(kept);
    this.drawn = drawn;
    this.again(kept);
    fill(this.note, note);
  }

  /** Draw the same once more, with the alerts there are now. */
  again(kept) {
    if (!this.drawn) return;
    this.plot ??= new Plot(this.picture, this.calls);
    const runs = this.drawn.runs ?? this.draws?.runs ?? [];
    const alerts = kept.alerts.filter((alert) => runs.includes(alert.run)).slice(-MOST_ALERTS);
    const range = (this.drawn.axis ?? "step") === "step" ? kept.range() : [null, null];
    this.plot.draw(this.drawn.series, { ...this.drawn, range, alerts });
  }

  save() {
    if (this.plot) h("a", { href: this.plot.picture(this.draws?.title ?? this.metric), download: `${fileOf(this.metric)}.png` }).click();
  }

  leave() {
    this.plot?.leave();
  }
}

const fileOf = (name) => name.replace(/[^\w.-]+/g, "_");

function notes(curves, hiddenAlerts) {
  const hidden = curves.reduce((sum, curve) => sum + curve.hidden, 0);
  const bad = curves.reduce((sum, curve) => sum + curve.not_finite, 0);
  const last = curves.length === 1 ? curves[0].values.filter((value) => value !== null).at(-1) : null;
  return [
    last === null || last === undefined ? null : h("span", {}, short(last, 4)),
    curves.some((curve) => curve.low && !curve.runs) ? h("span", {}, " band: 95% interval") : null,
    curves.some((curve) => curve.runs) ? h("span", {}, " band of seeds: lowest to highest") : null,
    hidden ? h("span", {}, ` lowest and highest of each stretch; ${short(hidden)} points not drawn`) : null,
    bad ? h("span", { class: "bad" }, ` ${short(bad)} not finite`) : null,
    hiddenAlerts > 0 ? h("span", {}, ` ${hiddenAlerts} older alerts not drawn`) : null,
  ];
}

const answers = new Map();

/** An answer of the server that stays the same while `key` does, asked for once. */
function kept(name, key, call, query) {
  const known = answers.get(name);
  if (known?.key === key) return known.answer;
  const answer = ask(call, query);
  answers.set(name, { key, answer });
  answer.catch(() => answers.delete(name));
  return answer;
}

const spreadOf = (run, { version }) => kept(`spread ${run}`, version, "spread", { run });
const phasesOf = (run, { version, low, high }) => kept(`phases ${run}`, `${version} ${low} ${high}`, "phases", { run, from: low, to: high });

/** Median and quantile bands of the groups' mean rewards of one run. */
export function rewardSpread(run) {
  return {
    key: `spread of ${run}`, runs: [run], title: `rewards of groups (${run})`,
    async load(now) {
      const { steps, quantiles } = await spreadOf(run, now);
      const at = (place) => quantiles.map((row) => row[place]);
      const colour = colourOf(run);
      return {
        note: steps.length ? "median, middle half, 10 to 90%" : "no rollouts yet",
        series: [
          ...band(steps, at(1), at(5), { colour, opacity: 0.15 }),
          ...band(steps, at(2), at(4), { colour, opacity: 0.25 }),
          line({ steps, values: at(3) }, { name: "median", colour }),
        ],
      };
    },
  };
}

/** Shares of groups that carry signal, are all at the top, or are all alike below it. */
export function signalShares(run) {
  return {
    key: `signal of ${run}`, runs: [run], title: `rewards within groups (${run})`,
    async load(now) {
      const { steps, signal, all_best: best, all_same: same } = await spreadOf(run, now);
      const parts = [{ name: "differ", values: signal, colour: "#2f7fc1" }, { name: "all best", values: best, colour: "#3a9d5d" }, { name: "all alike", values: same, colour: "#9aa3ad" }];
      return {
        note: steps.length ? parts.map((part) => entry(part.name, part.colour)) : "no rollouts yet", top: 1, series: areas(steps, parts),
      };
    },
  };
}

const PHASES = { rollout: "#2f7fc1", reward: "#3a9d5d", learn: "#d9730d", other: "#9aa3ad" };
const MORE = ["#a34fb5", "#7a6a00", "#008b94", "#8c5a3c"];
/** Seconds of a step by phase, on each other. */
export function phaseSeconds(run) {
  return {
    key: `phases of ${run}`, runs: [run], title: `seconds by phase (${run})`,
    async load(now) {
      const { steps, seconds } = await phasesOf(run, now);
      const parts = Object.entries(seconds).map(([name, values], at) => ({ name, values, colour: PHASES[name] ?? MORE[at % MORE.length] }));
      return { note: steps.length ? parts.map((part) => entry(part.name, part.colour)) : "not recorded", series: areas(steps, parts) };
    },
  };
}

/** Tokens a second of the chosen runs. */
export function tokenSpeed(runs) {
  return {
    key: `speed of ${runs.join(" ")}`, runs, title: "tokens per second",
    async load(now) {
      const told = await Promise.all(runs.map((run) => phasesOf(run, now)));
      return { note: null, series: told.map(({ steps, speed }, at) => line({ steps, values: speed, run: runs[at] }, { name: runs[at], colour: colourOf(runs[at]), mark: markOf(runs[at]) })) };
    },
  };
}

/** The most memory of the steps, in GB of 10^9 bytes, by what was measured. */
export function memoryUse(run) {
  return {
    key: `memory of ${run}`, runs: [run], title: `memory in GB (${run})`,
    async load(now) {
      const { steps, memory } = await phasesOf(run, now);
      const colours = [...Object.values(PHASES), ...MORE];
      const parts = Object.entries(memory).map(([name, values], at) => [name.replace(/_gb$/, "").replaceAll("_", " "), values, colours[at % colours.length]]);
      return { note: parts.map(([name, , colour]) => entry(name, colour)),
        series: parts.map(([name, values, colour]) => line({ steps, values }, { name, colour })) };
    },
  };
}
