// What the monitor saw: a sentence, its evidence, what to try.

import { h, visible } from "./dom.js";
import { link } from "./state.js";

const MOST = 200;
const OPEN = 3; // the newest; the others are one click away

/** A list of alerts, newest first; `onStep(step)` shows the curves around one. */
export function alertList(alerts, { onStep }) {
  if (!alerts.length) return h("section", { class: "alerts" }, h("p", { class: "soft" }, "No alerts."));
  const shown = alerts.map((alert, at) => [alert, at]).reverse().slice(0, MOST).map(([alert, at]) => one(alert, at, onStep));
  const older = shown.slice(OPEN);
  return h("section", { class: "alerts" }, h("h2", {}, `Alerts (${alerts.length}${alerts.length > MOST ? `, the last ${MOST} shown` : ""})`), shown.slice(0, OPEN),
    older.length ? h("details", { class: "older" }, h("summary", {}, `${older.length} older alert${older.length > 1 ? "s" : ""}`), older) : null);
}

function one(alert, at, onStep) {
  return h("details", { class: `alert ${alert.severity}`, "data-alert": at },
    h("summary", {}, h("span", { class: "severity" }, alert.severity), ` step ${alert.step}, ${alert.run}: `, visible(alert.said)),
    alert.try_this?.length ? [h("h3", {}, "What to try"), h("ul", {}, alert.try_this.map((text) => h("li", {}, visible(text))))] : null,
    Object.keys(alert.evidence ?? {}).length ? [h("h3", {}, "Evidence"), h("pre", {}, visible(JSON.stringify(alert.evidence, null, 1)))] : null,
    h("p", {}, h("button", { onclick: () => onStep(alert.step) }, "curves around it"), " ",
      h("a", { href: link("rollouts", { run: alert.run, to: alert.step }) }, "what was written before it")));
}
