// What the dashboard needs beside its templates: series that grow, charts, and drawings of a growing network.
export { SeriesStore } from "./store.js";
export { LineChart, PALETTE, format, smooth } from "./chart.js";
export { networkSvg, timelineSvg, sparkline, STAGES } from "./drawing.js";
