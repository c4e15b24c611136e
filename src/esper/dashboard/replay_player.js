// The page that plays replays. Everything runs in the browser; the server only sends the list and the files.
// Addresses: #play=NAME plays that replay, #live plays the newest one and then each newer one, without either the newest one waits.

import { chartOf, fetchReplay, GROUNDS, Stage, weaponColour } from "esper-player";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];
const POLL_MS = 2000;
const NARROW = "(max-width: 820px)"; // as in player.css
const SIDE = 256; // pixels of a panel beside the stage and of the space around it
const BARS = [
  ["hit_points", "hit points"],
  ["legs", "legs"],
  ["heat", "heat"],
  ["stability", "stability"],
  ["fuel", "fuel"],
];
const KEYS = [
  ["space", "play, pause"],
  ["← →", "a frame; shift: 20"],
  ["↑ ↓", "faster, slower"],
  ["Home", "start; End: the end"],
  ["U", "next unit; shift: before"],
  ["F", "follow the unit, and back"],
  ["R T", "whole map, from above"],
  ["N", "newest replay"],
  ["L D", "legend, light or dark"],
  ["Esc", "no unit"],
];

const template = `
<div class="esper-player" :class="isDark ? 'is-dark' : 'is-light'">
  <header class="bar-top">
    <div class="which">
      <select v-if="options.length > 1" :value="chosenUrl" class="replays" aria-label="replay" @change="pick($event.target.value)">
        <option v-for="item in options" :key="item.url" :value="item.url">{{ item.text }}</option>
      </select>
      <span v-else-if="options.length" class="only">{{ options[0].name }}</span>
      <button v-if="options.length > 1 || isLive" type="button" class="small live" :class="{ 'is-on': isLive }" :aria-pressed="isLive" data-live
        title="play the newest replay, and each newer one after it (N)" @click="setLive(!isLive)">newest</button>
    </div>
    <div v-if="ready" class="scores">
      <span class="team team-0" :title="info.teams[0]"><i class="mark team-0"></i>{{ info.teams[0] }}</span>
      <span class="score" data-score="0" title="seconds in the zone">{{ score[0].toFixed(1) }}</span>
      <div class="score-bar left"><i class="team-0" :style="{ width: scoreShare(0) }"></i></div>
      <div class="clock"><b data-clock>{{ clock(frame) }}</b><small data-length>of {{ clock(last) }}</small></div>
      <div class="score-bar"><i class="team-1" :style="{ width: scoreShare(1) }"></i></div>
      <span class="score" data-score="1" title="seconds in the zone">{{ score[1].toFixed(1) }}</span>
      <span class="team team-1" :title="info.teams[1]"><i class="mark team-1"></i>{{ info.teams[1] }}</span>
    </div>
    <div v-if="ready" class="outcome">
      <b :class="'team-' + (info.winner ?? -1)" :title="ending" data-result>{{ result }}</b>
      <span :class="'team-' + holder" data-holder>{{ holder < 0 ? "zone is free" : info.teams[holder] + " holds the zone" }}</span>
    </div>
    <button type="button" class="small theme" :aria-label="isDark ? 'light' : 'dark'" title="light or dark (D)" @click="toggleDark">{{ isDark ? "☀" : "☾" }}</button>
  </header>

  <main class="stage" ref="stage" :aria-label="'the battle in 3D'"></main>
  <div v-if="problem" class="problem" role="alert">{{ problem }}</div>
  <div v-else-if="!ready" class="problem is-quiet" role="status">{{ rows && !rows.length ? whenEmpty : "Loading …" }}</div>

  <div v-if="ready" class="sides">
    <aside v-for="team in [0, 1]" :key="team" :class="team ? 'side right' : 'side left'">
      <section class="roster" :class="'team-' + team">
        <button v-for="row in rosters[team]" :key="row.unit" type="button" class="row" :class="{ 'is-dead': !row.isAlive, 'is-chosen': row.unit === chosen }"
          :data-roster="row.unit" :aria-pressed="row.unit === chosen" @click="choose(row.unit)">
          <span class="name">{{ row.name }}</span>
          <span class="marks"><span>{{ row.marks }}</span><b v-if="row.kills" title="kills">{{ "✕" + row.kills }}</b></span>
          <span class="bars"><span class="unit-bar"><i class="hit-points" :style="{ width: row.hitPoints }"></i></span>
            <span class="unit-bar"><i class="heat" :class="{ 'is-hot': row.isHot }" :style="{ width: row.heat }"></i></span></span>
        </button>
      </section>

      <section v-if="team === 0" class="feed">
        <h2>What happened</h2>
        <p v-if="!pastItems.length" class="quiet">nothing yet</p>
        <button v-for="item in pastItems" :key="item.index" type="button" class="item" :class="'is-' + item.kind" :data-kind="item.kind" @click="seek(item.frame)">
          <time>{{ clock(item.frame) }}</time><i class="mark" :class="'team-' + item.team"></i><span>{{ item.text }}</span>
        </button>
      </section>

      <section v-if="team === 1 && panel" class="panel" :data-panel="chosen">
        <h2><span :class="'team-' + panel.team">{{ panel.name }}</span><small>{{ panel.state }}</small>
          <button type="button" class="close" aria-label="close" @click="choose(null)">×</button></h2>
        <dl>
          <template v-for="bar in panel.bars" :key="bar.key">
            <dt>{{ bar.label }}</dt>
            <dd><span class="unit-bar" :class="'team-' + panel.team"><i :class="bar.style" :style="{ width: bar.share }"></i></span><span :data-number="bar.key">{{ bar.text }}</span></dd>
          </template>
        </dl>
        <h3>Wants</h3>
        <p v-if="!panel.wish" class="quiet" data-wish>{{ panel.isAlive ? "the battle is over" : "nothing any more" }}</p>
        <div v-else class="wish" data-wish>
          <svg viewBox="-1.3 -1.3 2.6 2.6" aria-hidden="true"><circle r="1.15" class="dial"/><path d="M0 -1.28 l0.11 0.2 h-0.22 z" class="nose"/>
            <line x1="0" y1="0" :x2="panel.wish.strafe" :y2="-panel.wish.forward" class="stick"/><circle :cx="panel.wish.strafe" :cy="-panel.wish.forward" r="0.17" class="knob"/></svg>
          <ul><li v-for="line in panel.wish.lines" :key="line[0]"><span>{{ line[0] }}</span> {{ line[1] }}</li></ul>
        </div>
        <h3>Senses</h3>
        <p v-if="!panel.contacts.length" class="quiet" data-contacts>nobody</p>
        <div v-else class="contacts" data-contacts>
          <button v-for="contact in panel.contacts" :key="contact.unit" type="button" :class="['team-' + contact.team, contact.isSeen ? 'is-seen' : 'is-sensed']"
            :data-contact="contact.unit" @click="choose(contact.unit)"><span class="how"></span>{{ contact.name }}<small>{{ contact.text }}</small></button>
        </div>
      </section>
      <section v-else-if="team === 1" class="panel hint"><p class="quiet">Choose a unit here or on the map to see what it senses and wants, and to follow it.</p></section>

      <details v-if="team === 0" class="legend" :open="showsLegend" data-legend @toggle="showsLegend = $event.target.open">
        <summary title="L">Legend and keys</summary>
        <ul>
          <li v-for="side in [0, 1]" :key="side"><i class="mark" :class="'team-' + side"></i>{{ info.teams[side] }}: {{ side ? "square" : "round" }} rings</li>
          <li><i class="ring"></i>the chosen unit</li>
          <li><i class="tip"></i>tip: where the unit looks</li>
          <li><i class="ghost"></i>pale: behind terrain</li>
          <li><span class="unit-bar team-0"><i class="hit-points" style="width: 70%"></i></span>hit points</li>
          <li><span class="unit-bar"><i class="heat" style="width: 50%"></i></span>heat</li>
          <li><span class="unit-bar"><i class="heat is-hot" style="width: 90%"></i></span>heat, near shutdown</li>
          <li><i class="circle"></i>zone, coloured by its holder</li>
          <li><i class="line is-seen"></i>the chosen unit sees it</li>
          <li><i class="line is-sensed"></i>senses it without seeing it</li>
          <li><i class="line is-aim"></i>aims at it</li>
          <li><i class="arrow">➜</i>where it wants to walk</li>
          <li><i class="steam"></i>vents heat</li>
          <li><i class="smoke"></i>smoke, hides units</li>
          <li class="swatches"><span v-for="weapon in weapons" :key="weapon.name"><i :style="{ background: weapon.colour }"></i>{{ weapon.name }}</span></li>
          <li class="swatches"><span v-for="ground in grounds" :key="ground[1]"><i :style="{ background: ground[0] }"></i>{{ ground[1] }}</span></li>
          <li>H3: heavy 3. ✕2: two kills.</li>
          <li>Chart: seconds in the zone, a band for its holder, a tick for a kill.</li>
        </ul>
        <dl class="keys"><template v-for="key in keys" :key="key[0]"><dt><kbd>{{ key[0] }}</kbd></dt><dd>{{ key[1] }}</dd></template></dl>
      </details>
    </aside>
  </div>

  <footer v-if="ready" class="bar-bottom">
    <div class="controls">
      <button type="button" class="play" data-play :aria-label="isPlaying ? 'pause' : 'play'" title="space" @click="toggle">
        <svg viewBox="0 0 10 10"><path v-if="isPlaying" d="M2 1h2v8H2zM6 1h2v8H6z"/><path v-else d="M2 0.8L9 5L2 9.2z"/></svg></button>
      <button type="button" aria-label="one frame back" title="←" @click="step(-1)">‹</button>
      <button type="button" aria-label="one frame on" title="→" @click="step(1)">›</button>
      <select v-model.number="speed" class="speed" data-speed aria-label="speed" title="↑ ↓"><option v-for="value in speeds" :key="value" :value="value">{{ value }}×</option></select>
      <button type="button" title="the whole map (R)" @click="look('slant')">map</button>
      <button type="button" title="from above (T)" @click="look('top')">top</button>
      <button type="button" title="zoom to the chosen unit and stay with it, and back (F)" data-follow :class="{ 'is-on': isFollowing }" :aria-pressed="isFollowing" @click="toggleFollow">follow</button>
      <span class="frame">frame <b data-frame>{{ frame }}</b> of {{ last }}</span>
    </div>
    <div class="timeline">
      <svg viewBox="0 0 1000 100" preserveAspectRatio="none" aria-hidden="true" data-chart>
        <line v-if="chart.winAt !== null" x1="0" x2="1000" :y1="chart.winAt" :y2="chart.winAt" class="win-at"/>
        <rect v-for="hold in chart.holds" :key="hold.x" :x="hold.x" :width="hold.width" y="94" height="6" :class="'fill team-' + hold.team"/>
        <polyline v-for="team in [0, 1]" :key="team" :points="chart.lines[team]" :class="'stroke team-' + team"/>
        <line v-for="kill in chart.kills" :key="kill.frame + '-' + kill.x" :x1="kill.x" :x2="kill.x" y1="0" y2="12" :class="'stroke kill team-' + kill.team"/>
      </svg>
      <span class="caption">seconds in the zone<template v-if="chart.winAt !== null">, dashed: enough to win</template></span>
      <input type="range" min="0" :max="last" step="any" :value="time" data-scrub aria-label="time" @input="scrub($event.target.valueAsNumber)" @keydown.prevent>
    </div>
  </footer>
</div>`;

export default {
  template,
  props: { source: String, whenEmpty: String },

  data() {
    return {
      ...{ ready: false, problem: "", rows: null, played: null, chosenUrl: null, isLive: false, info: null, last: 0, speeds: SPEEDS, keys: KEYS, grounds: GROUNDS },
      ...{ time: 0, isPlaying: false, speed: 1, chosen: null, isFollowing: false, isDark: true, showsLegend: false },
    };
  },

  computed: {
    // The replays, and the one that is played if its file was removed meanwhile.
    options() {
      const rows = this.rows ?? [];
      const gone = this.played && !rows.some((row) => row.url === this.chosenUrl) ? [this.played] : [];
      return [...rows, ...gone].map((row) => ({ ...row, text: row.problem ? `${row.name}: cannot be read` : `${row.name}: ${this.resultOf(row.players, row.winner)}, ${this.clockOf(row.seconds)}` }));
    },
    frame() {
      return Math.min(this.last, Math.floor(this.time + 1e-6));
    },
    score() {
      return this.replay.score(this.frame);
    },
    holder() {
      return this.replay.holder(this.frame);
    },
    result() {
      return `${this.resultOf(this.info.teams, this.info.winner)} after ${this.clock(this.last)}`;
    },
    ending() {
      return this.info.feed.find((item) => item.kind === "end")?.text ?? this.result;
    },
    weapons() {
      return this.info.weapons.map((name) => ({ name, colour: weaponColour(name) }));
    },
    pastItems() {
      const { replay, frame } = this;
      const teamOf = ({ by, unit }) => (by !== null ? replay.team(by) : unit !== null ? replay.team(unit) : -1);
      const items = this.info.feed.map((item, index) => ({ ...item, index, team: teamOf(item) }));
      return items.filter((item) => item.frame <= frame).reverse();
    },
    rosters() {
      const units = this.replay.names.map((_, unit) => unit).filter((unit) => this.replay.isPresent[unit]);
      return [0, 1].map((team) => units.filter((unit) => this.replay.team(unit) === team).map((unit) => this.rosterRow(unit)));
    },
    panel() {
      return this.chosen === null ? null : this.panelOf(this.chosen);
    },
  },

  watch: {
    time: { handler: "draw", flush: "sync" }, // before the camera moves, so that a followed unit stays in the middle
    chosen: "draw",
    isDark() {
      this.$nextTick(() => this.stage?.paint(getComputedStyle(this.$el).getPropertyValue("--sky").trim()));
    },
  },

  async mounted() {
    const kept = localStorage.getItem("esper-dark");
    this.isDark = kept === null ? matchMedia("(prefers-color-scheme: dark)").matches : kept === "1";
    this.narrow = matchMedia(NARROW);
    this.showsLegend = !this.narrow.matches && innerHeight >= 760;
    this.listeners = [
      [window, "keydown", (event) => this.key(event)],
      [window, "hashchange", () => this.go()],
      [window, "storage", (event) => event.key === "esper-dark" && (this.isDark = event.newValue === "1")],
      [this.narrow, "change", () => this.fit()],
    ];
    for (const [target, name, listener] of this.listeners) target.addEventListener(name, listener);
    try {
      this.stage = new Stage(this.$refs.stage, (unit) => this.choose(unit));
    } catch (error) {
      this.problem = `This browser cannot draw in 3D (WebGL): ${error.message}`;
      return;
    }
    this.stage.paint(getComputedStyle(this.$el).getPropertyValue("--sky").trim());
    this.fit();
    await this.poll();
    this.loop = requestAnimationFrame((now) => this.tick(now));
  },

  beforeUnmount() {
    for (const [target, name, listener] of this.listeners) target.removeEventListener(name, listener);
    cancelAnimationFrame(this.loop);
    clearTimeout(this.timer);
    this.stage?.dispose();
  },

  methods: {
    // Asks for the list again and again, because a run that trains records new battles.
    async poll() {
      try {
        if (!document.hidden || this.rows === null) {
          const response = await fetch(this.source);
          if (!response.ok) throw new Error(await response.text());
          const isFirst = this.rows === null;
          this.rows = await response.json();
          if (isFirst) this.go();
          else this.goOn();
        }
      } catch (error) {
        if (!this.ready) this.problem = `The server does not answer: ${error.message}`;
      }
      this.timer = setTimeout(() => this.poll(), POLL_MS);
    },

    // Does what the address asks for.
    go() {
      this.isLive = location.hash === "#live";
      const name = location.hash.startsWith("#play=") ? decodeURIComponent(location.hash.slice(6)) : null;
      const row = this.rows?.find((other) => other.name === name);
      if (name !== null && !row) {
        Object.assign(this, { ready: false, chosenUrl: "", problem: `There is no replay ${name} any more. Choose another one.` });
      } else if (row) this.load(row, { plays: true });
      else this.goOn();
    },

    // Plays the newest replay once it is there: at the beginning, and if asked for, whenever the present one has ended.
    goOn() {
      const newest = this.rows?.find((row) => !row.problem) ?? (this.isLive ? null : this.rows?.[0]);
      const isOther = newest && (newest.url !== this.chosenUrl || newest.time !== this.played?.time);
      const isFree = this.chosenUrl === null || (this.isLive && (!this.ready || this.time >= this.last));
      if (isOther && isFree) this.load(newest, { plays: this.isLive });
    },

    setLive(isLive) {
      if (!isLive) return this.pick(this.chosenUrl);
      history.replaceState(null, "", "#live");
      this.isLive = true;
      const newest = this.rows?.find((row) => !row.problem);
      if (newest && newest.url !== this.chosenUrl) this.load(newest, { plays: true });
      else if (this.ready && !this.isPlaying) this.toggle();
    },

    // Plays one replay of the list, and no newer one after it.
    pick(url) {
      const row = this.options.find((other) => other.url === url);
      if (!row) return;
      document.activeElement?.blur(); // the list would take the keys of the player
      history.replaceState(null, "", `#play=${encodeURIComponent(row.name)}`);
      this.isLive = false;
      if (url !== this.chosenUrl || this.problem) this.load(row, { plays: false });
    },

    async load(row, { plays }) {
      this.chosenUrl = row.url;
      this.played = row;
      this.ready = this.isPlaying = this.isFollowing = false;
      this.problem = "";
      try {
        const replay = await fetchReplay(row.url);
        if (row.url !== this.chosenUrl) return;
        Object.assign(this, { time: 0, chosen: null });
        this.replay = replay;
        this.info = Object.freeze(replay.info);
        this.last = replay.last;
        this.chart = chartOf(replay);
        this.stage.load(replay);
        this.ready = true;
        this.isPlaying = plays && !this.stage.isStill;
        this.draw();
      } catch (error) {
        if (row.url === this.chosenUrl) this.problem = error.message;
      }
    },

    fit() {
      this.stage.margin = this.narrow.matches ? 0 : SIDE;
      if (this.ready) this.stage.view("slant");
    },

    tick(now) {
      const passed = Math.min(0.25, (now - (this.before ?? now)) / 1000);
      this.before = now;
      if (this.isPlaying) {
        this.stage.adapt(passed);
        this.time = Math.min(this.last, this.time + (passed * this.speed) / this.info.decision_s);
        if (this.time >= this.last) {
          this.isPlaying = false;
          this.goOn();
        }
      }
      if (this.ready) this.stage.move(passed, this.time);
      this.stage.render();
      this.loop = requestAnimationFrame((next) => this.tick(next));
    },

    draw() {
      if (this.ready) this.stage.show(this.time, this.chosen);
    },

    toggle() {
      if (!this.isPlaying && this.time >= this.last) this.time = 0;
      this.isPlaying = !this.isPlaying;
    },
    seek(time) {
      this.time = Math.max(0, Math.min(this.last, time));
    },
    scrub(time) {
      this.isPlaying = false;
      this.seek(time);
    },
    step(frames) {
      this.scrub((frames < 0 ? Math.ceil(this.time - 1e-6) : this.frame) + frames);
    },
    choose(unit) {
      this.chosen = unit;
      this.setFollow(this.isFollowing && unit !== null);
    },
    // Chooses the next living unit, or with -1 the one before.
    chooseNext(by) {
      const units = this.rosters.flat().filter((row) => row.isAlive).map((row) => row.unit);
      const here = units.indexOf(this.chosen);
      if (units.length) this.choose(units[(here < 0 ? (by > 0 ? 0 : units.length - 1) : here + by + units.length) % units.length]);
    },
    setFollow(isFollowing) {
      this.isFollowing = isFollowing;
      this.stage.follow(isFollowing ? this.chosen : null);
    },
    toggleFollow() {
      if (this.chosen === null) this.chooseNext(1);
      this.setFollow(!this.isFollowing && this.chosen !== null);
    },
    look(name) {
      this.isFollowing = false;
      this.stage.view(name);
    },
    faster(by) {
      this.speed = SPEEDS[Math.max(0, Math.min(SPEEDS.length - 1, SPEEDS.indexOf(this.speed) + by))];
    },
    toggleDark() {
      this.isDark = !this.isDark;
      localStorage.setItem("esper-dark", this.isDark ? "1" : "0");
    },

    key(event) {
      const by = event.shiftKey ? -1 : 1;
      const keys = {
        " ": () => this.toggle(),
        ArrowLeft: () => this.step(event.shiftKey ? -20 : -1),
        ArrowRight: () => this.step(event.shiftKey ? 20 : 1),
        ArrowUp: () => this.faster(1),
        ArrowDown: () => this.faster(-1),
        Home: () => this.scrub(0),
        End: () => this.scrub(this.last),
        Escape: () => this.choose(null),
        u: () => this.chooseNext(by),
        f: () => this.toggleFollow(),
        t: () => this.look("top"),
        r: () => this.look("slant"),
        n: () => this.setLive(!this.isLive),
        l: () => (this.showsLegend = !this.showsLegend),
        "?": () => (this.showsLegend = !this.showsLegend),
        d: () => this.toggleDark(),
      };
      const act = keys[event.key] ?? keys[event.key.toLowerCase()];
      if (!this.ready || event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT" || !act) return;
      event.preventDefault();
      document.activeElement?.blur(); // a focused button would take the space key as a click
      act();
    },

    resultOf(players, winner) {
      return winner === null ? "a draw" : `${players[winner]} wins`;
    },
    clockOf(seconds) {
      return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
    },
    clock(frame) {
      return this.clockOf(frame * this.info.decision_s);
    },
    scoreShare(team) {
      const most = this.info.score_to_win ?? Math.max(1, ...this.replay.score(this.last));
      return `${Math.min(100, (100 * this.score[team]) / most)}%`;
    },

    rosterRow(unit) {
      const { replay, frame } = this;
      const value = (name) => replay.unit(frame, unit, name);
      const share = (name) => Math.min(100, (100 * value(name)) / (replay.most[unit][name] || 1));
      const isAlive = replay.isAlive(frame, unit);
      return {
        ...{ unit, isAlive, name: replay.names[unit], marks: isAlive ? this.marks(unit) : "", isHot: share("heat") > 80 },
        hitPoints: `${share("hit_points")}%`,
        heat: isAlive ? `${share("heat")}%` : "0",
        kills: this.info.feed.filter((item) => item.kind === "kill" && item.by === unit && item.frame <= frame).length,
      };
    },

    marks(unit) {
      const is = (name) => this.replay.unit(this.frame, unit, name) > 0;
      const marks = [is("fallen") && "fallen", is("shut_down") && "shut down", is("venting") && "venting", is("painted") && "painted"];
      return marks.filter(Boolean).join(" · ");
    },

    panelOf(unit) {
      const { replay, frame } = this;
      const most = replay.most[unit];
      const isAlive = replay.isAlive(frame, unit);
      const bars = BARS.filter(([key]) => most[key] > 0).map(([key, label]) => {
        const value = replay.unit(frame, unit, key);
        const digits = key === "fuel" ? 1 : 0;
        const style = key === "heat" ? `heat${value > 0.8 * most.heat ? " is-hot" : ""}` : key === "hit_points" ? "hit-points" : "other";
        return { key, label, style, share: `${Math.min(100, (100 * value) / most[key])}%`, text: `${value.toFixed(digits)} / ${most[key].toFixed(digits)}` };
      });
      const state = isAlive ? this.marks(unit) : "destroyed";
      return { name: replay.names[unit], team: replay.team(unit), state, isAlive, bars, wish: this.wishOf(unit), contacts: this.contactsOf(unit) };
    },

    wishOf(unit) {
      const action = this.replay.isAlive(this.frame, unit) ? this.replay.action(this.frame, unit) : null;
      if (!action) return null;
      const percent = (value) => `${Math.round(100 * Math.abs(value))} %`;
      const towards = (value, plus, minus) => (Math.abs(value) < 0.005 ? "no" : `${value > 0 ? plus : minus} ${percent(value)}`);
      const target = action.target >= 0 ? ` at ${this.replay.names[action.target]}` : "";
      const lines = [
        ["walk", towards(action.forward, "ahead", "back")],
        ["side", towards(action.strafe, "right", "left")],
        ["turn", towards(action.yaw, "left", "right")],
        ["jets", action.jets > 0.005 ? percent(action.jets) : "off"],
        ["fire", action.weapon ? action.weapon + target : "nothing"],
        ["vent", action.vent ? "yes" : "no"],
      ];
      return { ...action, lines };
    },

    contactsOf(unit) {
      const { replay, frame } = this;
      const here = replay.position(frame, unit);
      const contacts = [];
      replay.sensed(frame, unit).forEach((how, other) => {
        if (!how || other === unit) return;
        const distance = Math.hypot(...replay.position(frame, other).map((value, axis) => value - here[axis]));
        contacts.push({ unit: other, name: replay.names[other], team: replay.team(other), isSeen: how === 2, distance });
      });
      contacts.sort((a, b) => a.distance - b.distance);
      return contacts.map((contact) => ({ ...contact, text: `${contact.distance.toFixed(0)} m, ${contact.isSeen ? "seen" : "sensed"}` }));
    },
  },
};
