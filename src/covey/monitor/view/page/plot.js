// One picture: lines, bands or stacked areas over steps, with alerts as marks. Tooltips are text nodes.

import { axisTexts, dot, fill, h, short, style } from "./dom.js";
import { pictureOf } from "./picture.js";

const SEVERITY = { error: "#c23b4b", warning: "#d9730d", info: "#7f8a96" };
const HEIGHT = 210;
const NEAR = 6; // pixels
const CROWD = 12; // alerts, from which on their lines are faint and the curve stays in front
const APART = 70; // pixels between the marks of a run on its curve
const LOOK = 400; // points to either side in which the nearest value of a run is looked for

/** A plot in `element`. `onRange(low, high)` when the reader drags over a stretch, `onAlert(alert)` when one is clicked. */
export class Plot {
  constructor(element, { onRange, onAlert } = {}) {
    Object.assign(this, { element, onRange, onAlert, chart: null, look: "", lines: [], alerts: [] });
    this.tip = h("div", { class: "tip", hidden: true });
    this.resizer = new ResizeObserver(() => this.fit());
    this.resizer.observe(element);
  }

  /** Draw `lines` (of `line`, `band`, `areas`) between the steps of `range`, with `alerts`; `top`: the axis goes from 0 to there; `heights`: from and to, null where the values say. */
  draw(lines, { range = [null, null], alerts = [], isLog = false, top = null, heights = [null, null], axis = "step" } = {}) {
    this.axis = axis;
    this.lines = lines;
    this.alerts = alerts;
    const data = together(lines, isLog);
    const [low, high] = ends(data[0], range);
    const look = JSON.stringify([style("--paper"), isLog, top, heights, axis, lines.map((one) => [one.name, one.stroke, one.width, one.fill, one.band])]);
    if (look === this.look) {
      this.chart.batch(() => {
        this.chart.setData(data, false);
        this.chart.setScale("x", { min: low, max: high });
        this.chart.redraw(false); // also where only the alerts changed
      });
      return;
    }
    this.look = look;
    this.chart?.destroy();
    this.chart = new window.uPlot(this.options(lines, { low, high, isLog, top, heights }), data, this.element);
    this.chart.over.append(this.tip);
    this.chart.over.addEventListener("click", (event) => this.clicked(event));
    this.dragged(this.chart);
  }

  /** A finger drawn sideways chooses a stretch, as a mouse does; up and down it scrolls the page (`touch-action` in the style). */
  dragged(chart) {
    let start = null;
    const place = (event) => event.clientX - chart.over.getBoundingClientRect().left;
    const on = (name, act) => chart.over.addEventListener(name, (event) => event.pointerType === "touch" && act(event));
    on("pointerdown", (event) => { start = event.isPrimary ? place(event) : null; });
    on("pointermove", (event) => {
      if (start === null) return;
      const [low, high] = [start, place(event)].map((left) => Math.min(Math.max(left, 0), chart.over.clientWidth)).sort((a, b) => a - b);
      chart.setSelect({ left: low, width: high - low, top: 0, height: chart.over.clientHeight }, false);
    });
    on("pointercancel", () => { start = null; chart.setSelect({ left: 0, width: 0 }, false); });
    on("pointerup", () => { if (start !== null) this.selected(chart); start = null; });
  }

  options(lines, { low, high, isLog, top, heights }) {
    const plain = lines.some((one) => one.fill) ? stacked : padded;
    const fixed = (chart, least, most) => {
      const [from, to] = isLog ? [least, most] : plain(chart, least, most);
      return heights[0] !== null && heights[1] !== null && heights[0] >= heights[1] ? [from, to] : [heights[0] ?? from, heights[1] ?? to];
    };
    const isSet = heights.some((value) => value !== null && !(isLog && value <= 0));
    const [ink, rule, font] = [style("--ink-soft"), style("--rule"), "12px system-ui, sans-serif"];
    const axis = { stroke: ink, font, ticks: { stroke: rule, width: 1, size: 4 }, grid: { stroke: rule, width: 1 }, gap: 3 };
    const width = (chart, values) => {
      chart.ctx.font = `${12 * devicePixelRatio}px system-ui, sans-serif`;
      return 12 + Math.max(0, ...(values ?? []).map((text) => chart.ctx.measureText(text).width / devicePixelRatio));
    };
    const wholes = (chart, places) => places.map((step) => (Number.isInteger(step) ? short(step) : ""));
    const far = (chart, places) => (this.axis === "step" ? wholes(chart, places) : this.axis === "tokens" ? places.map((value) => COUNT.format(value)) : axisTexts(places).map((one) => `${one} h`));
    return {
      width: Math.max(50, this.element.clientWidth), height: HEIGHT, padding: [8, 26, 0, 0], legend: { show: false }, focus: { alpha: 1 },
      scales: { x: { time: false, min: low, max: high, auto: false }, y: { distr: isLog ? 3 : 1, range: top !== null ? [0, top] : isSet ? fixed : isLog ? undefined : plain } },
      axes: [{ ...axis, grid: { show: false }, size: 24, values: far },
        { ...axis, size: width, values: (chart, places) => axisTexts(places) }],
      series: [{}, ...lines.map((one) => ({ label: one.name ?? "", stroke: one.stroke, width: one.width, fill: one.fill, spanGaps: false,
        points: { show: one.steps.length < 3, size: 5, fill: one.stroke } }))],
      bands: lines.flatMap((one, at) => (one.band ? [{ series: [at + 1, at + 2], fill: one.band }] : [])),
      cursor: {
        y: false, drag: { x: true, y: false, setScale: false, dist: 5 }, points: { size: 5 }, dataIdx: nearest,
        bind: { dblclick: () => () => this.onRange?.(null, null) },
      },
      hooks: { draw: [(chart) => this.marks(chart)], setSelect: [(chart) => this.selected(chart)], setCursor: [(chart) => this.tell(chart)] },
    };
  }

  selected(chart) {
    if (chart.select.width < 2) return;
    const [low, high] = [chart.select.left, chart.select.left + chart.select.width].map((left) => chart.posToVal(left, "x"));
    chart.setSelect({ left: 0, width: 0 }, false);
    if (this.axis === "step") this.onRange?.(Math.max(0, Math.floor(low)), Math.ceil(high));
    else {
      const steps = this.lines.flatMap((one) => (one.at ?? []).filter((_, at) => one.steps[at] >= low && one.steps[at] <= high));
      if (steps.length) this.onRange?.(Math.min(...steps), Math.max(...steps));
    }
  }

  clicked(event) {
    const left = event.clientX - this.chart.over.getBoundingClientRect().left;
    const gaps = this.alerts.map((alert) => Math.abs(this.chart.valToPos(this.placeOf(alert)[0], "x") - left));
    const gap = Math.min(...gaps, Infinity);
    if (gap <= NEAR) this.onAlert?.(this.alerts[gaps.indexOf(gap)]);
  }

  marks(chart) {
    const { ctx } = chart;
    const { left, top, width, height } = chart.bbox;
    const size = 4 * devicePixelRatio;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    this.symbols(chart);
    const placed = this.alerts.map((alert) => [alert, this.placeOf(alert)]).map(([alert, [step, value]]) =>
      [alert, Math.round(chart.valToPos(step, "x", true)) + 0.5, value === null ? null : chart.valToPos(value, "y", true)]).filter(([, x]) => x >= left && x <= left + width);
    const isCrowded = placed.length > CROWD;
    const isAlone = new Set(this.lines.filter((one) => one.name && one.run).map((one) => one.run)).size <= 1;
    for (const [alert, x, value] of placed) {
      const y = isAlone || value === null ? top : Math.max(top, value - 3 * size); // with several runs, on the curve of its own
      ctx.globalAlpha = isCrowded ? 0.15 : 0.75;
      ctx.strokeStyle = ctx.fillStyle = SEVERITY[alert.severity] ?? SEVERITY.info;
      ctx.beginPath();
      ctx.moveTo(x, y);
      ctx.lineTo(x, isAlone ? top + height : y + 3 * size);
      ctx.stroke();
      ctx.globalAlpha = 0.9;
      ctx.beginPath();
      ctx.moveTo(x - size, y);
      ctx.lineTo(x + size, y);
      ctx.lineTo(x, y + 1.6 * size);
      ctx.fill();
    }
    ctx.restore();
  }

  /** Where an alert lies: `[place on the axis, value of its run there or null]`. */
  placeOf(alert) {
    const mine = this.lines.find((one) => one.at?.length && (one.run === alert.run || one.runs?.includes(alert.run)));
    if (!mine) return [alert.step, null];
    const found = mine.at.findIndex((step) => step >= alert.step);
    const at = found < 0 ? mine.at.length - 1 : found;
    return [this.axis === "step" ? alert.step : mine.steps[at], mine.values[at]];
  }

  /** The mark of each run on its curve, now and then, where several runs are drawn. */
  symbols(chart) {
    const marked = this.lines.filter((one) => one.mark && one.name);
    if (marked.length < 2) return;
    const { ctx } = chart;
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    Object.assign(ctx, { textAlign: "center", textBaseline: "middle" });
    marked.forEach((one, turn) => {
      ctx.fillStyle = one.stroke;
      let next = -Infinity;
      one.values.forEach((value, at) => {
        if (value === null || value === undefined || (chart.scales.y.distr === 3 && value <= 0)) return;
        const x = chart.valToPos(one.steps[at], "x", true);
        if (next === -Infinity) next = x + (turn * 17 * devicePixelRatio) % (APART * devicePixelRatio);
        if (x < next) return;
        ctx.fillText(one.mark, x, chart.valToPos(value, "y", true));
        next = x + APART * devicePixelRatio;
      });
    });
  }

  tell(chart) {
    const { left, idxs } = chart.cursor;
    const found = left < 0 ? [] : this.lines.map((one, at) => [one, idxs[at + 1]]).filter(([one, at]) => one.name && at !== null && at !== undefined);
    this.tip.hidden = !found.length;
    if (!found.length) return;
    const values = found.map(([one, at]) => [one, chart.data[0][at], one.told ? one.told[one.steps.indexOf(chart.data[0][at])] : chart.data[this.lines.indexOf(one) + 1][at]]);
    const alert = this.alerts.find((one) => Math.abs(chart.valToPos(this.placeOf(one)[0], "x") - left) <= NEAR);
    fill(this.tip, h("div", {}, AXES[this.axis](values[0][1])), values.map(([one, , value]) =>
      h("div", {}, dot(one.stroke), `${one.name}: ${short(value, 4)}${interval(one, chart, idxs[this.lines.indexOf(one) + 1])}`)), alert ? h("div", {}, `${alert.severity} of ${alert.run} at step ${alert.step}: ${alert.said}`) : null);
    const isRight = left > chart.over.clientWidth / 2;
    Object.assign(this.tip.style, { left: isRight ? "auto" : `${left + 12}px`, right: isRight ? `${chart.over.clientWidth - left + 12}px` : "auto" });
  }

  fit() {
    const width = this.element.clientWidth;
    if (this.chart && width && width !== this.chart.width) this.chart.setSize({ width, height: HEIGHT });
  }

  /** The picture with a title and its legend as a PNG's address. */
  picture(title) {
    return pictureOf(this.chart.ctx.canvas, title, this.lines.filter((one) => one.name), { paper: style("--paper"), ink: style("--ink") });
  }

  leave() {
    this.resizer.disconnect();
    this.chart?.destroy();
  }
}

const COUNT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 4 });
const AXES = { step: (step) => `step ${short(step)}`, time: (hours) => `after ${short(hours)} hours`, tokens: (count) => `${COUNT.format(count)} tokens` };

/** The ends of an interval, in words, at a place of the joined data. */
function interval(one, chart, at) {
  const place = one.low ? one.steps.indexOf(chart.data[0][at]) : -1;
  return place < 0 || one.low[place] === null || one.low[place] === undefined ? "" : ` (${short(one.low[place])} to ${short(one.high[place])})`;
}

/** All lines over one row of steps; where a line has no point, it goes on to its next one. */
function together(lines, isLog) {
  const shown = (values) => (isLog ? values.map((value) => (value > 0 ? value : null)) : values);
  const tables = lines.map((one) => [one.steps, shown(one.values)]);
  if (!tables.length) return [[], []];
  return tables.every(([steps]) => steps === tables[0][0]) ? [tables[0][0], ...tables.map(([, values]) => values)] : window.uPlot.join(tables);
}

const stacked = (_, low, high) => [0, (high ?? 0) > 0 ? 1.05 * high : 1];

/** A little room above and below; a line that does not move lies in the middle. */
function padded(_, low, high) {
  if (low === null || high === null) return [0, 1];
  const room = high > low ? 0.08 * (high - low) : Math.abs(low) * 0.1 || 1;
  return [low >= 0 && low <= room ? 0 : low - room, high + room];
}

function ends(steps, [from, to]) {
  const [low, high] = [from ?? steps[0] ?? 0, to ?? steps.at(-1) ?? 1];
  return low < high ? [low, high] : [low - 1, low + 1];
}

/** The place of the value of a series that is nearest to where the pointer is; null for none. */
function nearest(chart, series, at) {
  const values = chart.data[series];
  for (let by = 0; by < LOOK; by += 1) {
    if (values[at - by] !== null && values[at - by] !== undefined) return at - by;
    if (values[at + by] !== null && values[at + by] !== undefined) return at + by;
  }
  return null;
}

/** A line of `curve` (the server's). A faint one stands behind a smoothed one and is not named in tooltips. */
export function line(curve, { name, colour, isFaint = false, mark = null }) {
  return { steps: curve.x ?? curve.steps, at: curve.steps, values: curve.values, low: curve.low, high: curve.high, run: curve.run ?? null, runs: curve.runs ?? null,
    name: isFaint ? null : name, mark: isFaint ? null : mark, stroke: isFaint ? `${colour}55` : colour, width: isFaint ? 1 : 1.6 };
}

/** The area between two rows of numbers, as two lines without ink. */
export function band(steps, low, high, { colour, opacity }) {
  const shade = `${colour}${Math.round(255 * opacity).toString(16).padStart(2, "0")}`;
  return [{ steps, values: high, name: null, width: 0, band: shade }, { steps, values: low, name: null, width: 0 }];
}

/** Areas on each other: `parts` are `{name, values, colour}`, the first one lowest. */
export function areas(steps, parts) {
  const sums = [];
  for (const { values } of parts) sums.push(values.map((value, at) => (value ?? 0) + (sums.at(-1)?.[at] ?? 0)));
  return parts.map(({ name, values, colour }, at) => ({ steps, values: sums[at], told: values, name, stroke: colour, width: 1, fill: colour })).reverse();
}
