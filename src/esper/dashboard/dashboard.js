// The dashboard: a table of runs, a page for each run by its kind, and a comparison. Everything is asked for again every half second.

import { LineChart, PALETTE, SeriesStore, STAGES, format, networkSvg, smooth, sparkline, timelineSvg } from "esper-watch";

const EVERY_MS = 500;
const OVERVIEW_MS = 2000;
const AXES = { step: "step", time: "hours", samples: "samples", flops: "GFLOPs" };
const STATES = { running: "running", finished: "finished", stopped: "stopped", dead: "dead", empty: "no events yet" };

// The charts of each kind of run: [title, series]. Series that end in / stand for all that begin so.
const CHARTS = {
  growth: [
    ["loss", ["epoch_ended/train_loss", "epoch_ended/val_loss"]],
    ["metrics", ["epoch_ended/metrics/"]],
    ["parameters", ["epoch_ended/parameters"]],
    ["FLOPs of a forward pass", ["epoch_ended/flops"]],
    ["learning rate", ["epoch_ended/learning_rate"]],
  ],
  ppo: [
    ["return", ["update/mean_return", "checkpoint_evaluated/mean_return"]],
    ["episode length", ["update/mean_length"]],
    ["losses", ["update/policy_loss", "update/value_loss"]],
    ["entropy by head", ["update/entropy/"]],
    ["KL divergence", ["update/total_kl", "update/kl/"]],
    ["explained variance", ["update/explained_variance"]],
    ["clipped share", ["update/clip_fraction"]],
    ["gradient norm", ["update/grad_norm"]],
  ],
};
CHARTS.arena = [["win rate", ["round_fought/win_rate/"]], ["checkpoints: score against the anchor", ["checkpoint_evaluated/mean_return"]], ["parts of the reward", ["round_fought/reward/"]], ...CHARTS.ppo.slice(2)];
CHARTS.controller = [["utility of a round", ["round_ended/utility"]], ["gain and rent", ["round_ended/gain", "round_ended/rent"]], ["seeds grown and kept", ["round_ended/grown", "round_ended/kept"]], ["parts of the reward", ["round_ended/reward/"]], ...CHARTS.ppo.slice(2)];
const SYSTEM = {
  growth: [["samples per second", ["epoch_ended/samples_per_second"]], ["seconds per step", ["epoch_ended/step_seconds"]], ["wait for data, seconds per epoch", ["epoch_ended/data_wait_seconds"]]],
  ppo: [["steps per second", ["update/steps_per_second"]], ["seconds of an update", ["update/collect_seconds", "update/update_seconds", "update/env_seconds", "update/other_seconds"]]],
};
SYSTEM.arena = SYSTEM.ppo;
SYSTEM.controller = [...SYSTEM.ppo, ["memory per host, bytes", ["round_ended/memory_per_host"]]];

// One chart. `lines` is [{run: {id, twin}, name, label, color, dashed}].
const SeriesChart = {
  props: ["title", "lines", "store", "version", "controls", "isDark", "marks", "note"],
  data: () => ({ isLog: false, isEmpty: false }),
  template: `
<section class="card chart" :data-chart="title">
  <header><h3>{{ title }}</h3><span class="spacer"></span>
    <button type="button" class="tiny" :class="{ 'is-on': isLog }" :aria-pressed="isLog" @click="isLog = !isLog" title="logarithmic axis">log</button></header>
  <div class="plot" ref="plot" role="img" :aria-label="title"></div>
  <p v-if="isEmpty" class="quiet over">No values yet.</p>
  <p v-if="note" class="quiet">{{ note }}</p>
</section>`,
  mounted() {
    this.chart = new LineChart(this.$refs.plot);
    this.subscribed = [];
    this.subscribe();
    this.draw();
  },
  beforeUnmount() {
    this.unsubscribe();
    this.chart.close();
  },
  watch: {
    lines: { handler() { this.subscribe(); this.draw(); }, deep: true },
    version() { this.draw(); },
    controls: { handler() { this.draw(); }, deep: true },
    isDark() { this.draw(); },
    isLog() { this.draw(); },
    marks() { this.draw(); },
  },
  methods: {
    subscribe() {
      this.unsubscribe();
      this.subscribed = this.lines.flatMap((line) => [[line.run, line.name], [line.run, "epoch_ended/total_gflops"], [line.run, "epoch_ended/samples_per_second"], [line.run, "epoch_ended/seconds"]].slice(0, line.name.startsWith("epoch_ended/") ? 4 : 1));
      for (const [run, name] of this.subscribed) this.store.want(run, [name]);
    },
    unsubscribe() {
      for (const [run, name] of this.subscribed) this.store.release(run, [name]);
      this.subscribed = [];
    },
    // The position of every point on the chosen axis.
    places(line, series) {
      if (this.controls.axis === "time") return series.times.map((time) => (time - series.times[0]) / 3600);
      if (this.controls.axis === "flops") {
        const flops = this.store.get(line.run, "epoch_ended/total_gflops");
        if (flops?.values.length === series.values.length) return flops.values;
      }
      if (this.controls.axis === "samples") {
        const [rates, seconds] = ["samples_per_second", "seconds"].map((name) => this.store.get(line.run, `epoch_ended/${name}`));
        if (rates?.values.length === series.values.length) {
          let sum = 0;
          return rates.values.map((rate, index) => (sum += rate * (seconds?.values[index] ?? 0)));
        }
      }
      return series.steps;
    },
    draw() {
      const drawn = [];
      for (const line of this.lines) {
        const series = this.store.get(line.run, line.name);
        if (!series?.values.length) continue;
        const places = this.places(line, series);
        const values = smooth(series.values, this.controls.smoothing);
        drawn.push({ ...line, points: values.map((value, index) => [places[index], value]).filter((point) => point[1] !== null) });
      }
      this.isEmpty = !drawn.length;
      const marks = this.controls.axis === "step" ? this.marks ?? [] : [];
      this.chart?.draw(drawn, { isDark: this.isDark, isLog: this.isLog, xName: AXES[this.controls.axis], marks });
    },
  },
};

const template = `
<div class="esper-watch" :class="isDark ? 'is-dark' : 'is-light'">
  <header class="top">
    <a class="brand" href="#/" aria-label="all runs">⬡ esper</a>
    <a v-if="route.page !== 'runs'" href="#/" class="crumb">runs</a>
    <span v-if="route.page === 'run' && page" class="crumb" data-title>{{ page.summary.name }}</span>
    <span v-if="route.page === 'compare'" class="crumb">comparison</span>
    <span class="spacer"></span>
    <span v-if="problem" class="problem" role="alert">{{ problem }}</span>
    <template v-if="route.page !== 'runs'">
      <label>axis <select v-model="controls.axis" aria-label="axis"><option v-for="(word, key) in axes" :key="key" :value="key">{{ key }}</option></select></label>
      <label class="slide">smoothing <input type="range" min="0" max="0.99" step="0.01" v-model.number="controls.smoothing" aria-label="smoothing"></label>
    </template>
    <button type="button" class="tiny" @click="toggleDark" :title="isDark ? 'light' : 'dark'" aria-label="light or dark">{{ isDark ? '☀' : '☾' }}</button>
    <button type="button" class="tiny" @click="showsHelp = !showsHelp" aria-label="keys">?</button>
  </header>

  <div v-if="showsHelp" class="help card" role="dialog" aria-label="keys">
    <p><kbd>/</kbd> filter · <kbd>j</kbd> <kbd>k</kbd> next and previous run · <kbd>Enter</kbd> open · <kbd>x</kbd> choose for a comparison · <kbd>c</kbd> compare · <kbd>r</kbd> all runs · <kbd>d</kbd> light or dark · <kbd>?</kbd> this help</p>
  </div>

  <main v-if="route.page === 'runs'">
    <div class="bar">
      <input ref="filter" v-model="filter" type="search" placeholder="filter by name, kind, state or tag" aria-label="filter" @keydown.esc="$event.target.blur()">
      <span class="quiet" data-count>{{ shownRuns.length }} of {{ runs.length }} runs in {{ root }}</span>
      <span class="spacer"></span>
      <a v-if="chosen.length > 1" class="button" :href="'#/compare/' + chosen.join(',')">compare {{ chosen.length }}</a>
    </div>
    <p v-if="!isLoaded" class="empty">Reading the runs … <progress :value="loading" max="1"></progress></p>
    <div v-else-if="!runs.length" class="empty">
      <p>There are no runs in <b>{{ root }}</b> yet. Start one, and it appears here:</p>
      <pre>esper grow --task digits --twin\nesper ppo train cue</pre>
      <p>Runs elsewhere: <code>esper watch FOLDER</code></p>
    </div>
    <p v-else-if="!shownRuns.length" class="empty">No run matches “{{ filter }}”. Clear the filter to see all {{ runs.length }}.</p>
    <table v-else class="runs card">
      <thead><tr><th></th><th>run</th><th>kind</th><th>state</th><th>progress</th><th class="number">last</th><th class="number">best</th><th class="wide">curve</th><th class="wide">sign of life</th><th class="wide">tags</th></tr></thead>
      <tbody>
        <tr v-for="(run, index) in shownRuns" :key="run.id" :class="{ 'is-here': index === here }" :data-run="run.name" @click="open(run.id)">
          <td @click.stop><input type="checkbox" :value="run.id" v-model="chosen" :aria-label="'choose ' + run.name"></td>
          <td><a :href="'#/runs/' + run.id" @click.stop>{{ run.name }}</a></td>
          <td>{{ run.kind }}</td>
          <td><span class="state" :class="'is-' + run.state">{{ states[run.state] }}</span></td>
          <td><span v-if="run.progress !== null" class="progress"><i :style="{ width: 100 * run.progress + '%' }"></i></span> <small>{{ run.progress === null ? '' : Math.floor(100 * run.progress) + ' %' }}</small></td>
          <td class="number" data-last>{{ format(run.last) }}</td>
          <td class="number" :title="run.figure">{{ format(run.best) }} <small>{{ run.figure }}</small></td>
          <td class="wide spark" v-html="sparkline(run.spark)"></td>
          <td class="wide"><small>{{ ago(run.touched) }}</small></td>
          <td class="wide"><span v-for="tag in run.tags" :key="tag" class="tag">{{ tag }}</span></td>
        </tr>
      </tbody>
    </table>
  </main>

  <main v-else-if="route.page === 'run'">
    <p v-if="!page" class="empty">{{ problem ? 'This run cannot be shown. It may have been removed.' : 'Reading the run …' }}</p>
    <template v-else>
      <div class="figures">
        <div class="figure"><small>state</small><b><span class="state" :class="'is-' + page.summary.state">{{ states[page.summary.state] }}</span></b></div>
        <div class="figure"><small>progress</small><b data-progress>{{ page.summary.progress === null ? '–' : Math.floor(100 * page.summary.progress) + ' %' }}</b></div>
        <div class="figure"><small>{{ page.summary.figure }}, last</small><b data-last>{{ format(page.summary.last) }}</b></div>
        <div class="figure"><small>{{ page.summary.figure }}, best</small><b data-best>{{ format(page.summary.best) }}</b></div>
        <template v-if="growth">
          <div v-if="growth.compared" class="figure"><small>accuracy against the twin</small><b data-twin>{{ points(growth.compared.accuracy_difference) }}</b><small>[{{ points(growth.compared.low) }}, {{ points(growth.compared.high) }}]</small></div>
          <div class="figure"><small>seeds kept</small><b data-kept>{{ growth.seeds.filter((seed) => seed.outcome === 'kept').length }} of {{ growth.seeds.length }}</b></div>
          <div class="figure"><small>parameters</small><b data-parameters>{{ format(latestParameters) }}</b><small>host {{ format(growth.started.parameters) }}</small></div>
        </template>
        <div v-for="tag in page.summary.tags" :key="tag" class="tag">{{ tag }}</div>
      </div>
      <p v-if="page.summary.note" class="quiet">{{ page.summary.note }}</p>
      <p v-if="page.summary.state === 'dead'" class="warning" role="alert">Its process gave no sign of life for {{ ago(page.summary.touched) }}. It was killed, or hangs. Continue it with --resume.</p>
      <p v-if="page.skipped" class="warning">{{ page.skipped }} lines of its log could not be read.</p>

      <section v-if="growth" class="card">
        <header><h3>network</h3><span class="spacer"></span><span class="legend"><span v-for="(stage, name) in legend" :key="name"><i :style="{ background: stage.color }"></i>{{ stage.word }}</span></span></header>
        <div class="scroll" @click="clickedNetwork" @keydown.enter="clickedNetwork" v-html="networkSvg(growth.slots, growth.started.parameters)"></div>
        <p class="quiet">A seed is a branch around its slot: as wide as it has weights, filled up to its alpha. Above it: what removing it now would cost, with its interval.</p>
      </section>

      <section v-if="growth && growth.seeds.length" class="card">
        <header><h3>lives of the seeds</h3></header>
        <div class="scroll" @click="clickedLife" @keydown.enter="clickedLife" v-html="timelineSvg(growth.seeds, Math.max(page.summary.step, 1))"></div>
        <div v-if="seed" class="detail" data-detail>
          <h4>seed {{ seed.number }}: {{ seed.blueprint }} after {{ seed.slot }}, {{ seed.outcome }}</h4>
          <ol><li v-for="(entry, index) in seed.stages" :key="index"><b>epoch {{ entry.epoch }}: {{ stages[entry.stage]?.word ?? entry.stage }}</b> {{ entry.reason }}</li></ol>
          <p v-for="(row, index) in seed.contributions.slice(-3)" :key="index" class="quiet">epoch {{ row.epoch }}: costs {{ format(row.gain) }} [{{ format(row.gain_low) }}, {{ format(row.gain_high) }}] if removed; rent {{ format(row.rent) }}</p>
        </div>
      </section>

      <section v-if="page.health && page.health.length" class="card">
        <header><h3>health of the learner</h3></header>
        <ul class="lights"><li v-for="light in page.health" :key="light.name"><i :class="'is-' + light.colour" :aria-label="light.colour"></i><b>{{ light.name }}</b> <span class="number">{{ format(light.value) }}</span> <small>{{ light.advice }}</small></li></ul>
      </section>

      <div class="grid">
        <series-chart v-for="chart in charts" :key="chart.title" :title="chart.title" :lines="chart.lines" :store="store" :version="version" :controls="controls" :is-dark="isDark" :marks="chart.marks" />
      </div>

      <section v-if="growth && growth.seeds.length" class="card">
        <header><h3>ledger</h3></header>
        <div class="scroll"><table><thead><tr><th>seed</th><th>slot</th><th>blueprint</th><th>born</th><th>outcome</th><th class="number">weights</th><th class="number">costs if removed</th><th class="number">rent</th><th>reason</th></tr></thead>
        <tbody><tr v-for="row in growth.seeds" :key="row.number" :data-ledger="row.number"><td>{{ row.number }}</td><td>{{ row.slot }}</td><td>{{ row.blueprint }}</td><td>{{ row.born }}</td><td>{{ row.outcome }}</td><td class="number">{{ format(row.parameters) }}</td>
          <td class="number">{{ row.contributions.length ? format(row.contributions.at(-1).gain) + ' [' + format(row.contributions.at(-1).gain_low) + ', ' + format(row.contributions.at(-1).gain_high) + ']' : '–' }}</td><td class="number">{{ format(row.rent) }}</td><td>{{ row.stages.at(-1)?.reason }}</td></tr></tbody></table></div>
      </section>

      <section v-if="growth && growth.probe" class="card">
        <header><h3>last probe, epoch {{ growth.probe.epoch }}</h3></header>
        <div class="scroll"><table><thead><tr><th>slot</th><th v-for="name in probed" :key="name" class="number">{{ name }}</th></tr></thead>
        <tbody><tr v-for="(row, slot) in growth.probe.estimates" :key="slot"><td>{{ slot }}</td><td v-for="name in probed" :key="name" class="number">{{ format(row[name], 3) }}</td></tr></tbody></table></div>
        <p class="quiet">Estimated fall of the loss per step, if the candidate grew.</p>
      </section>

      <section v-if="growth && growth.decisions.length" class="card">
        <header><h3>decisions</h3></header>
        <ol class="log"><li v-for="(row, index) in growth.decisions.slice().reverse()" :key="index"><b>epoch {{ row.epoch }}</b> {{ row.text }}</li></ol>
      </section>

      <section v-if="growth && growth.rollbacks.length" class="card">
        <header><h3>governor</h3></header>
        <ol class="log"><li v-for="(row, index) in growth.rollbacks" :key="index"><b>epoch {{ row.epoch }}</b> went back to epoch {{ row.to_epoch }} and lost {{ row.epoch - row.to_epoch }} epochs: {{ row.reason }}</li></ol>
      </section>

      <section v-if="page.blueprints && page.blueprints.length" class="card">
        <header><h3>blueprints</h3></header>
        <div class="scroll"><table><thead><tr><th>blueprint</th><th class="number">tried</th><th class="number">kept</th><th class="number">pruned</th><th class="number">gain, nats</th><th class="number">weights</th></tr></thead>
        <tbody><tr v-for="row in page.blueprints" :key="row.blueprint"><td>{{ row.blueprint }}</td><td class="number">{{ row.tried }}</td><td class="number">{{ row.kept }}</td><td class="number">{{ row.pruned }}</td><td class="number">{{ format(row.gain) }}</td><td class="number">{{ format(row.parameters) }}</td></tr></tbody></table></div>
      </section>

      <section v-if="page.replays" class="card">
        <header><h3>replays</h3></header>
        <p v-if="page.replays.length"><a class="button" :href="'/?replays=' + page.id" target="_blank">play {{ page.replays.length === 1 ? 'the replay' : 'the ' + page.replays.length + ' replays' }}</a></p>
        <p v-else class="quiet">There are none yet. Record some with: esper arena eval {{ page.summary.folder }} --replays 2</p>
        <ol v-if="page.league.length" class="log"><li v-for="(row, index) in page.league.slice().reverse()" :key="index"><b>{{ row.name }}</b> {{ row.is_promoted ? 'entered the league' : 'did not enter' }}: {{ row.reason }}</li></ol>
      </section>

      <section v-if="page.problems.length" class="card">
        <header><h3>warnings</h3></header>
        <ol class="log"><li v-for="(row, index) in page.problems" :key="index"><b>{{ row.kind.replaceAll('_', ' ') }}</b> {{ described(row) }}</li></ol>
      </section>

      <details class="card"><summary>any series</summary>
        <p><select v-model="own" aria-label="series"><option value="">choose a series</option><option v-for="name in page.series" :key="name" :value="name">{{ name }}</option></select></p>
        <series-chart v-if="own" :key="own" :title="own" :lines="[{ run: { id: page.id }, name: own, label: own, color: palette[0] }]" :store="store" :version="version" :controls="controls" :is-dark="isDark" />
      </details>
      <details class="card"><summary>settings</summary><pre>{{ settings }}</pre></details>
    </template>
  </main>

  <main v-else>
    <p v-if="compared && compared.runs.length < 2" class="empty">Choose at least two runs in <a href="#/">the table</a>.</p>
    <template v-else-if="compared">
      <div class="figures"><div v-for="(run, index) in compared.runs" :key="run.id" class="figure"><small><i class="dot" :style="{ background: palette[index % palette.length] }"></i>{{ run.name }}</small><b>{{ format(run.best) }}</b><small>{{ run.figure }}, best</small></div></div>
      <p v-if="compared.runs.length > 2"><label><input type="checkbox" v-model="bySetting"> group runs that differ only in their seed</label></p>
      <div class="grid"><series-chart v-for="name in compareNames" :key="name" :title="name" :lines="compareLines(name)" :store="store" :version="version" :controls="controls" :is-dark="isDark" /></div>
      <section v-if="differences.length" class="card" data-differences><header><h3>differences over seeds: {{ compared.over_seeds.figure }}</h3></header>
        <ul class="log"><li v-for="(row, index) in differences" :key="index"><b>{{ row.name }}</b> {{ row.text }}</li></ul>
        <p class="quiet">Mean of the differences between runs of equal seeds, with its 95 % interval. One run counts as one sample.</p></section>
      <section class="card"><header><h3>settings that differ</h3></header>
        <p v-if="!Object.keys(compared.settings).length" class="quiet">All settings are the same.</p>
        <div v-else class="scroll"><table><thead><tr><th>setting</th><th v-for="run in compared.runs" :key="run.id">{{ run.name }}</th></tr></thead>
        <tbody><tr v-for="(row, name) in compared.settings" :key="name"><td>{{ name }}</td><td v-for="run in compared.runs" :key="run.id">{{ row[run.id] ?? '–' }}</td></tr></tbody></table></div></section>
      <details class="card"><summary>any series that all have</summary><p><select v-model="own" aria-label="series"><option value="">choose a series</option><option v-for="name in compared.series" :key="name" :value="name">{{ name }}</option></select></p>
        <series-chart v-if="own" :key="own" :title="own" :lines="compareLines(own)" :store="store" :version="version" :controls="controls" :is-dark="isDark" /></details>
    </template>
  </main>
</div>`;

export default {
  template,
  components: { SeriesChart },
  data: () => ({
    route: { page: "runs" },
    runs: [],
    root: "",
    now: Date.now() / 1000,
    isLoaded: false,
    loading: 0,
    filter: "",
    here: 0,
    chosen: [],
    page: null,
    compared: null,
    bySetting: false,
    seedNumber: null,
    own: "",
    version: 0,
    problem: "",
    showsHelp: false,
    controls: { axis: "step", smoothing: 0 },
    isDark: false,
  }),
  created() {
    this.store = new SeriesStore();
    this.axes = AXES;
    this.states = STATES;
    this.stages = STAGES;
    this.palette = PALETTE;
    this.legend = Object.fromEntries(Object.entries(STAGES).filter(([name]) => ["TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "EMBARGOED"].includes(name)));
    Object.assign(this, { format, sparkline, networkSvg, timelineSvg });
  },
  mounted() {
    const kept = localStorage.getItem("esper-dark");
    this.isDark = kept === null ? matchMedia("(prefers-color-scheme: dark)").matches : kept === "1";
    this.onHash = () => this.go();
    this.onKey = (event) => this.press(event);
    addEventListener("hashchange", this.onHash);
    addEventListener("keydown", this.onKey);
    this.go();
    this.tick();
  },
  beforeUnmount() {
    removeEventListener("hashchange", this.onHash);
    removeEventListener("keydown", this.onKey);
    clearTimeout(this.timer);
  },
  computed: {
    shownRuns() {
      const words = this.filter.toLowerCase().split(/\s+/).filter(Boolean);
      return this.runs.filter((run) => words.every((word) => [run.name, run.kind, run.state, run.note, ...run.tags].join(" ").toLowerCase().includes(word)));
    },
    growth() {
      return this.page?.growth ?? null;
    },
    seed() {
      return this.growth?.seeds.find((seed) => seed.number === this.seedNumber) ?? null;
    },
    probed() {
      return [...new Set(Object.values(this.growth?.probe?.estimates ?? {}).flatMap((row) => Object.keys(row)))];
    },
    latestParameters() {
      const seeds = this.growth.slots.reduce((sum, slot) => sum + (slot.blueprint ? slot.parameters ?? 0 : 0), 0);
      return (this.growth.started.parameters ?? 0) + seeds;
    },
    settings() {
      return JSON.stringify(this.page.config, null, 2);
    },
    charts() {
      const kind = this.page.summary.kind;
      const run = { id: this.page.id };
      const marks = (this.growth?.marks ?? []).map((mark) => ({ x: mark.epoch, what: mark.what, text: `${mark.blueprint} ${mark.what} ${mark.slot ? `after ${mark.slot}` : ""}`.trim() }));
      return [...CHARTS[kind], ...SYSTEM[kind]].map(([title, wanted]) => {
        const names = wanted.flatMap((name) => (name.endsWith("/") ? this.page.series.filter((other) => other.startsWith(name)) : [name])).filter((name) => this.page.series.includes(name));
        const labels = names.map((name) => label(name, wanted));
        const lines = names.map((name, index) => ({ run, name, label: labels.indexOf(labels[index]) === labels.lastIndexOf(labels[index]) ? labels[index] : name, color: PALETTE[index % PALETTE.length], dashed: false }));
        if (this.page.twin && title === "loss") lines.push({ run: { id: this.page.id, twin: true }, name: "epoch_ended/val_loss", label: "twin: val_loss", color: PALETTE[7], dashed: true });
        return { title, lines, marks: title === "loss" || title === "metrics" ? marks : [] };
      }).filter((chart) => chart.lines.length);
    },
    differences() {
      const found = this.compared?.over_seeds;
      return [...(found?.paired ?? []), ...(found?.twins ?? [])].map((pair) => {
        const interval = pair.interval ? `[${format(pair.interval.low)}, ${format(pair.interval.high)}]` : "(one seed gives no interval)";
        return { name: `${pair.ours} − ${pair.theirs}`, text: `${format(pair.estimate)} ${interval} over ${pair.seeds.length} ${pair.seeds.length === 1 ? "seed" : "seeds"}` };
      });
    },
    compareNames() {
      const kinds = [...new Set(this.compared.runs.map((run) => run.kind))];
      const wanted = (CHARTS[kinds[0]] ?? []).flatMap(([, names]) => names.slice(0, 2));
      return this.compared.series.filter((name) => wanted.includes(name)).slice(0, 6);
    },
  },
  methods: {
    async tick() {
      const began = performance.now();
      try {
        if (!document.hidden || !this.isLoaded) await this.refresh();
        this.problem = "";
      } catch (error) {
        this.problem = "the server does not answer; is esper watch still running?";
      }
      this.timer = setTimeout(() => this.tick(), Math.max(EVERY_MS - (performance.now() - began), 50));
    },
    async refresh() {
      this.now = Date.now() / 1000;
      if (this.route.page === "runs") {
        if (performance.now() - (this.asked ?? -Infinity) < OVERVIEW_MS) return;
        if (!this.isLoaded) this.watchLoading();
        const overview = await this.json("/api/overview");
        this.asked = performance.now();
        this.runs = overview.runs;
        this.root = overview.root;
        this.isLoaded = true;
        return;
      }
      if (this.route.page === "run") {
        const id = this.route.id;
        const page = await this.json(`/api/runs/${id}`);
        if (this.route.id === id && JSON.stringify(without(page)) !== JSON.stringify(without(this.page))) this.page = page;
      } else if (!this.compared || performance.now() - (this.asked ?? -Infinity) > OVERVIEW_MS) {
        const found = await this.json(`/api/compare?runs=${this.route.ids.join(",")}`);
        if (JSON.stringify(found) !== JSON.stringify(this.compared)) this.compared = found;
        this.asked = performance.now();
      }
      if (await this.store.refresh()) this.version += 1;
    },
    async watchLoading() {
      while (!this.isLoaded) {
        this.loading = (await this.json("/api/loading")).share;
        await new Promise((resolve) => setTimeout(resolve, 300));
      }
    },
    async json(path) {
      const response = await fetch(path);
      if (!response.ok) throw new Error(await response.text());
      return response.json();
    },
    go() {
      const [, place, rest] = location.hash.split("/");
      this.page = null;
      this.compared = null;
      this.own = "";
      this.seedNumber = null;
      this.asked = undefined;
      if (place === "runs" && rest) this.route = { page: "run", id: rest };
      else if (place === "compare") this.route = { page: "compare", ids: (rest ?? "").split(",") };
      else this.route = { page: "runs" };
    },
    open(id) {
      location.hash = `#/runs/${id}`;
    },
    press(event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (["INPUT", "SELECT", "TEXTAREA"].includes(event.target.tagName)) return;
      const run = this.shownRuns[this.here];
      const actions = {
        "/": () => this.$refs.filter?.focus(),
        j: () => (this.here = Math.min(this.here + 1, this.shownRuns.length - 1)),
        k: () => (this.here = Math.max(this.here - 1, 0)),
        Enter: () => this.route.page === "runs" && run && this.open(run.id),
        x: () => run && (this.chosen = this.chosen.includes(run.id) ? this.chosen.filter((id) => id !== run.id) : [...this.chosen, run.id]),
        c: () => this.chosen.length > 1 && (location.hash = `#/compare/${this.chosen.join(",")}`),
        r: () => (location.hash = "#/"),
        d: () => this.toggleDark(),
        "?": () => (this.showsHelp = !this.showsHelp),
        Escape: () => (this.showsHelp = false),
      };
      if (actions[event.key]) {
        event.preventDefault();
        actions[event.key]();
      }
    },
    toggleDark() {
      this.isDark = !this.isDark;
      localStorage.setItem("esper-dark", this.isDark ? "1" : "0");
    },
    ago(time) {
      const seconds = Math.max(this.now - time, 0);
      if (seconds < 10) return "just now";
      const [value, unit] = seconds < 120 ? [seconds, "s"] : seconds < 7200 ? [seconds / 60, "min"] : seconds < 172800 ? [seconds / 3600, "h"] : [seconds / 86400, "days"];
      return `${Math.round(value)} ${unit} ago`;
    },
    points(share) {
      return `${share >= 0 ? "+" : "−"}${(100 * Math.abs(share)).toFixed(1)} points`;
    },
    clickedNetwork(event) {
      const slot = event.target.closest("[data-slot]")?.dataset.slot;
      const found = this.growth.seeds.filter((seed) => seed.slot === slot).at(-1);
      if (found) this.seedNumber = found.number;
    },
    clickedLife(event) {
      const number = Number(event.target.closest("[data-seed]")?.dataset.seed);
      if (number) this.seedNumber = this.seedNumber === number ? null : number;
    },
    described(problem) {
      if (problem.words) return `step ${format(problem.step)}: ${problem.words}`;
      return Object.entries(problem).filter(([name, value]) => !["kind", "time", "step"].includes(name) && value !== "" && value !== null && typeof value !== "object").map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? format(value) : value}`).join(" · ");
    },
    compareLines(name) {
      // Runs of one setting share a colour: they differ in nothing but their seed.
      const isSeed = (setting) => /(^|\.)seed$/.test(setting);
      const keys = this.compared.runs.map((run) => JSON.stringify(Object.entries(this.compared.settings).filter(([setting]) => !isSeed(setting)).map(([setting, row]) => [setting, row[run.id]])));
      const groups = [...new Set(keys)];
      return this.compared.runs.map((run, index) => ({ run: { id: run.id }, name, label: run.name, color: PALETTE[(this.bySetting ? groups.indexOf(keys[index]) : index) % PALETTE.length], dashed: false }));
    },
  },
};

function label(name, wanted) {
  const prefix = wanted.find((other) => other.endsWith("/") && name.startsWith(other));
  return prefix ? name.slice(prefix.length) : name.split("/").slice(1).join("/");
}

// A page without what changes all the time, to see whether anything worth drawing has changed.
function without(page) {
  return page && { ...page, now: 0, summary: { ...page.summary, touched: page.summary.state === "running" ? 0 : page.summary.touched } };
}
