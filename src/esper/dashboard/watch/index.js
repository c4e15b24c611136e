// What the dashboard needs beside its templates: series that grow, charts, and drawings of a growing network.
export { HostLives, SeriesChart, AXES } from "./components.js";
export { SeedAnalysis } from "./analysis.js";
export { SeriesStore } from "./store.js";
export { LineChart, PALETTE, at, meanOf, smooth } from "./chart.js";
export { compact, figure, percent, points, withInterval } from "./figures.js";
export { ReplayList } from "./replays.js";
export { lifeSvg, networkSvg, timelineSvg, sparkline, STAGES } from "./drawing.js";
