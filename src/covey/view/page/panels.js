// The pictures of the page of curves: one metric of all chosen runs, or how rewards lie among the groups of one.

import { ask } from "./api.js";
import { fill, h, short } from "./dom.js";
import { area, band, line, Plot } from "./plot.js";
import { colourOf } from "./state.js";

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
    this.picture = h("div", { class: "picture", role: "img", "aria-label": draws?.title ?? metric });
    this.note = h("small");
    const save = h("button", { class: "plain", title: "Save as PNG", "aria-label": `Save ${metric} as PNG`, onclick: () => this.save() }, "↓");
    this.element = h("figure", { "data-metric": metric }, h("figcaption", {}, h("b", {}, draws?.title ?? metric), this.note, save), this.picture);
  }

  async show(raw, even, kept) {
    this.plot ??= new Plot(this.picture, this.calls);
    if (this.draws) {
      const { series, note, top } = await this.draws.load();
      this.plot.draw(series, { range: [kept.low, kept.high], top });
      fill(this.note, note);
      return;
    }
    const mine = (curves) => curves.filter((curve) => curve.metric === this.metric && curve.steps.length);
    const isSmooth = even.length > 0;
    const series = [
      ...mine(raw).map((curve) => line(curve, { name: curve.run, colour: colourOf(curve.run), isFaint: isSmooth })),
      ...mine(even).map((curve) => line(curve, { name: curve.run, colour: colourOf(curve.run) })),
    ];
    const alerts = kept.alerts.slice(-MOST_ALERTS);
    this.plot.draw(series, { range: [kept.low, kept.high], alerts, isLog: kept.isLog });
    fill(this.note, notes(mine(raw), kept.alerts.length - alerts.length));
  }

  save() {
    if (this.plot) h("a", { href: this.plot.picture(), download: `${this.metric.replace(/[^\w.-]+/g, "_")}.png` }).click();
  }

  leave() {
    this.plot?.leave();
  }
}

function notes(curves, hiddenAlerts) {
  const hidden = curves.reduce((sum, curve) => sum + curve.hidden, 0);
  const bad = curves.reduce((sum, curve) => sum + curve.not_finite, 0);
  const last = curves.length === 1 ? curves[0].values.filter((value) => value !== null).at(-1) : null;
  return [
    last === null || last === undefined ? null : h("span", {}, short(last, 4)),
    hidden ? h("span", {}, ` lowest and highest of each stretch; ${short(hidden)} points not drawn`) : null,
    bad ? h("span", { class: "bad" }, ` ${short(bad)} not finite`) : null,
    hiddenAlerts > 0 ? h("span", {}, ` ${hiddenAlerts} older alerts not drawn`) : null,
  ];
}

/** Median and quantile bands of the groups' mean rewards of one run. */
export function rewardSpread(run) {
  return {
    key: `spread of ${run}`, title: `rewards of groups: median, half, four fifths (${run})`,
    async load() {
      const { steps, quantiles } = await ask("spread", { run });
      const at = (place) => quantiles.map((row) => row[place]);
      const colour = colourOf(run);
      return {
        note: steps.length ? null : "no rollouts yet",
        series: [
          ...band(steps, at(1), at(5), { name: "10-90", colour, opacity: 0.15 }),
          ...band(steps, at(2), at(4), { name: "25-75", colour, opacity: 0.25 }),
          line({ steps, values: at(3) }, { name: "median", colour }),
        ],
      };
    },
  };
}

/** Shares of groups that carry signal, are all at the top, or are all alike below it. */
export function signalShares(run) {
  return {
    key: `signal of ${run}`, title: `groups with signal, all best, all alike (${run})`,
    async load() {
      const { steps, signal, all_best: best, all_same: same } = await ask("spread", { run });
      return {
        note: steps.length ? null : "no rollouts yet", top: 1,
        series: [area(steps, signal, { name: "rewards differ", colour: "#2f7fc1" }), area(steps, best, { name: "all at the top", colour: "#3a9d5d" }),
          area(steps, same, { name: "all alike", colour: "#9aa3ad" })],
      };
    },
  };
}
