// What became of the blueprints of a run, and what its seeds are worth. Vue escapes all texts.

import { figure, shortened, withInterval } from "./figures.js";

const ROW = 26;
const LEFT = 170;
const WIDTH = 640;

export const SeedAnalysis = {
  props: ["blueprints", "analysis", "folder", "isGrowth"],
  template: `
<details v-if="blueprints.length" class="card" data-blueprints :open="!isGrowth">
  <summary>blueprints</summary>
  <div class="scroll"><table><thead><tr><th>blueprint</th><th v-for="name in heading" :key="name" class="number">{{ name }}</th></tr></thead>
    <tbody><tr v-for="row in blueprints" :key="row.blueprint" :data-blueprint="row.blueprint"><td>{{ row.blueprint }}</td>
      <td class="number">{{ row.tried }}</td><td class="number">{{ row.kept }}</td><td class="number">{{ row.pruned }}</td><td class="number">{{ row.rolled_back }}</td><td class="number">{{ total(row.refused) }}</td>
      <td class="number">{{ withInterval(row.gain, row.gain_low, row.gain_high, { isShort: true }) }}</td><td class="number">{{ row.cells }}</td>
      <td class="number">{{ figure(row.parameters) }}</td><td class="number">{{ figure(row.flops) }}</td><td class="number">{{ figure(row.per_thousand) }}</td></tr></tbody></table></div>
  <details v-if="reasons.length"><summary>why seeds were removed, and actions that gates refused</summary>
    <ul class="log"><li v-for="(row, index) in reasons" :key="index"><b>{{ row.blueprint }}, {{ row.what }}, {{ row.times }}×</b> {{ row.why }}</li></ul></details>
  <p class="quiet">Cost of removal: rise of the validation loss if the seed were removed, as measured last; mean over cells with its 95 % interval. A cell is a run, or a task and host of a controller's training. Parameters and FLOPs are means of one seed.</p>
</details>
<details v-if="isGrowth && blueprints.length" class="card" data-analysis :open="Boolean(analysis)">
  <summary>worth of the seeds</summary>
  <p v-if="!analysis" class="quiet">Shapley values and the interaction of seeds are not measured yet. Measure them with: esper analyse {{ folder }}</p>
  <p v-else-if="analysis.problem" class="quiet">{{ analysis.problem }}</p>
  <template v-else>
    <div v-for="measure in analysis.measures" :key="measure.name" :data-measure="measure.name" style="margin-bottom: 16px">
      <h4>{{ measure.name }}: {{ figure(measure.without) }} without seeds, {{ figure(measure.with_all) }} with all</h4>
      <div class="scroll"><svg :width="width" :height="row * analysis.seeds.length + 8" role="img" :aria-label="'Shapley values, ' + measure.name">
        <g v-for="(bar, index) in bars(measure)" :key="index" :data-shapley="bar.name"><title>{{ bar.title }}</title>
          <text :x="left - 8" :y="row * index + 19" text-anchor="end">{{ bar.label }}</text>
          <rect :x="bar.x" :y="row * index + 7" :width="bar.width" height="15" :fill="bar.color" opacity="0.75"/>
          <line v-if="bar.low !== null" :x1="bar.low" :x2="bar.high" :y1="row * index + 14.5" :y2="row * index + 14.5" stroke="currentColor" stroke-width="2"/>
          <text :x="width - 4" :y="row * index + 19" text-anchor="end">{{ bar.text }}</text></g>
        <line :x1="zero(measure)" :x2="zero(measure)" y1="2" :y2="row * analysis.seeds.length + 4" stroke="currentColor" opacity="0.5"/></svg></div>
      <div v-if="measure.pairs.length" class="scroll"><table style="width: auto"><thead><tr><th>interaction</th><th v-for="seed in analysis.seeds" :key="seed.name" class="number">{{ seed.name }}</th></tr></thead>
        <tbody><tr v-for="one in analysis.seeds" :key="one.name"><td>{{ one.name }}</td><td v-for="other in analysis.seeds" :key="other.name" class="number" :style="shade(measure, one.name, other.name)">{{ pair(measure, one.name, other.name) }}</td></tr></tbody></table></div>
    </div>
    <p class="quiet">The Shapley value of a seed is its mean gain over all orders in which the seeds could be added; the values sum to the gain of all seeds. For a metric, gain means its increase. Interaction: + the two help each other, - they do the same work; a star marks intervals without 0. {{ analysis.about }}</p>
  </template>
</details>`,
  created() {
    this.heading = ["tried", "kept", "pruned", "rolled back", "refused", "cost of removal", "cells", "parameters", "FLOPs", "cost per 1,000 parameters"];
    Object.assign(this, { figure, withInterval, row: ROW, left: LEFT, width: WIDTH });
  },
  computed: {
    reasons() {
      return this.blueprints.flatMap((row) => [
        ...Object.entries(row.reasons).map(([why, times]) => ({ blueprint: row.blueprint, what: "removed", times, why })),
        ...Object.entries(row.refused).map(([why, times]) => ({ blueprint: row.blueprint, what: "refused", times, why })),
      ]);
    },
  },
  methods: {
    total(counts) {
      return Object.values(counts).reduce((sum, times) => sum + times, 0);
    },
    scale(measure) {
      const ends = Object.values(measure.shapley).flatMap((value) => [value.estimate, value.low, value.high]).filter((end) => end !== null);
      const low = Math.min(0, ...ends);
      const high = Math.max(0, ...ends);
      return (value) => LEFT + ((value - low) / (high - low || 1)) * (WIDTH - LEFT - 130);
    },
    zero(measure) {
      return this.scale(measure)(0);
    },
    bars(measure) {
      const at = this.scale(measure);
      return this.analysis.seeds.map((seed) => {
        const value = measure.shapley[seed.name];
        const text = value.estimate === null ? "not finite" : withInterval(value.estimate, value.low, value.high, { sign: "+", isShort: true });
        const place = at(value.estimate ?? 0);
        return {
          name: seed.name,
          label: shortened(seed.name, 26),
          title: `${seed.name}, ${seed.blueprint}, ${seed.outcome}: ${text}; cost of removal ${figure(measure.removal[seed.name].estimate)}, alone ${figure(measure.alone[seed.name].estimate, 4, "+")}`,
          text,
          x: Math.min(place, at(0)),
          width: Math.abs(place - at(0)),
          color: (value.estimate ?? 0) < 0 ? "#d55e00" : "#0072b2",
          low: value.low === null || value.high === null ? null : at(value.low),
          high: value.high === null ? null : at(value.high),
        };
      });
    },
    found(measure, one, other) {
      return measure.pairs.find((pair) => (pair.first === one && pair.second === other) || (pair.first === other && pair.second === one))?.value;
    },
    pair(measure, one, other) {
      const value = this.found(measure, one, other);
      if (!value) return "";
      const isSure = value.low !== null && value.high !== null && (value.low > 0 || value.high < 0);
      return value.estimate === null ? "not finite" : `${figure(value.estimate, 4, "+")}${isSure ? "*" : ""}`;
    },
    shade(measure, one, other) {
      const value = this.found(measure, one, other)?.estimate ?? 0;
      const most = Math.max(...measure.pairs.map((pair) => Math.abs(pair.value.estimate ?? 0)));
      return most && value ? { background: `color-mix(in srgb, ${value < 0 ? "#d55e00" : "#0072b2"} ${Math.round((45 * Math.abs(value)) / most)}%, transparent)` } : {};
    },
  },
};
