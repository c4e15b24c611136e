export { fetchReplay } from "./replay.js";
export { Stage } from "./stage.js";
export { chartOf } from "./chart.js";
export { weaponColour } from "./effects.js";
export { GROUNDS } from "./terrain.js";
