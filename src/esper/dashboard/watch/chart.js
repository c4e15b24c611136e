// Charts of series over steps, time, samples or FLOPs, by ECharts. Names of series are data here and never keys of options.

import { echarts } from "nicegui-echart";

// Colours of Okabe and Ito, which people with any colour vision can tell apart.
export const PALETTE = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8a7a00", "#7a7a7a"];
const MARKS = { grows: "#0072b2", kept: "#009e73", pruned: "#e69f00", "rolled back": "#d55e00" };

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

// ECharts keeps series in plain objects by their names. A name that every object has, such as __proto__, gets an invisible mark.
function safeName(name) {
  return name in {} ? `\u200b${name}` : name;
}

export class LineChart {
  constructor(element) {
    this.chart = echarts.init(element, null, { renderer: "canvas" });
    this.observer = new ResizeObserver(() => this.chart.resize());
    this.observer.observe(element);
  }

  close() {
    this.observer.disconnect();
    this.chart.dispose();
  }

  // lines: [{label, color, dashed, points: [[x, y], ...], band: [[x, low, high], ...]}], marks: [{x, what, text}]
  draw(lines, { isDark, isLog, xName, marks = [] }) {
    const ink = isDark ? "#d5dce4" : "#2b333c";
    const soft = isDark ? "#7d8894" : "#77818c";
    const grid = isDark ? "#262d36" : "#e7eaee";
    const axis = { axisLine: { lineStyle: { color: soft } }, axisLabel: { color: soft, hideOverlap: true }, splitLine: { lineStyle: { color: grid } } };
    const series = lines.map((line) => ({
      type: "line",
      name: safeName(line.label),
      data: isLog ? line.points.filter((point) => point[1] > 0) : line.points,
      showSymbol: line.points.length < 30,
      symbolSize: 4,
      color: line.color,
      lineStyle: { width: line.dashed ? 1.5 : 2, type: line.dashed ? "dashed" : "solid" },
      emphasis: { disabled: true },
      animation: false,
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
    this.chart.setOption(
      {
        grid: { left: 8, right: 18, top: 30, bottom: 22, containLabel: true },
        legend: { top: 0, left: 0, icon: "roundRect", itemHeight: 4, itemWidth: 14, textStyle: { color: ink, fontSize: 11 }, type: "scroll" },
        tooltip: {
          trigger: "axis",
          confine: true,
          backgroundColor: isDark ? "#1a2028" : "#ffffff",
          borderColor: grid,
          textStyle: { color: ink, fontSize: 12 },
          valueFormatter: (value) => format(value),
        },
        xAxis: { type: "value", name: xName, nameLocation: "middle", nameGap: 24, nameTextStyle: { color: soft, fontSize: 11 }, min: "dataMin", max: "dataMax", ...axis, axisLine: { onZero: false, lineStyle: { color: soft } }, splitLine: { show: false } },
        yAxis: { type: isLog ? "log" : "value", scale: true, ...axis, axisLine: { show: false } },
        series,
      },
      { notMerge: true },
    );
  }
}
