// Charts of series over steps, time, samples or FLOPs, by ECharts. Names of series are data here and never keys of options.

import { echarts } from "nicegui-echart";

import { compact, figure } from "./figures.js";

// Colours of Okabe and Ito, which people with any colour vision can tell apart.
export const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7a00", "#7a7a7a"];
const DASHES = "path://M0,0h5v2h-5z M8,0h5v2h-5z M16,0h5v2h-5z"; // of a dashed line in the legend
const MOST = 600; // points of a mean over runs
const FEW = 12; // a line with fewer points shows each of them
const FEW_MARKS = 6; // so many marks have their words beside them
const SOONEST_MS = 250; // while a run trains, charts are painted at most this often
const LATEST_MS = 500; // and at least this often, so that a new point is seen within a second
const SHARE = 0.04; // of a core that painting may take in between
const WHOLE_MS = 10_000; // in between, new points are added to a chart, which takes a tenth of the time of painting all of it
const ROOM = 0.04; // of the x axis that is kept free for them, at most

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

// The interval around a line as one filled shape, or as a stroke at each point of a line on an axis of its own, which may go back.
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
      const place = (row, end) => api.coord([row[0], row[end]]);
      if (line.x?.isCourse) {
        const strokes = line.band.map((row) => [...place(row, 1), ...place(row, 2)]).filter((ends) => ends.every(Number.isFinite));
        return { type: "group", children: strokes.map(([x1, y1, x2, y2]) => ({ type: "line", shape: { x1, y1, x2, y2 }, style: { stroke: line.color, lineWidth: 1.5, opacity: 0.4 } })) };
      }
      const corners = [...line.band.map((row) => place(row, 2)), ...line.band.toReversed().map((row) => place(row, 1))];
      return { type: "polygon", shape: { points: corners.filter((corner) => corner.every(Number.isFinite)) }, style: { fill: line.color, opacity: 0.16 } };
    },
  };
}

// At most `most` points of a line: the smallest and the largest value of equal parts, and the last point.
export function thin(points, most) {
  if (points.length <= most) return points;
  const size = (points.length - 1) / ((most - 1) >> 1);
  const found = [];
  for (let start = 0; start < points.length - 1; start += size) {
    const end = Math.min(Math.floor(start + size), points.length - 1);
    let [low, high] = [Math.floor(start), Math.floor(start)];
    for (let place = low + 1; place < end; place += 1) {
      if (points[place][1] < points[low][1]) low = place;
      if (points[place][1] > points[high][1]) high = place;
    }
    found.push(points[Math.min(low, high)]);
    if (low !== high) found.push(points[Math.max(low, high)]);
  }
  found.push(points.at(-1));
  return found;
}

// Paints charts that have new points, all of them in one frame, since a frame costs as much as several charts.
const painter = {
  waiting: new Set(),
  frame: -Infinity, // when the frame began in which charts were last painted
  cost: 0, // milliseconds that painting took in it
  timer: null,

  ask(chart) {
    const wait = this.frame + Math.min(Math.max(this.cost / SHARE, SOONEST_MS), LATEST_MS) - performance.now();
    if (wait <= 0 || this.frame === document.timeline.currentTime) {
      this.paint(chart);
      return;
    }
    this.waiting.add(chart);
    this.timer ??= setTimeout(() => requestAnimationFrame(() => {
      this.timer = null;
      for (const late of this.waiting) this.paint(late);
      this.waiting.clear();
    }), wait);
  },

  paint(chart) {
    const began = performance.now();
    if (this.frame !== document.timeline.currentTime) this.cost = 0;
    this.frame = document.timeline.currentTime;
    if (chart.isVisible && !chart.extend()) chart.paint();
    this.cost += performance.now() - began;
  },
};

export class LineChart {
  constructor(element) {
    this.element = element;
    this.title = element.ariaLabel ?? "";
    this.chart = echarts.init(element, null, { renderer: "canvas" });
    this.observer = new ResizeObserver(() => this.chart.resize());
    this.observer.observe(element);
    // Charts outside the window are painted when they come into it.
    this.isVisible = false;
    this.sight = new IntersectionObserver((entries) => {
      this.isVisible = entries.at(-1).isIntersecting;
      if (this.isVisible) this.paint();
    }, { rootMargin: "20px" });
    this.sight.observe(element);
  }

  close() {
    painter.waiting.delete(this);
    this.isVisible = false;
    this.observer.disconnect();
    this.sight.disconnect();
    this.chart.dispose();
  }

  // lines: [{label, color, dashed, dots, seeds, points: [[x, y], ...], band: [[x, low, high], ...]}], marks: [{x, what, text}]
  draw(lines, options) {
    // The same in words, for people who hear the page.
    const said = lines.map((line) => `${line.label}${line.seeds > 1 ? `, ${line.seeds} seeds` : ""} ${figure(line.points.at(-1)[1])} at ${figure(line.points.at(-1)[0])}${line.band?.length ? ` [${figure(line.band.at(-1)[1])}, ${figure(line.band.at(-1)[2])}]` : ""}`);
    this.element.ariaLabel = [`${this.title} by ${options.xName}${options.isLog ? ", logarithmic" : ""}`, ...said].join("; ");
    this.latest = [lines, options];
    if (!this.isVisible) return;
    // New points alone may wait; a change of the look never does.
    if (this.lookOf(lines, options) === this.look) painter.ask(this);
    else this.paint();
  }

  lookOf(lines, { isDark, isLog, xName, marks = [] }) {
    return JSON.stringify([isDark, isLog, xName, marks, lines.map((line) => [line.label, line.color, line.dashed, line.points.length < FEW, Boolean(line.band?.length)])]);
  }

  // Draws the new ends of the lines over the chart as it is. Returns false if all of it has to be painted: for its age, or for want of room.
  extend() {
    if (!this.latest || performance.now() - this.whole > WHOLE_MS) return false;
    const [lines] = this.latest;
    const pieces = [];
    for (const [index, line] of lines.entries()) {
      const points = line.points.slice(line.points.findLastIndex((point) => point[0] <= this.ends[index][0]) + 1);
      if (!points.length) continue;
      const pixels = [this.ends[index], ...points].map((point) => this.chart.convertToPixel("grid", point));
      if (line.dots || line.points.length < FEW || !points.every((point, place) => this.chart.containPixel("grid", pixels[place + 1]))) return false;
      pieces.push([line, pixels]);
    }
    this.latest = null;
    this.clear();
    for (const [line, points] of pieces) {
      const style = { stroke: line.color, fill: null, lineWidth: line.dashed ? 1.5 : 2, lineDash: line.dashed ? [6, 3] : null };
      const added = new echarts.graphic.Polyline({ shape: { points }, style, silent: true, zlevel: 1 });
      this.chart.getZr().add(added);
      this.added.push(added);
    }
    this.chart.getZr().flush();
    this.note(lines);
    return true;
  }

  clear() {
    for (const piece of this.added ?? []) this.chart.getZr().remove(piece);
    this.added = [];
  }

  // Notes the newest place on the x axis that is seen now.
  note(lines) {
    this.element.dataset.painted = Math.max(...lines.map((line) => line.points.at(-1)[0]));
  }

  paint() {
    if (!this.latest) return;
    const [lines, options] = this.latest;
    const { isDark, isLog, xName, marks = [] } = options;
    // If only points are new, only they are given to ECharts, which takes half of the time.
    const look = this.lookOf(lines, options);
    const isSameLook = look === this.look;
    this.latest = null;
    this.clear();
    // As much room for new points as they took since the last time.
    const [least, last] = lines.length ? [Math.min(...lines.map((line) => line.points[0][0])), Math.max(...lines.map((line) => line.points.at(-1)[0]))] : [0, 0];
    const speed = isSameLook ? Math.max(last - this.last, 0) / (performance.now() - this.whole) : 0;
    const room = Math.min(1.5 * speed * WHOLE_MS, ROOM * (last - least));
    const max = room > 0 ? last + room : "dataMax";
    this.look = look;
    this.last = last;
    this.whole = performance.now();
    this.ends = lines.map((line) => line.points.at(-1));
    const most = Math.max(this.element.clientWidth, 100);
    const ink = isDark ? "#d5dce4" : "#2b333c";
    const soft = isDark ? "#7d8894" : "#77818c";
    const grid = isDark ? "#262d36" : "#e7eaee";
    const axis = { axisLine: { lineStyle: { color: soft } }, axisLabel: { color: soft, hideOverlap: true, formatter: compact }, splitNumber: 4, splitLine: { lineStyle: { color: grid } } };
    const series = lines.map((line) => ({
      type: "line",
      name: safeName(line.label),
      data: thin(isLog ? line.points.filter((point) => point[1] > 0) : line.points, most),
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
          lineStyle: { color: getComputedStyle(this.element).getPropertyValue(`--${mark.stage}`) || soft, type: "solid", width: 1.5, opacity: 0.8 },
          label: { show: marks.length <= FEW_MARKS && most > 420, formatter: mark.what, color: soft, fontSize: 10 },
          emphasis: { label: { show: true, formatter: mark.text, color: ink }, lineStyle: { width: 2, opacity: 1 } },
        })),
      };
    }
    // The band of a line is not among its points, so the axis has to be told how far it reaches.
    const banded = lines.filter((line) => line.band?.length);
    const reach = banded.flatMap((line) => line.band.flatMap((row) => [row[1], row[2]])).filter((value) => value !== null && (!isLog || value > 0));
    const edges = reach.length ? roundEdges(reach, lines.flatMap((line) => line.points.map((point) => point[1]).filter((value) => !isLog || value > 0)), isLog) : {};
    const allSeries = [...banded.map(bandSeries), ...series];
    this.note(lines);
    if (isSameLook) {
      this.chart.setOption({ xAxis: { max }, yAxis: edges, series: allSeries });
      this.chart.getZr().flush();
      return;
    }
    this.chart.setOption(
      {
        animation: false,
        grid: { left: 8, right: 18, top: 40, bottom: 22, containLabel: true },
        legend: { data: series.map((one, index) => ({ name: one.name, icon: lines[index].dashed ? DASHES : "roundRect" })), top: 0, left: 0, itemHeight: 3, itemWidth: 20, padding: [0, 5], textStyle: { color: ink, fontSize: 11, lineHeight: 20 }, type: "scroll", pageIconColor: soft, pageTextStyle: { color: soft } },
        tooltip: {
          trigger: "axis",
          confine: true,
          backgroundColor: isDark ? "#1a2028" : "#ffffff",
          borderColor: grid,
          textStyle: { color: ink, fontSize: 12 },
          valueFormatter: (value) => figure(value),
        },
        xAxis: { type: "value", name: xName, nameLocation: "middle", nameGap: 24, nameTextStyle: { color: soft, fontSize: 11 }, min: "dataMin", max, ...axis, axisLine: { onZero: false, lineStyle: { color: soft } }, splitLine: { show: false } },
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
