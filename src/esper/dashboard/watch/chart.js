// Charts of series over steps, time, samples or FLOPs, by ECharts. Names of series are data here and never keys of options.

import { echarts } from "nicegui-echart";

// Colours of Okabe and Ito, which people with any colour vision can tell apart.
export const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7a00", "#7a7a7a"];
const MARKS = { grows: "#0072b2", kept: "#009e73", pruned: "#e69f00", "rolled back": "#d55e00" };
const MOST = 600; // points of a mean over runs
const FEW = 12; // a line with fewer points shows each of them
const REPAINT_MS = 900; // while a run trains, a chart is painted at most this often
const LONGEST_MS = 4000; // and at least this often
const SHARE = 0.02; // of a core that painting all visible charts may take, about as much comes on top outside of this program

export function format(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (value !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2);
  return Number(value.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 6 });
}

// Exponential moving average with the bias of the start removed; missing values stay missing.
export function smooth(values, weight) {
  if (!weight) return values;
  let mean = 0;
  let share = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    share = weight * share + (1 - weight);
    return mean / share;
  });
}

// The value at x of a curve through points with rising x, by straight lines. Before the first and after the last point: null, or their values.
export function at(xs, ys, x, { isOpen = true } = {}) {
  if (!xs.length || (!isOpen && (x < xs[0] || x > xs.at(-1)))) return null;
  if (x <= xs[0]) return ys[0];
  if (x >= xs.at(-1)) return ys.at(-1);
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  const share = xs[high] === xs[low] ? 0 : (x - xs[low]) / (xs[high] - xs[low]);
  return ys[low] + share * (ys[high] - ys[low]);
}

// Quantiles of Student's t for a 95 % interval, by degrees of freedom from 1 on.
const STUDENT = [12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042];

// The mean of several curves [[x, y], ...] with its 95 % interval, where all of them have values. A single curve has no interval.
export function meanOf(curves) {
  const columns = curves.map((points) => [points.map((point) => point[0]), points.map((point) => point[1])]);
  const start = Math.max(...columns.map(([xs]) => xs[0]));
  const end = Math.min(...columns.map(([xs]) => xs.at(-1)));
  let places = [...new Set(columns.flatMap(([xs]) => xs))].filter((x) => x >= start && x <= end).sort((a, b) => a - b);
  if (places.length > MOST) places = Array.from({ length: MOST }, (_, index) => places[Math.round((index * (places.length - 1)) / (MOST - 1))]);
  const margin = (STUDENT[curves.length - 2] ?? 1.96) / Math.sqrt(curves.length);
  const points = [];
  const band = [];
  for (const x of places) {
    const values = columns.map(([xs, ys]) => at(xs, ys, x, { isOpen: false }));
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    points.push([x, mean]);
    if (values.length > 1) {
      const spread = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (values.length - 1));
      band.push([x, mean - margin * spread, mean + margin * spread]);
    }
  }
  return { points, band };
}

// ECharts keeps series in plain objects by their names. A name that every object has, such as __proto__, gets an invisible mark.
function safeName(name) {
  return name in {} ? `\u200b${name}` : name;
}

// The interval around a line as one filled shape.
function bandSeries(line) {
  return {
    type: "custom",
    name: safeName(line.label),
    silent: true,
    animation: false,
    tooltip: { show: false },
    data: [0],
    encode: { x: -1, y: -1 },
    z: 1,
    clip: true,
    color: line.color,
    renderItem: (_, api) => {
      const shown = line.band.filter((row) => row[1] !== null && row[2] !== null);
      const corners = [...shown.map((row) => api.coord([row[0], row[2]])), ...shown.reverse().map((row) => api.coord([row[0], row[1]]))];
      return { type: "polygon", shape: { points: corners.filter((corner) => corner.every(Number.isFinite)) }, style: { fill: line.color, opacity: 0.16 } };
    },
  };
}

export class LineChart {
  static visible = 0; // charts inside the window
  static cost = 5; // milliseconds that painting one takes, averaged

  constructor(element) {
    this.element = element;
    this.title = element.ariaLabel ?? "";
    this.chart = echarts.init(element, null, { renderer: "canvas" });
    this.observer = new ResizeObserver(() => this.chart.resize());
    this.observer.observe(element);
    // Charts outside the window are painted when they come into it.
    this.isVisible = false;
    this.sight = new IntersectionObserver((entries) => {
      this.#see(entries.at(-1).isIntersecting);
      if (this.isVisible) this.#paint();
    }, { rootMargin: "100px" });
    this.sight.observe(element);
  }

  close() {
    clearTimeout(this.later);
    this.#see(false);
    this.observer.disconnect();
    this.sight.disconnect();
    this.chart.dispose();
  }

  // lines: [{label, color, dashed, dots, points: [[x, y], ...], band: [[x, low, high], ...]}], marks: [{x, what, text}]
  draw(lines, options) {
    // The same in words, for people who hear the page.
    const said = lines.map((line) => `${line.label} ${format(line.points.at(-1)[1])} at ${format(line.points.at(-1)[0])}${line.band?.length ? ` [${format(line.band.at(-1)[1])}, ${format(line.band.at(-1)[2])}]` : ""}`);
    this.element.ariaLabel = [`${this.title} by ${options.xName}${options.isLog ? ", logarithmic" : ""}`, ...said].join("; ");
    this.latest = [lines, options];
    if (this.isVisible) this.#paint();
  }

  #see(isVisible) {
    LineChart.visible += Number(isVisible) - Number(this.isVisible);
    this.isVisible = isVisible;
  }

  // Paints what was drawn last. New points alone may wait until the last painting is about a second old, or more where painting is slow; a
  // change of the look never does.
  #paintLater(wait) {
    this.later ??= setTimeout(() => {
      this.later = null;
      if (this.isVisible) this.#paint();
    }, wait);
  }

  #paint() {
    if (!this.latest) return;
    const [lines, { isDark, isLog, xName, marks = [] }] = this.latest;
    // If only points are new, only they are given to ECharts, which takes half of the time.
    const look = JSON.stringify([isDark, isLog, xName, marks, lines.map((line) => [line.label, line.color, line.dashed, line.points.length < FEW, Boolean(line.band?.length)])]);
    const isSameLook = look === this.look;
    const every = Math.min(Math.max(REPAINT_MS, (LineChart.visible * LineChart.cost) / SHARE), LONGEST_MS);
    const wait = every - (performance.now() - (this.painted ?? -LONGEST_MS));
    if (isSameLook && wait > 0) {
      this.#paintLater(wait);
      return;
    }
    this.latest = null;
    this.look = look;
    this.painted = performance.now();
    const ink = isDark ? "#d5dce4" : "#2b333c";
    const soft = isDark ? "#7d8894" : "#77818c";
    const grid = isDark ? "#262d36" : "#e7eaee";
    const axis = { axisLine: { lineStyle: { color: soft } }, axisLabel: { color: soft, hideOverlap: true, formatter: shortNumber }, splitNumber: 4, splitLine: { lineStyle: { color: grid } } };
    const series = lines.map((line) => ({
      type: "line",
      name: safeName(line.label),
      data: isLog ? line.points.filter((point) => point[1] > 0) : line.points,
      showSymbol: line.dots || line.points.length < FEW,
      symbolSize: line.dots ? 7 : 4,
      color: line.color,
      lineStyle: { width: line.dashed ? 1.5 : 2, type: line.dashed ? "dashed" : "solid" },
      emphasis: { disabled: true },
      animation: false,
      z: 2,
    }));
    if (marks.length && series.length) {
      series[0].markLine = {
        symbol: "none",
        animation: false,
        silent: false,
        data: marks.map((mark) => ({
          xAxis: mark.x,
          name: mark.text,
          lineStyle: { color: MARKS[mark.what] ?? soft, type: "solid", width: 1, opacity: 0.55 },
          label: { show: false },
          emphasis: { label: { show: true, formatter: mark.text, color: ink }, lineStyle: { width: 2, opacity: 1 } },
        })),
      };
    }
    // The band of a line is not among its points, so the axis has to be told how far it reaches.
    const banded = lines.filter((line) => line.band?.length);
    const reach = banded.flatMap((line) => line.band.flatMap((row) => [row[1], row[2]])).filter((value) => value !== null && (!isLog || value > 0));
    const edges = reach.length ? roundEdges(reach, lines.flatMap((line) => line.points.map((point) => point[1]).filter((value) => !isLog || value > 0)), isLog) : {};
    const allSeries = [...banded.map(bandSeries), ...series];
    if (isSameLook) {
      const began = performance.now();
      this.chart.setOption({ yAxis: edges, series: allSeries });
      this.chart.getZr().flush();
      LineChart.cost = 0.8 * LineChart.cost + 0.2 * (performance.now() - began);
      return;
    }
    this.chart.setOption(
      {
        animation: false,
        grid: { left: 8, right: 18, top: 30, bottom: 22, containLabel: true },
        legend: { top: 0, left: 0, icon: "roundRect", itemHeight: 4, itemWidth: 14, textStyle: { color: ink, fontSize: 11 }, type: "scroll", pageIconColor: soft, pageTextStyle: { color: soft } },
        tooltip: {
          trigger: "axis",
          confine: true,
          backgroundColor: isDark ? "#1a2028" : "#ffffff",
          borderColor: grid,
          textStyle: { color: ink, fontSize: 12 },
          valueFormatter: (value) => format(value),
        },
        xAxis: { type: "value", name: xName, nameLocation: "middle", nameGap: 24, nameTextStyle: { color: soft, fontSize: 11 }, min: "dataMin", max: "dataMax", ...axis, axisLine: { onZero: false, lineStyle: { color: soft } }, splitLine: { show: false } },
        yAxis: { type: isLog ? "log" : "value", scale: true, ...edges, ...axis, axisLine: { show: false, onZero: false }, axisTick: { show: false } },
        series: allSeries,
      },
      { notMerge: true },
    );
  }
}

// The ends of an axis that holds all points and their intervals, as round numbers. An interval from few samples can be a hundred times as
// wide as the curve; then it is cut, so that the curve can be read.
function roundEdges(reach, values, isLog) {
  const ends = (some) => some.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  let [low, high] = ends(reach);
  if (values.length) {
    const [least, most] = ends(values);
    const room = 1.5 * (most - least || high - low);
    [low, high] = [Math.min(Math.max(low, least - room), least), Math.max(Math.min(high, most + room), most)];
  }
  if (isLog) return { min: Math.max(low, Math.min(...values, high) / 10), max: high };
  const rough = (high - low || Math.abs(high) || 1) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  return { min: Math.floor(low / step) * step, max: Math.ceil(high / step) * step, interval: step };
}

function shortNumber(value) {
  const size = Math.abs(value);
  const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];
  const unit = units.find(([least]) => size >= least);
  if (unit) return `${Number((value / (unit[1] === "k" ? 1e3 : unit[0])).toPrecision(3))} ${unit[1]}`;
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}
