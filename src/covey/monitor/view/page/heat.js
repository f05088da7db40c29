// Heat maps and histograms: rows of cells on a canvas, numbers on pointing, values as CSV.

import { axisTexts, fill, h, short, style } from "./dom.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [64, 10, 8, 34];
const BLUE = [47, 127, 193];
const RED = [217, 115, 13];

/** A figure with a title, a note and a canvas of `height` pixels. `draw(ctx, box)` paints it, `tell(x, y, box)` says what is under the pointer. */
function figure(title, note, { height = 260, draw, tell, csv, label }) {
  const canvas = h("canvas", { role: "img", "aria-label": label ?? title, tabindex: 0 });
  const tip = h("div", { class: "tip", hidden: true });
  const place = h("div", { class: "heat" }, canvas, tip);
  place.style.height = `${height}px`;
  const save = h("a", { class: "plain", title: "Save the values as CSV", "aria-label": `Save ${title} as CSV`, download: `${title.replace(/[^\w.-]+/g, "_")}.csv`,
    href: `data:text/csv;charset=utf-8,${encodeURIComponent(csv())}` }, "csv");
  const element = h("figure", {}, h("figcaption", {}, h("b", {}, title), h("small", { title: note }, note), save), place);
  const box = () => ({ left: LEFT, top: TOP, width: Math.max(20, place.clientWidth - LEFT - RIGHT), height: height - TOP - BOTTOM });
  const paint = () => {
    canvas.width = Math.max(1, place.clientWidth * devicePixelRatio);
    canvas.height = height * devicePixelRatio;
    const ctx = canvas.getContext("2d");
    ctx.scale(devicePixelRatio, devicePixelRatio);
    ctx.font = "12px system-ui, sans-serif";
    draw(ctx, box());
  };
  const point = (event) => {
    const at = canvas.getBoundingClientRect();
    const said = tell(event.clientX - at.left, event.clientY - at.top, box());
    tip.hidden = !said;
    if (!said) return;
    fill(tip, said);
    tip.style.left = `${Math.min(event.clientX - at.left + 12, Math.max(0, place.clientWidth - 180))}px`;
  };
  canvas.addEventListener("pointermove", point);
  canvas.addEventListener("pointerdown", point); // a tap moves nothing, and leaves at once
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") tip.hidden = true; });
  const resizer = new ResizeObserver(paint);
  resizer.observe(place);
  return { element, paint, leave: () => resizer.disconnect() };
}

const shade = ([r, g, b], part) => `rgba(${r},${g},${b},${Math.max(0, Math.min(1, part))})`;
export const csvOf = (rows) => rows.map((row) => row.map((cell) => (cell === null || cell === undefined ? "" : `"${String(cell).replaceAll('"', '""')}"`)).join(",")).join("\n");

function label(ctx, text, x, y, align = "center") {
  ctx.fillStyle = style("--ink-soft");
  ctx.textAlign = align;
  ctx.fillText(text, x, y);
}

/** Numbers along the bottom, as many as there is room for. */
function bottom(ctx, box, texts, what) {
  const width = Math.max(30, ...texts.map((text) => ctx.measureText(text).width + 14));
  const every = Math.max(1, Math.ceil((texts.length * width) / box.width));
  texts.forEach((text, at) => at % every === 0 && label(ctx, text, box.left + ((at + 0.5) * box.width) / texts.length, box.top + box.height + 15));
  label(ctx, what, box.left + box.width, box.top + box.height + 30, "right");
}

function side(ctx, box, texts) {
  const every = Math.max(1, Math.ceil((texts.length * 17) / box.height));
  texts.forEach((text, at) => at % every === 0 && label(ctx, text, box.left - 6, box.top + box.height - ((at + 0.5) * box.height) / texts.length + 4, "right"));
}

/** The stretch of a bin: a whole number by itself, else both ends. */
export const stretch = (edges, at, isWhole) => {
  const [low, high] = [edges[at], edges[at + 1]];
  if (low === null) return `below ${short(high)}`;
  if (high === null) return `${short(low)} and above`;
  if (isWhole) return high - low <= 1 ? short(low) : `${short(low)} to ${short(high - 1)}`;
  return `${short(low)} to ${short(high)}`;
};

/** What stands beside bins that are too narrow for both their ends: where each begins; of an open first one, where it ends. */
export function begins(edges) {
  const texts = axisTexts(edges.slice(0, -1));
  return texts.map((text, at) => (edges[at] === null ? `< ${texts[at + 1] ?? short(edges[at + 1])}` : text));
}

/** Columns are steps, rows are bins from low to high, `cells[step][bin]`; each column is coloured by its own sum, or all by the largest (`isAbsolute`). */
export function heatMap(title, note, { steps, rows, marks = rows, cells, unit, isAbsolute = false }) {
  const known = cells.flatMap((row) => row ?? []).filter((value) => value !== null);
  const [low, top] = [Math.min(...known, Infinity), Math.max(...known, 0)];
  const range = top - low || 1;
  const part = (row, value) => (isAbsolute ? 0.06 + 0.94 * ((value - low) / range) : value / Math.max(1, ...row));
  const at = (x, y, box) => [Math.floor(((x - box.left) / box.width) * steps.length), Math.floor(((box.top + box.height - y) / box.height) * rows.length)];
  return figure(title, note, {
    label: `${title}: by step, ${rows.length} rows; the values are in the CSV`,
    csv: () => csvOf([["step", ...rows], ...steps.map((step, place) => [step, ...(cells[place] ?? rows.map(() => null))])]),
    draw(ctx, box) {
      ctx.clearRect(0, 0, box.left + box.width + RIGHT, box.top + box.height + BOTTOM);
      const [w, k] = [box.width / steps.length, box.height / rows.length];
      ctx.fillStyle = style("--paper-high");
      ctx.fillRect(box.left, box.top, box.width, box.height);
      cells.forEach((row, place) => (row ?? []).forEach((value, bin) => {
        if (value === null || (!isAbsolute && value === 0)) return;
        ctx.fillStyle = shade(BLUE, part(row, value));
        ctx.fillRect(box.left + place * w, box.top + box.height - (bin + 1) * k, Math.max(1, w - 0.5), Math.max(1, k - 0.5));
      }));
      side(ctx, box, marks);
      bottom(ctx, box, steps.map((step) => short(step)), "step");
    },
    tell(x, y, box) {
      const [place, bin] = at(x, y, box);
      const value = cells[place]?.[bin];
      return value === undefined || value === null ? null : `step ${short(steps[place])}, ${rows[bin]}: ${short(value)} ${unit}`;
    },
  });
}

/** Bars by bin; a second list is drawn beside the first in another colour. */
export function histogram(title, note, { rows, marks = rows, lists, what }) {
  const totals = lists.map(({ counts }) => counts.reduce((sum, one) => sum + one, 0) || 1);
  const shares = lists.map(({ counts }, at) => counts.map((count) => count / totals[at]));
  const top = Math.max(...shares.flat(), 1e-9);
  return figure(title, note, {
    label: `${title}: a histogram of ${rows.length} bars; the values are in the CSV`,
    csv: () => csvOf([["bin", ...lists.map(({ name }) => name)], ...rows.map((row, at) => [row, ...lists.map(({ counts }) => counts[at])])]),
    draw(ctx, box) {
      ctx.clearRect(0, 0, box.left + box.width + RIGHT, box.top + box.height + BOTTOM);
      const w = box.width / rows.length;
      for (const level of [0, 0.5, 1]) {
        const y = box.top + box.height * (1 - level);
        ctx.fillStyle = style("--rule");
        ctx.fillRect(box.left, y, box.width, 1);
        label(ctx, `${(100 * top * level).toFixed(top < 0.1 ? 1 : 0)}%`, box.left - 6, y + 4, "right");
      }
      shares.forEach((list, which) => list.forEach((share, bin) => {
        ctx.fillStyle = shade([BLUE, RED][which], 0.85);
        const tall = (share / top) * box.height;
        ctx.fillRect(box.left + bin * w + (which * w) / lists.length, box.top + box.height - tall, Math.max(1, w / lists.length - 1), tall);
      }));
      bottom(ctx, box, marks, what);
    },
    tell(x, y, box) {
      const bin = Math.floor(((x - box.left) / box.width) * rows.length);
      if (!rows[bin]) return null;
      return `${rows[bin]}: ${lists.map(({ name, counts }, at) => `${name ? `${name} ` : ""}${short(counts[bin])} (${(100 * shares[at][bin]).toFixed(1)}%)`).join(", ")}`;
    },
  });
}

/** Correlations as a table whose cells are coloured: blue together, orange against each other. */
export function matrix(names, table) {
  const cell = (value, row, column) => {
    const element = h("td", { class: "number", title: `${names[row]} and ${names[column]}` }, value === null ? "–" : value.toFixed(2));
    if (value !== null) element.style.backgroundColor = shade(value < 0 ? RED : BLUE, 0.6 * Math.abs(value));
    return element;
  };
  return h("div", { class: "wide", tabindex: 0, role: "region", "aria-label": "Correlations" }, h("table", { class: "matrix" },
    h("thead", {}, h("tr", {}, h("th"), names.map((name) => h("th", { scope: "col" }, name)))),
    h("tbody", {}, table.map((row, at) => h("tr", {}, h("th", { scope: "row" }, names[at]), row.map((value, other) => cell(value, at, other)))))));
}
