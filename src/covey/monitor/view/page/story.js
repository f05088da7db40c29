// A sentence on what happened in a run, for the top of its pages.

import { h, short } from "./dom.js";

/** `0:42`, `12:05`, `3:07:00`, `2 d 3 h`; a dash for none. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor((whole % 86400) / 3600), Math.floor((whole % 3600) / 60)];
  const two = (number) => String(number).padStart(2, "0");
  if (days) return `${days} d ${hours} h`;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

/** Time since a run was made, in its largest unit; a dash for none. */
export function age(created, now = Date.now()) {
  const seconds = (now - Date.parse(created ?? "")) / 1000;
  if (!Number.isFinite(seconds)) return "–";
  for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
    if (seconds >= size) return `${Math.floor(seconds / size)} ${unit}`;
  }
  return "now";
}

/** What happened in a run, in words. */
export function storyOf(run) {
  const of = run.steps ? ` of ${short(run.steps)}` : "";
  const parts = [`${run.state} at step ${short(run.step)}${of}${run.seconds ? ` after ${duration(run.seconds)}` : ""}`];
  if (run.reward_from !== null && run.reward_to !== null && run.step > 1) parts.push(`reward ${short(run.reward_from, 2)} → ${short(run.reward_to, 2)}`);
  if (run.best) parts.push(`best held-out reward ${short(run.best.value, 2)} at step ${short(run.best.step)}`);
  parts.push(run.alerts ? `${run.alerts} alert${run.alerts > 1 ? "s" : ""}` : "no alerts");
  return parts.join(" · ");
}

const MOST = 4;

/** The sentences of the chosen runs. */
export function stories(runs) {
  const more = runs.length > MOST ? h("p", { class: "soft" }, `and ${runs.length - MOST} more runs`) : null;
  return h("div", { class: "stories" }, runs.slice(0, MOST).map((run) => h("p", {}, h("b", {}, run.name), ` ${storyOf(run)}`)), more);
}
