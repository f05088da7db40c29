// One picture: lines, bands or stacked areas over steps, with alerts as marks. Tooltips are drawn, never HTML.

import { short } from "./dom.js";

const SEVERITY = { error: "#c23b4b", warning: "#d9730d", info: "#7f8a96" };

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** A plot in `element`. `onRange(low, high)` when the reader drags over a stretch, `onAlert(alert)` when one is clicked. */
export class Plot {
  constructor(element, { onRange, onAlert } = {}) {
    this.element = element;
    this.onAlert = onAlert;
    this.chart = window.echarts.init(element, null, { renderer: "canvas" });
    this.chart.on("datazoom", (event) => {
      const { startValue, endValue } = event.batch?.[0] ?? event;
      if (startValue !== undefined && endValue > startValue) onRange?.(Math.floor(startValue), Math.ceil(endValue));
    });
    this.chart.on("click", (event) => {
      if (event.componentType === "markLine" && event.data.alert) this.onAlert?.(event.data.alert);
    });
    this.chart.getZr().on("dblclick", () => onRange?.(null, null));
    this.resizer = new ResizeObserver(() => this.chart.resize());
    this.resizer.observe(element);
  }

  /** Draw `series` (ECharts line series without style) between the steps of `range`, with `alerts`. */
  draw(series, { range = [null, null], alerts = [], isLog = false, top = null } = {}) {
    const ink = style("--ink-soft");
    const rule = style("--rule");
    const axis = { axisLine: { lineStyle: { color: rule } }, axisLabel: { color: ink, hideOverlap: true }, splitLine: { lineStyle: { color: rule } } };
    this.chart.setOption({
      animation: false,
      grid: { left: 8, right: 14, top: 12, bottom: 4, containLabel: true },
      tooltip: { trigger: "axis", renderMode: "richText", confine: true, backgroundColor: style("--paper-high"), borderColor: rule,
        textStyle: { color: style("--ink"), fontSize: 12 }, axisPointer: { lineStyle: { color: ink } }, formatter: (rows) => tip(rows) },
      toolbox: { show: true, itemSize: 0, feature: { dataZoom: { yAxisIndex: "none", show: true } } },
      xAxis: { type: "value", min: range[0] ?? "dataMin", max: range[1] ?? "dataMax", ...axis, splitLine: { show: false } },
      yAxis: { type: isLog ? "log" : "value", scale: true, max: top, ...axis, axisLabel: { ...axis.axisLabel, formatter: (value) => short(value, 2) } },
      series: [...series, ...(alerts.length ? [marks(alerts)] : [])],
    }, { notMerge: true, lazyUpdate: false });
    this.chart.dispatchAction({ type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true });
  }

  /** The picture as a PNG's address. */
  picture() {
    return this.chart.getDataURL({ pixelRatio: 2, backgroundColor: style("--paper") });
  }

  leave() {
    this.resizer.disconnect();
    this.chart.dispose();
  }
}

function marks(alerts) {
  return {
    type: "line", name: "alerts", data: [], silent: false,
    markLine: {
      symbol: ["none", "triangle"], symbolSize: 7, animation: false, label: { show: false },
      data: alerts.map((alert) => ({ xAxis: alert.step, alert, lineStyle: { color: SEVERITY[alert.severity] ?? SEVERITY.info, type: "solid", width: 1, opacity: 0.75 } })),
    },
  };
}

function tip(rows) {
  const shown = rows.filter((row) => row.seriesName && !row.seriesName.startsWith("\u200b") && row.value?.[1] !== undefined);
  if (!shown.length) return "";
  return [`step ${short(shown[0].value[0])}`, ...shown.map((row) => `${row.marker ? "" : ""}${row.seriesName}: ${short(row.value[2] ?? row.value[1], 4)}`)].join("\n");
}

/** A line of `curve` (the server's). A faint one stands behind a smoothed one and is not named in tooltips. */
export function line(curve, { name, colour, isFaint = false, dash = null }) {
  const data = curve.steps.map((step, at) => [step, curve.values[at]]);
  return {
    type: "line", name: isFaint ? `\u200b${name}` : name, data, showSymbol: data.length < 2, symbolSize: 5, connectNulls: false, silent: true, z: isFaint ? 1 : 2,
    lineStyle: { color: colour, width: isFaint ? 1 : 1.6, opacity: isFaint ? 0.25 : 1, type: dash ?? "solid" }, itemStyle: { color: colour },
    tooltip: { show: !isFaint },
  };
}

/** The area between two rows of numbers, as two series of one stack. */
export function band(steps, low, high, { name, colour, opacity }) {
  const shared = { type: "line", showSymbol: false, silent: true, lineStyle: { opacity: 0 }, stack: name, stackStrategy: "all", tooltip: { show: false } };
  return [
    { ...shared, name: `\u200b${name} low`, data: steps.map((step, at) => [step, low[at]]) },
    { ...shared, name: `\u200b${name} high`, data: steps.map((step, at) => [step, high[at] - low[at]]), areaStyle: { color: colour, opacity } },
  ];
}

/** Shares that add up to one, as areas on each other. */
export function area(steps, values, { name, colour }) {
  return { type: "line", name, data: steps.map((step, at) => [step, values[at]]), showSymbol: false, silent: true, stack: "shares", lineStyle: { width: 0 },
    areaStyle: { color: colour, opacity: 0.75 }, itemStyle: { color: colour } };
}
