// A completion token by token: coloured by a quantity, its numbers on demand, drawn when it comes into sight.

import { h, short, style, visible } from "./dom.js";

const FIRST = ["advantage", "logprobs", "entropy", "kl", "learner - sampler"];
const SIGNED = new Set(["advantage", "advantages", "learner - sampler", "values"]);
const CHUNK = 2000;

/** Names of what tokens can be coloured by. */
export function quantitiesOf(group) {
  const found = new Set(group.completions.flatMap((one) => Object.keys(one.per_token)));
  if (group.completions.some((one) => one.advantage !== null && one.advantage !== undefined)) found.add("advantage");
  return [...FIRST.filter((name) => found.has(name)), ...[...found].filter((name) => !FIRST.includes(name)).sort()];
}

/** How a quantity becomes a colour in this group: blue above and orange below zero, or from pale to strong. Null for none. */
export function scaleOf(group, name) {
  if (name === "none") return null;
  const all = group.completions.flatMap((one) => valuesOf(one, name) ?? []).map(Number).filter(Number.isFinite).sort((a, b) => a - b);
  if (!all.length) return null;
  const isSigned = SIGNED.has(name) || (all[0] < 0 && all.at(-1) > 0);
  const [low, high] = [all[Math.floor(0.02 * (all.length - 1))], all[Math.ceil(0.98 * (all.length - 1))]];
  const size = isSigned ? Math.max(Math.abs(low), Math.abs(high)) || 1 : high;
  const isDark = style("--is-dark") === "1";
  const reach = isDark ? 0.6 : 0.55; // the text stays readable on it (4.5 to 1)
  const paint = (rgb, part) => `rgba(${rgb}, ${(reach * Math.min(1, Math.max(0, part))).toFixed(3)})`;
  const blue = isDark ? "70,140,220" : "33,102,172";
  const orange = isDark ? "225,120,30" : "224,116,20";
  const isRare = name === "logprobs" || name.endsWith("logp");
  return {
    name, isSigned, size, low: isSigned ? -size : low,
    colour(value) {
      if (!Number.isFinite(value)) return "transparent";
      if (isSigned) return value >= 0 ? paint(blue, value / size) : paint(orange, -value / size);
      const part = high > low ? (value - low) / (high - low) : 0;
      return paint(isRare ? orange : blue, isRare ? 1 - part : part);
    },
  };
}

function valuesOf(one, name) {
  const list = one.per_token[name];
  if (list) return list;
  if (name !== "advantage") return null;
  return one.per_token.advantages ?? (one.advantage === null ? null : Array(one.token_ids.length).fill(one.advantage));
}

const waiting = new WeakMap();
const seen = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (!entry.isIntersecting) continue;
    waiting.get(entry.target)?.();
    waiting.delete(entry.target);
    seen.unobserve(entry.target);
  }
}, { rootMargin: "400px" });

/** The text of a completion; numbers of the token that is pointed at go to `under`. */
export function tokens(one, scale, under) {
  const text = h("pre", { class: "text", dir: "auto" });
  if (!one.pieces) {
    text.append(visible(one.completion));
    if (scale && scale.name === "advantage") text.style.backgroundColor = scale.colour(one.advantage);
    return text;
  }
  text.append(visible(one.completion));
  waiting.set(text, () => {
    text.replaceChildren();
    append(text, one, scale, 0);
  });
  seen.observe(text);
  const tell = (event) => {
    const at = event.target.dataset?.at;
    if (at !== undefined) under.textContent = factsOf(one, Number(at));
  };
  text.addEventListener("pointerover", tell);
  text.addEventListener("click", tell);
  text.tabIndex = 0;
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", "Tokens; left and right tell the numbers of each");
  text.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const spans = text.querySelectorAll("span[data-at]");
    if (!by || !spans.length) return;
    const now = text.querySelector(".told");
    const next = spans[Math.min(spans.length - 1, Math.max(0, (now ? Number(now.dataset.at) : -1) + by))];
    now?.classList.remove("told");
    next.classList.add("told");
    under.textContent = factsOf(one, Number(next.dataset.at));
    event.preventDefault();
  });
  return text;
}

function append(text, one, scale, start) {
  const values = scale ? valuesOf(one, scale.name) : null;
  const end = Math.min(start + CHUNK, one.pieces.length);
  const spans = [];
  for (let at = start; at < end; at += 1) {
    const span = document.createElement("span");
    span.textContent = visible(one.pieces[at]);
    span.dataset.at = at;
    if (values && values[at] !== null && values[at] !== undefined) span.style.backgroundColor = scale.colour(Number(values[at]));
    if (one.per_token.mask && !one.per_token.mask[at]) span.className = "masked";
    spans.push(span);
  }
  text.append(...spans);
  if (end < one.pieces.length) {
    const rest = h("button", { onclick: () => { rest.remove(); append(text, one, scale, end); } }, `${one.pieces.length - end} more tokens`);
    text.append(rest);
  }
}

function factsOf(one, at) {
  const numbers = Object.entries(one.per_token).filter(([, list]) => list[at] !== undefined && list[at] !== null)
    .map(([name, list]) => `${name} ${typeof list[at] === "boolean" ? (list[at] ? "yes" : "no") : short(list[at], 4)}`);
  return `token ${at + 1} of ${one.token_ids.length}: ${JSON.stringify(one.pieces[at])} (id ${one.token_ids[at]})${numbers.length ? ` · ${numbers.join(" · ")}` : ""}`;
}
