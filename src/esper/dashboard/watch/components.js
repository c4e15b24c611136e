// Parts of the pages as Vue components: charts with their controls, and the hosts of a controller's training.

import { LineChart, PALETTE, at, format, meanOf, smooth } from "./chart.js";
import { STAGES, lifeSvg, timelineSvg } from "./drawing.js";

// Axis -> its name under a chart.
export const AXES = { step: "step", time: "hours", samples: "samples", flops: "GFLOPs" };

const card = (inside, note) => `
<section class="card chart" :data-chart="title">
  <header><h3>{{ title }}</h3><span class="spacer"></span>${inside}
    <button type="button" class="tiny" :class="{ 'is-on': isLog }" :aria-pressed="isLog" @click="isLog = !isLog" title="logarithmic axis">log</button></header>
  <div class="plot" ref="plot" role="img" :aria-label="title"></div>
  <p v-if="isEmpty" class="quiet over">No values yet.</p>
  ${note}
</section>`;

// What all charts share: an ECharts chart that is drawn again when something changes, at most once per frame.
const drawn = {
  data: () => ({ isLog: false, isEmpty: false }),
  methods: {
    draw() {
      this.frame ??= requestAnimationFrame(() => {
        this.frame = null;
        this.drawNow();
      });
    },
  },
  mounted() {
    this.chart = new LineChart(this.$refs.plot);
    this.draw();
  },
  beforeUnmount() {
    cancelAnimationFrame(this.frame);
    this.chart.close();
  },
  watch: {
    controls: { handler() { this.draw(); }, deep: true },
    isDark() { this.draw(); },
    isLog() { this.draw(); },
  },
};

const PROGRESS = { samples: "@samples", flops: "@gflops" }; // series that the server computes: the amount so far, by step

// One chart of series. `lines` is [{run: {id, twin}, started, name, label, color, dashed, siblings}], or with `series` instead of a
// name: {steps, times, values, low, high}. `siblings` are the same line of runs with other seeds.
export const SeriesChart = {
  mixins: [drawn],
  props: ["title", "lines", "store", "version", "controls", "isDark", "marks", "note", "choices", "choice"],
  emits: ["choose"],
  template: card(
    `<select v-if="choices" :value="choice" @change="$emit('choose', $event.target.value)" :aria-label="title + ' by'"><option v-for="name in choices" :key="name">{{ name }}</option></select>`,
    `<p v-if="note" class="quiet">{{ note }}</p>`,
  ),
  created() {
    this.subscribed = [];
    this.subscribe();
  },
  beforeUnmount() {
    this.unsubscribe();
  },
  watch: {
    lines() {
      const text = JSON.stringify(this.lines); // a page that changes makes the same lines anew
      if (text === this.linesBefore) return;
      this.linesBefore = text;
      this.subscribe();
      this.draw();
    },
    version() { this.draw(); },
    marks() { this.draw(); },
    "controls.bySeed"() { this.subscribe(); },
    "controls.axis"() { this.subscribe(); },
  },
  methods: {
    members(line) {
      return this.controls.bySeed && line.siblings?.length ? line.siblings : [line];
    },
    subscribe() {
      this.unsubscribe();
      const all = this.lines.flatMap((line) => this.members(line));
      this.subscribed = all.flatMap((line) => [...(line.name ? [line.name] : []), ...(PROGRESS[this.controls.axis] ? [PROGRESS[this.controls.axis]] : [])].map((name) => [line.run, name]));
      for (const [run, name] of this.subscribed) this.store.want(run, [name]);
    },
    unsubscribe() {
      for (const [run, name] of this.subscribed) this.store.release(run, [name]);
      this.subscribed = [];
    },
    // The place of a step on the chosen axis; null if the run does not tell it.
    place(line, step, time) {
      if (this.controls.axis === "step") return step;
      if (this.controls.axis === "time") return time === null ? null : (time - line.started) / 3600;
      const progress = this.store.get(line.run, PROGRESS[this.controls.axis]);
      return progress?.values.length && time !== null ? at(progress.times, progress.values, time) : null;
    },
    points(line) {
      const series = line.series ?? this.store.get(line.run, line.name);
      if (!series?.values.length) return null;
      const values = smooth(series.values, this.controls.smoothing);
      // Fleets of one update end at the same step, so they are numbered instead.
      const steps = line.name?.startsWith("round_ended/") ? series.steps.map((_, index) => index + 1) : series.steps;
      const places = series.places?.[this.controls.axis] ?? steps.map((step, index) => this.place(line, step, series.times[index]));
      const points = values.map((value, index) => [places[index], value]).filter((point) => point[0] !== null && point[1] !== null);
      const band = series.low && !this.controls.smoothing ? series.low.map((low, index) => [places[index], low, series.high[index]]).filter((row) => row[0] !== null && row[1] !== null) : [];
      return points.length ? { points, band } : null;
    },
    drawNow() {
      const drawn = [];
      for (const line of this.lines) {
        const curves = this.members(line).map((member) => this.points(member)).filter(Boolean);
        if (!curves.length) continue;
        const { points, band } = curves.length > 1 ? meanOf(curves.map((curve) => curve.points)) : curves[0];
        drawn.push({ ...line, label: curves.length > 1 ? `${line.label}, ${curves.length} seeds` : line.label, points, band });
      }
      this.isEmpty = !drawn.length;
      const marks = (this.marks ?? []).map((mark) => ({ ...mark, x: this.place(this.lines[0], mark.x, this.timeOf(mark.x)) })).filter((mark) => mark.x !== null);
      this.chart.draw(drawn, { isDark: this.isDark, isLog: this.isLog, xName: this.lines[0]?.axes?.[this.controls.axis] ?? AXES[this.controls.axis], marks });
    },
    timeOf(step) {
      const series = this.store.get(this.lines[0].run, this.lines[0].name);
      return series?.steps.length ? at(series.steps, series.times, step) : null;
    },
  },
};

// How much better the network is, against its parameters or FLOPs: epoch by epoch, against its twin where it has one.
export const GainChart = {
  mixins: [drawn],
  props: ["run", "twin", "store", "version", "controls", "isDark"],
  data: () => ({ size: "parameters" }),
  template: card(
    `<select v-model="size" aria-label="against"><option>parameters</option><option>FLOPs</option></select>`,
    `<p class="quiet">{{ twin ? 'Validation loss of the twin minus that of the network, epoch by epoch.' : 'Fall of the validation loss since the first epoch. With --twin it is compared with a network that never grows.' }}</p>`,
  ),
  computed: { title() { return `gain against ${this.size}`; } },
  created() {
    this.names = ["epoch_ended/val_loss", "epoch_ended/parameters", "epoch_ended/flops"];
    this.store.want(this.run, this.names);
    if (this.twin) this.store.want(this.twin, this.names.slice(0, 1));
  },
  beforeUnmount() {
    this.store.release(this.run, this.names);
    if (this.twin) this.store.release(this.twin, this.names.slice(0, 1));
  },
  watch: { version() { this.draw(); }, size() { this.draw(); } },
  methods: {
    drawNow() {
      const losses = this.store.get(this.run, this.names[0]);
      const sizes = this.store.get(this.run, this.names[this.size === "parameters" ? 1 : 2]);
      const twin = this.twin && this.store.get(this.twin, this.names[0]);
      const rows = (losses?.values ?? []).map((loss, index) => {
        const before = this.twin ? (twin ? at(twin.steps, twin.values, losses.steps[index], { isOpen: false }) : null) : losses.values[0];
        return [at(sizes?.steps ?? [], sizes?.values ?? [], losses.steps[index]), before === null || loss === null ? null : before - loss];
      });
      const gains = smooth(rows.map((row) => row[1]), this.controls.smoothing);
      const points = rows.map((row, index) => [row[0], gains[index]]).filter((point) => point[0] !== null && point[1] !== null);
      this.isEmpty = !points.length;
      const lines = points.length ? [{ label: this.twin ? "gain over the twin" : "fall of the loss", color: PALETTE[2], dots: true, points }] : [];
      this.chart.title = this.title;
      this.chart.draw(lines, { isDark: this.isDark, isLog: this.isLog, xName: this.size === "parameters" ? "parameters" : "FLOPs of a forward pass" });
    },
  },
};

// Predicted against achieved return, with the line on which both are equal.
export const CalibrationChart = {
  mixins: [drawn],
  props: ["calibration", "controls", "isDark"],
  template: card("", `<p class="quiet">Mean discounted return of the steps that the critic gave about the same value, with its 95 % interval; the last {{ calibration.updates }} updates. On the dashed line the critic is right.</p>`),
  computed: { title() { return "calibration of the critic"; } },
  watch: { calibration() { this.draw(); } },
  methods: {
    drawNow() {
      const rows = this.calibration.points;
      this.isEmpty = !rows.length;
      const ends = rows.length ? [rows[0].predicted, rows.at(-1).predicted] : [];
      const lines = [
        { label: "achieved", color: PALETTE[0], dots: true, points: rows.map((row) => [row.predicted, row.achieved]), band: rows.map((row) => [row.predicted, row.low, row.high]) },
        { label: "as predicted", color: PALETTE[7], dashed: true, points: ends.map((end) => [end, end]) },
      ];
      this.chart.draw(rows.length ? lines : [], { isDark: this.isDark, isLog: this.isLog, xName: "predicted return" });
    },
  },
};

// The hosts of one round as small curves; a click opens the life of one.
export const HostLives = {
  props: ["id", "rounds"],
  data: () => ({ chosen: null, lives: [], opened: null, isLoading: false }),
  template: `
<section class="card hosts">
  <header><h3>hosts of round {{ round }}</h3><span class="spacer"></span>
    <label v-if="rounds.length > 1">round <select :value="round" @change="choose(Number($event.target.value))" aria-label="round"><option v-for="number in rounds" :key="number" :value="number">{{ number }}{{ number === rounds.at(-1) ? ', the newest' : '' }}</option></select></label></header>
  <p v-if="!rounds.length" class="quiet">The first round is under way. Its hosts appear here when they have reached their horizon.</p>
  <p v-else class="quiet">Validation loss of each host (solid) beside its twin, which never grows (dashed). Dots: a seed grew (light blue), was kept (green) or pruned (orange).</p>
  <div class="lives">
    <button v-for="(life, index) in lives" :key="index" type="button" class="life-card" :class="{ 'is-on': opened === index }" :aria-expanded="opened === index" :data-host="life.env" @click="opened = opened === index ? null : index">
      <span v-html="small(life)"></span>
      <small>{{ life.rent_level }} rent · {{ life.kept }}/{{ life.grown }} kept</small>
      <b :class="{ 'is-good': life.utility > 0, 'is-bad': life.utility < 0 }">{{ life.utility > 0 ? '+' : '' }}{{ format(life.utility, 2) }}</b>
    </button>
  </div>
  <div v-if="life" class="detail" data-life>
    <h4>host {{ life.env }}: {{ life.task }}, {{ life.host }}, {{ life.rent_level }} rent ({{ format(life.rent_parameters, 2) }})</h4>
    <p>utility {{ format(life.utility) }} = gain over the twin {{ format(life.gain) }} − rent {{ format(life.rent) }} · {{ life.rollbacks }} rollbacks · last loss {{ format(life.val_losses.at(-1)) }}, twin {{ format(life.twin_losses.at(-1)) }}</p>
    <p v-if="!life.seeds.length" class="quiet">The controller grew nothing in this host.</p>
    <div v-else class="scroll" v-html="timeline(life)"></div>
    <ol class="log"><template v-for="seed in life.seeds" :key="seed.number"><li v-for="(entry, index) in seed.stages" :key="index"><b>seed {{ seed.number }}, segment {{ entry.epoch }}: {{ stages[entry.stage]?.word ?? entry.stage }}</b> {{ seed.blueprint }} after {{ seed.slot }}: {{ entry.reason }}</li></template></ol>
  </div>
</section>`,
  created() {
    Object.assign(this, { format, stages: STAGES, small: lifeSvg, timeline: (life) => timelineSvg(life.seeds, Math.max(life.horizon, 1)) });
    this.load();
  },
  computed: {
    round() { return this.chosen ?? this.rounds.at(-1); },
    life() { return this.opened === null ? null : this.lives[this.opened] ?? null; },
  },
  watch: { round() { this.load(); } },
  methods: {
    choose(round) {
      this.chosen = round === this.rounds.at(-1) ? null : round;
      this.opened = null;
    },
    async load() {
      if (this.round === undefined) return;
      const response = await fetch(`/api/runs/${this.id}/hosts/${this.round}`);
      if (response.ok) this.lives = await response.json();
    },
  },
};
