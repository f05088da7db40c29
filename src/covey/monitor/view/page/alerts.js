// What the monitor saw: a sentence, its evidence, what to try.

import { h, visible } from "./dom.js";
import { link } from "./state.js";

const MOST = 200;

/** A list of alerts, newest first; `onStep(step)` shows the curves around one. */
export function alertList(alerts, { onStep }) {
  if (!alerts.length) return h("section", {}, h("h2", {}, "Alerts"), h("p", {}, "None."));
  const shown = alerts.map((alert, at) => [alert, at]).reverse().slice(0, MOST);
  return h("section", {}, h("h2", {}, `Alerts (${alerts.length}${alerts.length > MOST ? `, the last ${MOST} shown` : ""})`), shown.map(([alert, at]) =>
    h("details", { class: `alert ${alert.severity}`, "data-alert": at },
      h("summary", {}, h("span", { class: "severity" }, alert.severity), ` step ${alert.step}, ${alert.run}: `, visible(alert.said)),
      alert.try_this?.length ? [h("h3", {}, "What to try"), h("ul", {}, alert.try_this.map((text) => h("li", {}, visible(text))))] : null,
      Object.keys(alert.evidence ?? {}).length ? [h("h3", {}, "Evidence"), h("pre", {}, visible(JSON.stringify(alert.evidence, null, 1)))] : null,
      h("p", {}, h("button", { onclick: () => onStep(alert.step) }, "curves around it"), " ",
        h("a", { href: link("rollouts", { run: alert.run, to: alert.step }) }, "what was written before it")))));
}
