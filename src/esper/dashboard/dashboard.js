// The dashboard: a table of runs, a page for each run by its kind, and a comparison. A page is asked for again as soon as it has come.

import { AXES, HostLives, PALETTE, ReplayList, SeedAnalysis, SeriesChart, SeriesStore, STAGES, figure, networkSvg, percent, points, sparkline, timelineSvg, withInterval } from "esper-watch";

const EVERY_MS = 500;
const SHORT_MS = 300;
const COMPARE_MS = 2000;
const STATES = { running: "running", finished: "finished", stopped: "stopped", dead: "dead", empty: "no events yet" };
const GONE = "its folder is gone";

const template = `
<div class="esper-watch" :class="isDark ? 'is-dark' : 'is-light'">
  <header class="top">
    <a class="brand" href="#/" aria-label="all runs">⬡ esper</a>
    <a v-if="route.page !== 'runs'" href="#/" class="crumb">runs</a>
    <span v-if="route.page === 'run' && page" class="crumb" data-title>{{ page.summary.name }}</span>
    <span v-if="route.page === 'compare'" class="crumb">comparison</span>
    <span class="spacer"></span>
    <span v-if="problem && problem !== gone" class="problem" role="alert">{{ problem }}</span>
    <template v-if="route.page !== 'runs'">
      <label>axis <select v-model="controls.axis" aria-label="axis"><option v-for="(word, key) in axes" :key="key" :value="key">{{ key === 'flops' ? 'FLOPs' : key }}</option></select></label>
      <label class="slide">smoothing <input type="range" min="0" max="0.99" step="0.01" v-model.number="controls.smoothing" aria-label="smoothing"></label>
      <label v-if="canGroup"><input type="checkbox" v-model="controls.bySeed" aria-label="group by seed"> {{ route.page === 'run' ? 'mean of ' + page.seeds.length + ' seeds' : 'group by seed' }}</label>
    </template>
    <button type="button" class="tiny" @click="toggleDark" :title="isDark ? 'light' : 'dark'" aria-label="light or dark">{{ isDark ? '☀' : '☾' }}</button>
    <button type="button" class="tiny" @click="showsHelp = !showsHelp" aria-label="keys">?</button>
  </header>

  <div v-if="showsHelp" class="help card" role="dialog" aria-label="keys">
    <p><kbd>/</kbd> filter · <kbd>j</kbd> <kbd>k</kbd> next and previous run · <kbd>Enter</kbd> open · <kbd>x</kbd> choose for a comparison · <kbd>c</kbd> compare · <kbd>r</kbd> all runs · <kbd>a</kbd> next axis · <kbd>s</kbd> group by seed · <kbd>d</kbd> light or dark · <kbd>?</kbd> this help</p>
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
      <thead><tr><th></th><th>run</th><th>kind</th><th>state</th><th>progress</th><th class="number">last</th><th class="number wide">best</th><th class="wide">curve</th><th class="wide">sign of life</th><th class="wide">tags</th></tr></thead>
      <tbody>
        <tr v-for="(run, index) in shownRuns" :key="run.id" :class="{ 'is-here': index === here }" :data-run="run.name" @click="open(run.id)">
          <td @click.stop><input type="checkbox" :value="run.id" v-model="chosen" :aria-label="'choose ' + run.name"></td>
          <td><a :href="'#/runs/' + run.id" @click.stop>{{ run.name }}</a></td>
          <td>{{ run.kind }}</td>
          <td><span class="state" :class="'is-' + run.state">{{ states[run.state] }}</span></td>
          <td data-progress><span v-if="run.progress !== null" class="progress"><i :style="{ width: 100 * run.progress + '%' }"></i></span> <small>{{ run.progress === null ? '' : Math.floor(100 * run.progress) + '%' }}</small></td>
          <td class="number" data-last>{{ figure(run.last) }}</td>
          <td class="number wide" data-best :title="run.figure">{{ figure(run.best) }} <small>{{ run.figure }}</small></td>
          <td class="wide spark" v-html="sparkline(run.spark)"></td>
          <td class="wide"><small>{{ ago(run.touched) }}</small></td>
          <td class="wide"><button v-for="tag in run.tags" :key="tag" type="button" class="tag" :title="'show runs with ' + tag" @click.stop="filter = tag">{{ tag }}</button></td>
        </tr>
      </tbody>
    </table>
  </main>

  <main v-else-if="route.page === 'run'">
    <div v-if="!page" class="empty">
      <p v-if="problem === gone" role="alert">There is no such run any more: its folder was moved or removed. See <a href="#/">all runs</a>.</p>
      <p v-else-if="problem">{{ problem }}</p>
      <p v-else>Reading the run … <progress v-if="loading < 1" :value="loading" max="1"></progress></p>
    </div>
    <template v-else>
      <div class="figures">
        <div class="figure"><small>state</small><b><span class="state" :class="'is-' + page.summary.state">{{ states[page.summary.state] }}</span></b></div>
        <div class="figure"><small>progress</small><b data-progress>{{ page.summary.progress === null ? '–' : Math.floor(100 * page.summary.progress) + '%' }}</b></div>
        <div class="figure"><small>{{ page.summary.figure }}, last</small><b data-last>{{ figure(page.summary.last) }}</b></div>
        <div class="figure"><small>{{ page.summary.figure }}, best</small><b data-best>{{ figure(page.summary.best) }}</b></div>
        <template v-if="growth">
          <div v-if="growth.difference !== null" class="figure"><small>validation loss against the twin</small><b data-difference>{{ figure(growth.difference, 4, '+') }}</b></div>
          <div v-if="growth.compared" class="figure"><small>test accuracy against the twin</small><b data-twin>{{ points(growth.compared.accuracy_difference, growth.compared.low, growth.compared.high) }}</b></div>
          <div class="figure"><small>seeds kept</small><b data-kept>{{ growth.seeds.filter((seed) => seed.outcome === 'kept').length }} of {{ growth.seeds.length }}</b></div>
          <div class="figure"><small>parameters</small><b data-parameters>{{ figure(growth.parameters) }}</b><small>host {{ figure(growth.started.parameters) }}</small></div>
        </template>
        <div v-for="tag in page.summary.tags" :key="tag" class="tag">{{ tag }}</div>
      </div>
      <p v-if="page.summary.note" class="quiet">{{ page.summary.note }}</p>
      <p v-if="page.summary.state === 'dead'" class="warning" role="alert">The last sign of life of its process was {{ ago(page.summary.touched) }}. It was killed, or hangs. Give its command the option --resume to continue it.</p>
      <p v-if="problem === gone" class="warning" role="alert">The folder of this run was moved or removed. These are the last figures from it. See <a href="#/">all runs</a>.</p>
      <p v-if="page.skipped" class="warning" role="alert">{{ page.skipped === 1 ? 'One line of its log is' : page.skipped + ' lines of its log are' }} damaged and left out, as after a full disk or a crash. All others are shown.</p>
      <p v-if="page.unread" class="warning" role="alert" data-unread>{{ page.unread }}</p>
      <p v-if="page.missing" class="notice" data-missing>{{ page.missing }}</p>
      <p v-if="page.summary.state === 'empty' && !page.unread" class="empty">It has written no events yet. Its training is about to start; if this stays so, look into the terminal where it was started.</p>
      <p v-else-if="growth && growth.started.note" class="quiet">{{ growth.started.note }}</p>

      <div v-if="growth" class="grid">
        <series-chart v-for="chart in charts.slice(0, first)" :key="chart.title" :title="chart.title" :lines="chart.lines" :may-be-log="chart.mayBeLog" :store="store" :version="version" :controls="controls" :is-dark="isDark" :marks="chart.marks" />
      </div>

      <section v-if="growth" class="card">
        <header><h3>network</h3><span class="spacer"></span><span class="legend"><span v-for="name in legend" :key="name"><i :style="{ background: 'var(--' + name.toLowerCase() + ')' }"></i>{{ stages[name] }}</span></span></header>
        <div class="scroll" @click="clickedNetwork" @keydown.enter="clickedNetwork" v-html="networkSvg(growth.slots, growth.started.parameters)"></div>
        <p class="quiet">A seed that adds depth is a branch around its slot, one that adds width makes its module taller. Both are filled up to their alpha. Cost of removal: the rise of the validation loss if the seed were switched off now.</p>
      </section>

      <section v-if="growth && growth.seeds.length" class="card">
        <header><h3>lives of the seeds</h3></header>
        <div class="scroll" @click="clickedLife" @keydown.enter="clickedLife" v-html="timelineSvg(growth.seeds, Math.max(page.summary.step, 1))"></div>
        <div v-if="seed" class="detail" data-detail>
          <h4>seed {{ seed.number }}: {{ seed.blueprint }} after {{ seed.slot }}, {{ seed.outcome }}</h4>
          <ol><li v-for="(entry, index) in seed.stages" :key="index"><b>epoch {{ entry.epoch }}: {{ stages[entry.stage] ?? entry.stage }}</b> {{ entry.reason }}</li></ol>
          <p v-for="(row, index) in seed.contributions.slice(-3)" :key="index" class="quiet">epoch {{ row.epoch }}: cost of removal {{ withInterval(row.gain, row.gain_low, row.gain_high) }}, rent {{ figure(row.rent) }}</p>
        </div>
      </section>

      <section v-if="page.health && page.health.length" class="card">
        <header><h3>health of the learner</h3></header>
        <ul class="lights"><li v-for="light in page.health" :key="light.name"><i :class="'is-' + light.colour" :aria-label="light.colour"></i><b>{{ light.name }}</b> <span class="number">{{ figure(light.value) }}</span> <small>{{ light.advice }}</small></li></ul>
      </section>

      <replay-list v-if="page.replays" :key="page.id" :run="page.id" :folder="page.summary.folder" :replays="page.replays" :is-training="page.summary.state === 'running'" :ago="ago" />

      <component :is="growth ? 'details' : 'div'" :class="growth ? 'card' : ''"><summary v-if="growth">size, learning rate and gain</summary><div class="grid">
        <series-chart v-if="page.controller && utilityLines.length" title="utility per round" :lines="utilityLines" :store="store" :version="version" :controls="controls" :is-dark="isDark" :choices="['rent', 'cell']" :choice="utilityBy" @choose="utilityBy = $event" note="Gain over the twin minus the rent beyond the twin's, mean over hosts, with the 95 % interval over groups of hosts that share a twin. The twin is the same host, decided for as the policy is advised." />
        <series-chart v-for="chart in growth ? charts.slice(first) : charts" :key="chart.title" :title="chart.title" :lines="chart.lines" :may-be-log="chart.mayBeLog" :store="store" :version="version" :controls="controls" :is-dark="isDark" :marks="chart.marks" />
        <series-chart v-if="growth && growth.seeds.length" :title="gainBy === 'progress' ? 'gain during training' : 'gain against ' + gainBy" :lines="gainLines" :store="store" :version="version" :controls="controls" :is-dark="isDark" :choices="['parameters', 'FLOPs', 'progress']" :choice="gainBy" @choose="gainBy = $event" :note="gainNote" />
        <series-chart v-if="page.calibration" title="calibration of the critic" :lines="calibrationLines" :store="store" :version="version" :controls="controls" :is-dark="isDark" :note="calibrationNote" />
      </div></component>

      <host-lives v-if="page.controller" :id="page.id" :rounds="page.controller.rounds" />

      <section v-if="page.controller && page.controller.cells.length" class="card">
        <header><h3>cells</h3></header>
        <div class="scroll"><table><thead><tr><th>task and host</th><th class="number">hosts</th><th class="number">utility</th><th class="number">gain</th><th class="number">rent</th><th class="number">grown</th><th class="number">kept</th></tr></thead>
        <tbody><tr v-for="row in page.controller.cells" :key="row.cell" :data-cell="row.cell"><td>{{ row.cell }}</td><td class="number">{{ row.hosts }}</td><td class="number">{{ withInterval(row.utility, row.low, row.high) }}</td><td class="number">{{ figure(row.gain) }}</td><td class="number">{{ figure(row.rent) }}</td><td class="number">{{ figure(row.grown) }}</td><td class="number">{{ figure(row.kept) }}</td></tr></tbody></table></div>
        <p class="quiet">Means over all hosts of the run so far, in nats; seeds per host.</p>
      </section>

      <section v-if="growth && growth.seeds.length" class="card">
        <header><h3>ledger</h3></header>
        <div class="scroll"><table><thead><tr><th>seed</th><th class="wide">slot</th><th>blueprint</th><th class="wide">born</th><th class="wide">outcome</th><th class="number">parameters</th><th class="number">cost of removal</th><th class="number">rent</th><th class="wide">reason</th></tr></thead>
        <tbody><tr v-for="row in growth.seeds" :key="row.number" :data-ledger="row.number"><td>{{ row.number }}</td><td class="wide">{{ row.slot }}</td><td>{{ row.blueprint }}</td><td class="wide">{{ row.born }}</td><td class="wide">{{ row.outcome }}</td><td class="number">{{ figure(row.parameters) }}</td>
          <td class="number">{{ withInterval(row.contributions.at(-1)?.gain, row.contributions.at(-1)?.gain_low, row.contributions.at(-1)?.gain_high) }}</td><td class="number">{{ figure(row.rent) }}</td><td class="wide">{{ row.why }}</td></tr></tbody></table></div>
      </section>

      <details v-if="probe" class="card">
        <summary>probe after epoch {{ probe.epoch }}</summary><p><label v-if="growth.probes.length > 1">epoch <select v-model="probeEpoch" aria-label="probe"><option :value="null">the last</option><option v-for="row in growth.probes" :key="row.epoch" :value="row.epoch">{{ row.epoch }}</option></select></label></p>
        <p v-if="probe.decision">{{ probe.decision }}</p>
        <div class="scroll tall"><table><thead><tr><th>slot</th><th>blueprint</th><th class="number">fall of the loss per step</th><th>verdict</th></tr></thead>
        <tbody><tr v-for="row in probed" :key="row.slot + ' ' + row.blueprint" :data-candidate="row.blueprint"><td>{{ row.slot }}</td><td>{{ row.blueprint }}</td><td class="number">{{ figure(row.estimate) }}</td><td :class="{ quiet: row.reason }">{{ row.reason ? 'passed over: ' + row.reason : row.isGrown ? 'grows' : '' }}</td></tr></tbody></table></div>
        <p class="quiet">Estimated fall of the loss per step, at first, if the candidate grew. The fastest at first need not be worth most at the end, and may not fit; the verdict names the rule that decided.</p>
      </details>

      <details v-if="growth && growth.decisions.length" class="card">
        <summary>decisions</summary>
        <ol class="log"><li v-for="(row, index) in growth.decisions.slice().reverse()" :key="index"><b>epoch {{ row.epoch }}</b> {{ row.text }}</li></ol>
      </details>

      <section v-if="growth && growth.rollbacks.length" class="card">
        <header><h3>governor</h3></header>
        <p>{{ growth.rollbacks.length === 1 ? 'One rollback' : growth.rollbacks.length + ' rollbacks' }}{{ lost ? ', which cost ' + lost : '' }}.</p>
        <ol class="log"><li v-for="(row, index) in growth.rollbacks" :key="index" data-rollback><b>epoch {{ row.epoch }}</b> went back to the state of epoch {{ row.to_epoch }}{{ costOf(row) }}: {{ row.reason }}<template v-if="row.embargoed.length">. Under embargo: {{ row.embargoed.join(', ') }}</template></li></ol>
      </section>

      <seed-analysis v-if="page.blueprints" :blueprints="page.blueprints" :analysis="page.analysis" :folder="page.summary.folder" :is-growth="Boolean(growth)" />

      <section v-if="page.opponents && page.opponents.length" class="card">
        <header><h3>opponents</h3></header>
        <div class="scroll"><table><thead><tr><th>player</th><th class="number">won</th><th class="number">drawn</th><th class="number">lost</th><th class="number">win rate</th><th class="number">rating</th></tr></thead>
        <tbody><tr v-for="row in page.opponents" :key="row.name" :data-opponent="row.name"><td>{{ row.name }} <small v-if="row.is_anchor">anchor</small></td><td class="number">{{ row.won }}</td><td class="number">{{ row.drawn }}</td><td class="number">{{ row.lost }}</td><td class="number">{{ row.rate === null ? '–' : percent(row.rate, 1) + ' [' + percent(row.low, 1) + ', ' + percent(row.high, 1) + ']' }}</td><td class="number">{{ row.rating === null ? '–' : row.rating.toFixed(1) + ' ± ' + row.spread.toFixed(1) }}</td></tr></tbody></table></div>
        <p class="quiet">Battles of the learner in the last 20 rounds; a draw is half a win, with the 95 % interval over battles. Ratings are of the last change of the league.</p>
      </section>

      <section v-if="page.league && page.league.length" class="card">
        <header><h3>league</h3></header>
        <ol class="log"><li v-for="(row, index) in page.league.slice().reverse()" :key="index"><b>{{ row.name }}</b> {{ row.is_promoted ? 'entered the league' : 'did not enter' }}: {{ row.reason }}</li></ol>
      </section>

      <details v-if="system.length" class="card" :open="!growth"><summary>system</summary>
      <div class="figures" v-if="systemFigures.length"><div v-for="row in systemFigures" :key="row.name" class="figure"><small>{{ row.name }}</small><b :data-system="row.key">{{ row.text }}</b></div></div>
      <div class="grid" data-system-charts>
        <series-chart v-for="chart in system" :key="chart.title" :title="chart.title" :lines="chart.lines" :may-be-log="chart.mayBeLog" :store="store" :version="version" :controls="controls" :is-dark="isDark" />
      </div>
      </details>

      <section v-if="page.problems.length" class="card">
        <header><h3>warnings</h3></header>
        <ol class="log"><li v-for="(row, index) in page.problems" :key="index"><b>{{ row.kind.replaceAll('_', ' ') }}</b> {{ described(row) }}</li></ol>
      </section>

      <details class="card"><summary>any series</summary>
        <p><select v-model="own" aria-label="series"><option value="">choose a series</option><option v-for="name in page.series" :key="name" :value="name">{{ name }}</option></select></p>
        <series-chart v-if="own" :key="own" :title="own" :lines="[line(own, own, palette[0])]" :store="store" :version="version" :controls="controls" :is-dark="isDark" />
      </details>
      <details class="card"><summary>settings</summary><pre>{{ settings }}</pre></details>
    </template>
  </main>

  <main v-else>
    <p v-if="compared && compared.runs.length < 2" class="empty">{{ compared.runs.length ? 'Only ' + compared.runs[0].name + ' is left of these runs; the others were moved or removed.' : 'None of these runs exists any more.' }} Choose at least two in <a href="#/">the table</a>.</p>
    <p v-else-if="!compared" class="empty">{{ problem || 'Reading the runs …' }}</p>
    <template v-else>
      <p v-if="compared.runs.length < route.ids.length" class="warning" role="alert">{{ route.ids.length - compared.runs.length }} of the chosen runs were moved or removed.</p>
      <div class="figures"><div v-for="run in compared.runs" :key="run.id" class="figure"><small><i class="dot" :style="{ background: palette[compareGroups.findIndex((group) => group.includes(run)) % palette.length] }"></i>{{ nameOf(run) }}</small><b>{{ figure(run.best) }}</b><small>{{ run.figure }}, best</small></div></div>
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
  props: ["words"], // stage -> its word
  components: { HostLives, ReplayList, SeedAnalysis, SeriesChart },
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
    seedNumber: null,
    probeEpoch: null,
    utilityBy: "rent",
    gainBy: "parameters",
    own: "",
    version: 0,
    problem: "",
    showsHelp: false,
    controls: { axis: "step", smoothing: 0, bySeed: false },
    isDark: false,
  }),
  created() {
    this.store = new SeriesStore();
    this.store.onNeed = () => {
      clearTimeout(this.need);
      this.need = setTimeout(() => this.refreshSeries().catch(() => {}), 30);
    };
    this.stop = new AbortController();
    this.axes = AXES;
    this.gone = GONE;
    this.states = STATES;
    Object.assign(STAGES, this.words);
    this.stages = STAGES;
    this.palette = PALETTE;
    this.legend = ["TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "EMBARGOED"];
    Object.assign(this, { figure, networkSvg, percent, points, sparkline, timelineSvg, withInterval });
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
    clearTimeout(this.need);
    this.stop.abort();
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
    probe() {
      const probes = this.growth?.probes ?? [];
      return probes.find((probe) => probe.epoch === this.probeEpoch) ?? probes.at(-1) ?? null;
    },
    // All candidates of the shown probe, the best estimates first.
    probed() {
      const rows = Object.entries(this.probe.estimates).flatMap(([slot, row]) => Object.entries(row).map(([blueprint, estimate]) => ({ slot, blueprint, estimate })));
      for (const row of rows) {
        row.reason = this.probe.reasons[row.slot]?.[row.blueprint] ?? "";
        row.isGrown = this.growth.seeds.some((seed) => seed.slot === row.slot && seed.blueprint === row.blueprint && seed.born === this.probe.epoch);
      }
      return rows.sort((a, b) => (b.isGrown - a.isGrown) || b.estimate - a.estimate);
    },
    // The cost of all rollbacks, in words.
    lost() {
      const rows = this.growth.rollbacks.filter((row) => row.steps_lost !== null && row.steps_lost !== undefined);
      return rows.length ? this.costInWords(rows.reduce((sum, row) => sum + row.steps_lost, 0), rows.reduce((sum, row) => sum + (row.seconds_lost ?? 0), 0)) : "";
    },
    canGroup() {
      return this.route.page === "run" ? this.page?.seeds.length > 1 : this.compared?.runs.length > 1;
    },
    utilityLines() {
      const prefix = `@utility/${this.utilityBy}/`;
      return this.page.computed.filter((name) => name.startsWith(prefix)).map((name, index) => {
        const own = this.line(name, name.slice(prefix.length), PALETTE[index % PALETTE.length]);
        const axes = { ...own.axes, step: "round" };
        return { ...own, axes, siblings: own.siblings.map((line) => ({ ...line, axes })) };
      });
    },
    gainLines() {
      const name = this.page.computed[0];
      const x = { parameters: { column: "size/parameters", name: "parameters", isCourse: true }, FLOPs: { column: "size/flops", name: "FLOPs of a forward pass", isCourse: true } }[this.gainBy];
      const line = { ...this.line(name, name === "@gain/twin" ? "gain over the twin" : "fall of the loss", PALETTE[2]), x, dots: Boolean(x) };
      return [{ ...line, siblings: line.siblings.map((other) => ({ ...other, x })) }];
    },
    gainNote() {
      const what = this.page.computed[0] === "@gain/twin" ? "Validation loss of the twin minus that of the network, epoch by epoch." : "Fall of the validation loss since the first epoch. With --twin it is compared with a network that never grows.";
      return this.gainBy === "progress" ? what : `${what} Choose progress to see it by ${this.controls.axis === "flops" ? "FLOPs of the training" : this.controls.axis}.`;
    },
    calibrationLines() {
      const x = { column: "predicted", name: "predicted return", isCourse: false };
      const line = { ...this.line("@calibration", "achieved", PALETTE[0]), x, dots: true };
      return [{ ...line, siblings: line.siblings.map((other) => ({ ...other, x })) }, { ...line, name: null, label: "as predicted", color: PALETTE[7], dashed: true, dots: false, isDiagonal: true }];
    },
    calibrationNote() {
      return `Mean discounted return of the steps that the critic gave about the same value, with its 95 % interval; the last ${this.page.calibration.updates} updates. On the dashed line the critic is right. The points do not follow one another in time, so axis and smoothing do not change them.`;
    },
    settings() {
      return JSON.stringify(this.page.config, null, 2);
    },
    charts() {
      const marks = (this.growth?.marks ?? []).map((mark) => ({ x: mark.epoch, what: mark.what, stage: mark.stage, text: `${mark.blueprint} ${mark.what} ${mark.slot ? `after ${mark.slot}` : ""}`.trim() }));
      return this.chartsOf(this.page.charts).map((chart) => ({ ...chart, marks: chart.title === "loss" || chart.title === "metrics" ? marks : [] }));
    },
    // How many charts come first on the page of a growth run: the loss and the metrics.
    first() {
      return this.charts.filter((chart) => ["loss", "metrics"].includes(chart.title)).length;
    },
    system() {
      return this.chartsOf(this.page.system);
    },
    // The newest figures of the machine, in units for people.
    systemFigures() {
      const kind = this.growth ? "epoch_ended" : "update";
      const units = [
        [this.page.controller ? "lives per second" : "samples per second", this.growth ? "samples_per_second" : "steps_per_second", (value) => figure(value)],
        ["per step", "step_seconds", (value) => `${figure(1000 * value, 2)} ms`],
        ["wait for data", this.growth ? "data_wait_seconds" : "env_seconds", (value) => `${figure(value, 2)} s`],
        ["cores in use", "resources/cpu_cores", (value) => figure(value, 2)],
        ["memory", "resources/memory_bytes", (value) => `${figure(Math.round(value / 2 ** 20))} MiB`],
        ["GPU memory", "resources/device_memory_bytes", (value) => `${figure(Math.round(value / 2 ** 20))} MiB`],
        ["GPU in use", "resources/device_use", (value) => percent(value)],
      ];
      this.version; // the store is not reactive itself
      return units.map(([name, key, words]) => ({ name, key, value: this.store.get({ id: this.page.id }, `${kind}/${key}`)?.values.at(-1), words })).filter((row) => row.value !== undefined && row.value !== null).map((row) => ({ ...row, text: row.words(row.value) }));
    },
    differences() {
      const found = this.compared?.over_seeds;
      return [...(found?.paired ?? []), ...(found?.twins ?? [])].map((pair) => {
        const { low = null, high = null } = pair.interval ?? {};
        return { name: `${pair.ours} − ${pair.theirs}`, text: `${withInterval(pair.estimate, low, high, { sign: "+" })}${pair.interval ? "" : " (one seed gives no interval)"} over ${pair.seeds.length} ${pair.seeds.length === 1 ? "seed" : "seeds"}` };
      });
    },
    // Runs of one setting, which differ in nothing but their seed, have one colour and are drawn as their mean; otherwise each has its own.
    compareGroups() {
      const settings = Object.entries(this.compared.settings).filter(([setting]) => !/(^|\.)seed$/.test(setting));
      return Object.values(Object.groupBy(this.compared.runs, (run) => JSON.stringify(this.controls.bySeed ? settings.map(([setting, row]) => [setting, row[run.id]]) : run.id)));
    },
    compareNames() {
      return this.compared.main;
    },
  },
  methods: {
    async tick() {
      const began = performance.now();
      try {
        if (!document.hidden || !this.isLoaded) await this.refresh();
        this.problem = "";
      } catch (error) {
        if (error.name !== "AbortError") this.problem = error.message === GONE ? GONE : error instanceof TypeError ? "esper watch does not answer; start it again, and this page goes on" : `esper watch reports: ${error.message}`;
      }
      // The server answers when a log has grown, so there is no need to wait before asking again, except for the eyes. A comparison is polled.
      this.timer = setTimeout(() => this.tick(), Math.max((this.route.page !== "compare" && !this.problem ? SHORT_MS : EVERY_MS) - (performance.now() - began), 50));
    },
    async refresh() {
      this.now = Date.now() / 1000;
      if (this.route.page === "runs") {
        if (!this.isLoaded) this.watchLoading();
        const overview = await this.json(`/api/overview?mark=${this.mark ?? ""}`);
        this.mark = overview.mark;
        this.runs = overview.runs;
        this.root = overview.root;
        this.isLoaded = true;
        return;
      }
      if (this.route.page === "run") {
        const id = this.route.id;
        if (!this.page) this.watchLoading();
        const page = await this.json(`/api/runs/${id}?mark=${this.page?.mark ?? ""}`);
        if (this.route.id !== id) return;
        // New texts and points come in one frame; a page that opens first says which points it needs.
        const hasNewPoints = this.page && (await this.store.refresh());
        if (this.route.id !== id) return;
        if (page.summary) this.page = Object.freeze(page); // Vue then does not watch every part of it
        if (hasNewPoints) this.version += 1;
        return;
      } else if (!this.compared || performance.now() - (this.asked ?? -Infinity) > COMPARE_MS) {
        const found = await this.json(`/api/compare?runs=${this.route.ids.join(",")}`);
        if (JSON.stringify(found) !== JSON.stringify(this.compared)) this.compared = Object.freeze(found);
        this.asked = performance.now();
      }
      await this.refreshSeries();
    },
    async refreshSeries() {
      if (await this.store.refresh()) this.version += 1;
    },
    async watchLoading() {
      if (this.isWatching) return;
      this.isWatching = true;
      while (this.route.page === "runs" ? !this.isLoaded : this.route.page === "run" && !this.page && !this.problem) {
        this.loading = (await this.json("/api/loading").catch(() => ({ share: 1 }))).share;
        await new Promise((resolve) => setTimeout(resolve, 300));
      }
      this.isWatching = false;
    },
    async json(path) {
      const response = await fetch(path, { signal: this.stop.signal });
      if (!response.ok) throw new Error(response.status === 404 ? GONE : (await response.text()).slice(0, 200));
      return response.json();
    },
    go() {
      // The server may hold the answer for the page that is left.
      this.stop.abort();
      this.stop = new AbortController();
      const [, place, rest] = location.hash.split("/");
      this.page = null;
      this.compared = null;
      this.own = "";
      this.seedNumber = null;
      this.probeEpoch = null;
      this.asked = undefined;
      this.mark = undefined;
      this.problem = "";
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
      // Links, buttons and drawn buttons keep the keys that activate them.
      if (["Enter", " "].includes(event.key) && event.target.closest("a, button, summary, [role=button]")) return;
      const run = this.shownRuns[this.here];
      const actions = {
        "/": () => this.$refs.filter?.focus(),
        j: () => (this.here = Math.min(this.here + 1, this.shownRuns.length - 1)),
        k: () => (this.here = Math.max(this.here - 1, 0)),
        Enter: () => this.route.page === "runs" && run && this.open(run.id),
        x: () => run && (this.chosen = this.chosen.includes(run.id) ? this.chosen.filter((id) => id !== run.id) : [...this.chosen, run.id]),
        c: () => this.chosen.length > 1 && (location.hash = `#/compare/${this.chosen.join(",")}`),
        r: () => (location.hash = "#/"),
        a: () => (this.controls.axis = Object.keys(AXES)[(Object.keys(AXES).indexOf(this.controls.axis) + 1) % 4]),
        s: () => this.canGroup && (this.controls.bySeed = !this.controls.bySeed),
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
      if (!time) return "–"; // it has not written anything
      const seconds = Math.max(this.now - time, 0);
      if (seconds < 10) return "just now";
      const [value, unit] = seconds < 120 ? [seconds, "s"] : seconds < 7200 ? [seconds / 60, "min"] : seconds < 172800 ? [seconds / 3600, "h"] : [seconds / 86400, "days"];
      return `${Math.round(value)} ${unit} ago`;
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
      if (problem.words) return `step ${figure(problem.step)}: ${problem.words}`;
      return Object.entries(problem).filter(([name, value]) => !["kind", "time", "step"].includes(name) && value !== "" && value !== null && typeof value !== "object").map(([name, value]) => `${name.replaceAll("_", " ")} ${typeof value === "number" ? figure(value) : value}`).join(" · ");
    },
    costInWords(steps, seconds) {
      return `${figure(steps)} ${steps === 1 ? "step" : "steps"}${seconds ? ` and ${figure(seconds, 1)} s` : ""}`;
    },
    costOf(row) {
      return row.steps_lost === null || row.steps_lost === undefined ? "" : ` and lost ${this.costInWords(row.steps_lost, row.seconds_lost)}`;
    },
    // A line of a chart: one series of this run, and of the runs with other seeds.
    line(name, label, color) {
      const own = { run: { id: this.page.id }, started: this.page.summary.started, name, label, color, dashed: false };
      const axes = { ...AXES, step: this.growth ? "epoch" : name.startsWith("round_ended/") ? "fleets that have ended" : this.page.controller ? "lives" : "step", flops: this.growth ? "GFLOPs" : this.page.controller ? "GFLOPs of the hosts" : "GFLOPs of the policy, estimated" };
      return { ...own, axes, siblings: this.page.seeds.map((run) => ({ ...own, run: { id: run.id }, started: run.started, twinStarted: run.twin_started })) };
    },
    // The charts of a page, [{title, lines: [[label, series]], may_be_log}], as charts of this page.
    chartsOf(wanted) {
      return wanted.map((chart) => {
        const lines = chart.lines.map(([label, name], index) => this.line(name, label, PALETTE[index % PALETTE.length]));
        // The twin's curves are those of the run, dashed: its validation loss and its metrics.
        for (const same of lines.filter((line) => /^epoch_ended\/(val_loss$|metrics\/)/.test(line.name) && this.page.twin?.includes(line.name))) {
          lines.push({ ...same, run: { id: this.page.id, twin: true }, started: this.growth.twin_started, label: `${same.label}, twin`, dashed: true, siblings: same.siblings.map((line) => ({ ...line, run: { ...line.run, twin: true }, started: line.twinStarted })) });
        }
        return { title: chart.title, lines, mayBeLog: chart.may_be_log };
      });
    },
    // A line for each run or, by seed, for each setting; those of twins are dashed.
    compareLines(name) {
      const axes = { ...AXES, step: name.startsWith("epoch_ended/") ? "epoch" : name.startsWith("round_ended/") ? "fleets that have ended" : "step" };
      return this.compareGroups.flatMap((members, index) => {
        const common = { name, axes, color: PALETTE[index % PALETTE.length] };
        const called = `${this.nameOf(members[0])}${members.length > 1 ? ` and ${members.length - 1} more` : ""}`;
        const own = members.map((run) => ({ ...common, run: { id: run.id }, started: run.started, label: called, dashed: false }));
        const twins = members.filter((run) => run.twin.includes(name)).map((run) => ({ ...common, run: { id: run.id, twin: true }, started: run.twin_started, label: `twin of ${called}`, dashed: true }));
        return [own, twins].filter((lines) => lines.length).map((lines) => ({ ...lines[0], siblings: lines }));
      });
    },
    // The name of a run; its folder where another run in the comparison has the same name.
    nameOf(run) {
      return this.compared.runs.some((other) => other.id !== run.id && other.name === run.name) ? run.folder : run.name;
    },
  },
};
