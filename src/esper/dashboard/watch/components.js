// Parts of the pages as Vue components: charts with their controls, and the hosts of a controller's training.

import { LineChart, at, meanOf, smooth } from "./chart.js";
import { STAGES, lifeSvg, timelineSvg } from "./drawing.js";
import { figure } from "./figures.js";

// Axis -> its name under a chart.
export const AXES = { step: "step", time: "hours", samples: "samples", flops: "GFLOPs" };

const PROGRESS = { samples: "@samples", flops: "@gflops" }; // series that the server computes: the amount so far, by step

// A chart of series. `lines` is [{run: {id, twin}, started, name, label, color, dashed, dots, siblings, axes, x}]. `siblings` are the same line
// of runs with other seeds, and `axes` are names of axes. With `x` = {column, name, isCourse} the chart has an axis of its own, a column of the
// series. Unless `isCourse`, its points do not follow one another in time. A line with `isDiagonal` joins the points where y equals x.
export const SeriesChart = {
  props: ["title", "lines", "store", "version", "controls", "isDark", "marks", "note", "choices", "choice", "mayBeLog"],
  emits: ["choose"],
  data: () => ({ isLog: null, isEmpty: false, hasLog: false }), // isLog null: by the values
  template: `
<section class="card chart" :data-chart="title">
  <header><h3>{{ title }}</h3><span class="spacer"></span>
    <select v-if="choices" :value="choice" @change="$emit('choose', $event.target.value)" :aria-label="title + ' by'"><option v-for="name in choices" :key="name">{{ name }}</option></select>
    <button type="button" class="tiny" :class="{ 'is-on': hasLog }" :aria-pressed="hasLog" @click="isLog = !hasLog" title="logarithmic axis">log</button></header>
  <div class="plot" ref="plot" role="img" :aria-label="title"></div>
  <p v-if="isEmpty" class="quiet over">No values yet.</p>
  <p v-if="note" class="quiet">{{ note }}</p>
</section>`,
  created() {
    this.subscribed = [];
    this.subscribe();
  },
  mounted() {
    this.chart = new LineChart(this.$refs.plot);
    this.draw();
  },
  beforeUnmount() {
    this.unsubscribe();
    cancelAnimationFrame(this.frame);
    this.chart.close();
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
    isDark() { this.draw(); },
    isLog() { this.draw(); },
    controls: { handler() { this.draw(); }, deep: true },
    "controls.bySeed"() { this.subscribe(); },
    "controls.axis"() { this.subscribe(); },
  },
  methods: {
    // At most once per frame.
    draw() {
      this.frame ??= requestAnimationFrame(() => {
        this.frame = null;
        this.drawNow();
      });
    },
    members(line) {
      return this.controls.bySeed && line.siblings?.length ? line.siblings : [line];
    },
    subscribe() {
      this.unsubscribe();
      const all = this.lines.filter((line) => line.name).flatMap((line) => this.members(line));
      this.subscribed = all.flatMap((line) => [line.name, ...(PROGRESS[this.controls.axis] && !line.x ? [PROGRESS[this.controls.axis]] : [])].map((name) => [line.run, name]));
      for (const [run, name] of this.subscribed) this.store.want(run, [name]);
    },
    unsubscribe() {
      for (const [run, name] of this.subscribed) this.store.release(run, [name]);
      this.subscribed = [];
    },
    // The places of steps on the chosen axis; null where the run does not tell them.
    places(line, steps, times) {
      const { axis } = this.controls; // read once: Vue takes its time
      if (axis === "step") return steps;
      if (axis === "time") return times.map((time) => (time === null ? null : (time - line.started) / 3600));
      const progress = this.store.get(line.run, PROGRESS[axis]);
      return times.map((time) => (progress?.values.length && time !== null ? at(progress.times, progress.values, time) : null));
    },
    // The points of one series with their interval, [x, low, high], and their steps; null if there are none.
    curve(line) {
      const series = this.store.get(line.run, line.name);
      if (!series?.values.length) return null;
      // The ends of an interval are smoothed as its middle is.
      const weight = line.x && !line.x.isCourse ? 0 : this.controls.smoothing;
      const [values, low, high] = ["values", "low", "high"].map((column) => series[column] && smooth(series[column], weight));
      // Fleets of one update end at the same step, so they are numbered instead.
      const steps = line.name.startsWith("round_ended/") ? series.steps.map((_, index) => index + 1) : series.steps;
      const places = series[line.x ? line.x.column : this.controls.axis] ?? this.places(line, steps, series.times);
      const curve = { points: [], band: [], steps: [] };
      for (let index = 0; index < values.length; index += 1) {
        if (places[index] === null || values[index] === null) continue;
        curve.points.push([places[index], values[index]]);
        curve.steps.push(steps[index]);
        if (low && low[index] !== null && high[index] !== null) curve.band.push([places[index], low[index], high[index]]);
      }
      return curve.points.length ? curve : null;
    },
    // The mean of the curves of several seeds. On an axis of sizes, which may fall, it is taken step by step.
    mean(line, curves) {
      if (!line.x?.isCourse) return meanOf(curves.map((curve) => curve.points));
      const [sizes, gains] = [0, 1].map((column) => meanOf(curves.map((curve) => curve.steps.map((step, index) => [step, curve.points[index][column]]))));
      return { points: gains.points.map((point, index) => [sizes.points[index][1], point[1]]), band: gains.band.map((row, index) => [sizes.points[index][1], row[1], row[2]]) };
    },
    drawNow() {
      const drawn = [];
      for (const line of this.lines.filter((line) => line.name)) {
        const curves = this.members(line).map((member) => this.curve(member)).filter(Boolean);
        const whole = curves.length > 1 ? this.mean(line, curves) : curves[0];
        // Curves that have no place in common have no mean, and are drawn one by one.
        if (whole?.points.length) drawn.push({ ...line, ...whole, seeds: curves.length });
        else drawn.push(...curves.map((curve, index) => ({ ...line, ...curve, label: `${line.label}, curve ${index + 1}` })));
      }
      for (const line of drawn.length ? this.lines.filter((line) => line.isDiagonal) : []) {
        const places = drawn.flatMap((other) => other.points.map((point) => point[0]));
        drawn.push({ ...line, points: [Math.min(...places), Math.max(...places)].map((end) => [end, end]) });
      }
      this.isEmpty = !drawn.length;
      // As in the report: logarithmic where that helps, which is where positive values differ by more than a factor of 5.
      const ys = this.isLog === null && this.mayBeLog ? drawn.flatMap((line) => line.points.map((point) => point[1])) : [];
      const [least, most] = ys.reduce(([low, high], y) => [Math.min(low, y), Math.max(high, y)], [Infinity, -Infinity]);
      this.hasLog = this.isLog ?? (least > 0 && most > 5 * least);
      const marks = (this.marks ?? []).map((mark) => ({ ...mark, x: this.places(this.lines[0], [mark.x], [this.timeOf(mark.x)])[0] })).filter((mark) => mark.x !== null);
      this.chart.title = this.title;
      this.chart.draw(drawn, { isDark: this.isDark, isLog: this.hasLog, xName: this.lines[0]?.x?.name ?? this.lines[0]?.axes?.[this.controls.axis] ?? AXES[this.controls.axis], marks });
    },
    timeOf(step) {
      const series = this.store.get(this.lines[0].run, this.lines[0].name);
      return series?.steps.length ? at(series.steps, series.times, step) : null;
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
  <p v-else class="quiet">Validation loss of each host (solid) beside its twin, the same host decided for as the policy is advised (dashed). Dots: a seed germinated (blue), was kept (green) or pruned (orange).</p>
  <div class="lives">
    <button v-for="(life, index) in lives" :key="index" type="button" class="life-card" :class="{ 'is-on': opened === index }" :aria-expanded="opened === index" :data-host="life.env" @click="opened = opened === index ? null : index">
      <span v-html="small(life)"></span>
      <small>{{ life.rent_level }} rent · {{ life.kept }}/{{ life.grown }} kept</small>
      <b :class="{ 'is-good': worth(life) > 0, 'is-bad': worth(life) < 0 }">{{ figure(worth(life), 4, '+') }}</b>
    </button>
  </div>
  <div v-if="life" class="detail" data-life>
    <h4>host {{ life.env }}: {{ life.task }}, {{ life.host }}, {{ life.rent_level }} rent ({{ figure(life.rent_parameters) }})</h4>
    <p>utility {{ figure(life.utility) }} = gain {{ figure(life.gain) }} − rent {{ figure(life.rent) }}, both in comparison with the twin · {{ life.rollbacks }} rollbacks · last loss {{ figure(life.val_losses.at(-1)) }}, twin {{ figure(life.twin_losses.at(-1)) }}</p>
    <p data-others>{{ life.others.length ? 'Not as advised: ' + life.others.join('; ') : 'Decided as advised' }}.</p>
    <p v-if="!life.seeds.length" class="quiet">{{ life.grown ? 'The log has no stages of its seeds.' : 'The controller grew nothing in this host.' }}</p>
    <div v-else class="scroll" v-html="timeline(life)"></div>
    <ol class="log"><template v-for="seed in life.seeds" :key="seed.number"><li v-for="(entry, index) in seed.stages" :key="index"><b>seed {{ seed.number }}, segment {{ entry.epoch }}: {{ stages[entry.stage] ?? entry.stage }}</b> {{ seed.blueprint }} after {{ seed.slot }}: {{ entry.reason }}</li></template></ol>
  </div>
</section>`,
  created() {
    const worth = (life) => life.utility === null ? null : Math.round(1e4 * life.utility) / 1e4; // lives that are decided alike may differ by their last bits
    Object.assign(this, { figure, worth, stages: STAGES, small: lifeSvg, timeline: (life) => timelineSvg(life.seeds, Math.max(life.horizon, 1)) });
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
