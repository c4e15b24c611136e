// The page that plays replays. Everything runs in the browser; the server only sends files.

import { chartOf, fetchReplay, Stage } from "esper-player";

const SPEEDS = [0.25, 0.5, 1, 2, 4, 8];
const BARS = [
  ["hit_points", "hit points"],
  ["legs", "legs"],
  ["heat", "heat"],
  ["stability", "stability"],
  ["fuel", "fuel"],
];

const template = `
<div class="esper-player">
  <div class="stage" ref="stage"></div>
  <div v-if="problem" class="problem" role="alert">{{ problem }}</div>

  <header class="bar-top">
    <div class="which">
      <select v-if="replays.length > 1" v-model="chosenUrl" class="replays" aria-label="replay">
        <option v-for="item in replays" :key="item.url" :value="item.url">{{ item.name }}</option>
      </select>
      <span v-else>{{ replays[0].name }}</span>
    </div>
    <div v-if="ready" class="scores">
      <span class="team team-0" :title="info.teams[0]">{{ info.teams[0] }}</span>
      <span class="score" data-score="0">{{ score[0].toFixed(1) }}</span>
      <div class="score-bar left"><i class="team-0" :style="{ width: scoreShare(0) }"></i></div>
      <div class="clock">
        <b data-clock>{{ clock(frame) }}</b>
        <small :class="outcome && 'is-over team-' + (info.winner ?? -1)">{{ outcome || "of " + clockOf(info.seconds) }}</small>
      </div>
      <div class="score-bar"><i class="team-1" :style="{ width: scoreShare(1) }"></i></div>
      <span class="score" data-score="1">{{ score[1].toFixed(1) }}</span>
      <span class="team team-1" :title="info.teams[1]">{{ info.teams[1] }}</span>
    </div>
    <div v-if="ready" class="holder" :class="'team-' + holder">{{ holder < 0 ? "zone is free" : info.teams[holder] + " holds the zone" }}</div>
  </header>

  <aside v-if="ready" v-for="team in [0, 1]" :key="team" :class="team ? 'side right' : 'side left'">
    <section class="roster">
      <button v-for="row in rosters[team]" :key="row.unit" type="button" class="row" :class="{ 'is-dead': !row.isAlive, 'is-chosen': row.unit === chosen }"
        :data-roster="row.unit" @click="choose(row.unit)">
        <span class="name" :class="'team-' + team">{{ row.name }}</span>
        <span class="marks">{{ row.marks }}<b v-if="row.kills" title="kills">{{ "✕" + row.kills }}</b></span>
        <span class="bars"><span class="unit-bar"><i class="hit-points" :style="{ width: row.hitPoints }"></i></span>
          <span class="unit-bar"><i class="heat" :class="{ 'is-hot': row.isHot }" :style="{ width: row.heat }"></i></span></span>
      </button>
    </section>

    <section v-if="team === 0" class="feed">
      <h2>What happened</h2>
      <p v-if="!pastItems.length" class="quiet">nothing yet</p>
      <button v-for="item in pastItems" :key="item.index" type="button" class="item" :class="'is-' + item.kind" :data-kind="item.kind" @click="seek(item.frame)">
        <time>{{ clock(item.frame) }}</time><span class="dot" :class="'team-' + item.team"></span><span>{{ item.text }}</span>
      </button>
    </section>

    <section v-else-if="panel" class="panel" :data-panel="chosen">
      <h2><span :class="'team-' + panel.team">{{ panel.name }}</span><small>{{ panel.state }}</small>
        <button type="button" class="close" aria-label="close" @click="choose(null)">×</button></h2>
      <dl>
        <template v-for="bar in panel.bars" :key="bar.key">
          <dt>{{ bar.label }}</dt>
          <dd><span class="unit-bar"><i :class="bar.style" :style="{ width: bar.share }"></i></span><span :data-number="bar.key">{{ bar.text }}</span></dd>
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
    <section v-else class="panel hint"><p class="quiet">Click a unit to see what it senses and wants.</p></section>
  </aside>

  <footer v-if="ready" class="bar-bottom">
    <div class="controls">
      <button type="button" class="play" data-play :aria-label="isPlaying ? 'pause' : 'play'" title="space" @click="toggle">
        <svg viewBox="0 0 10 10"><path v-if="isPlaying" d="M2 1h2v8H2zM6 1h2v8H6z"/><path v-else d="M2 0.8L9 5L2 9.2z"/></svg></button>
      <button type="button" aria-label="one frame back" title="←" @click="step(-1)">‹</button>
      <button type="button" aria-label="one frame on" title="→" @click="step(1)">›</button>
      <select v-model.number="speed" class="speed" data-speed aria-label="speed" title="↑ ↓"><option v-for="value in speeds" :key="value" :value="value">{{ value }}×</option></select>
      <button type="button" title="the whole map (R)" @click="look('slant')">map</button>
      <button type="button" title="from above (T)" @click="look('top')">top</button>
      <button type="button" title="keep the chosen unit in the middle (F)" :class="{ 'is-on': isFollowing }" :disabled="chosen === null" @click="isFollowing = !isFollowing">follow</button>
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
  props: { replays: Array },

  data() {
    return {
      ...{ ready: false, problem: "", chosenUrl: this.replays[0].url, speeds: SPEEDS },
      ...{ time: 0, isPlaying: false, speed: 1, chosen: null, isFollowing: false },
    };
  },

  computed: {
    frame() {
      return Math.min(this.last, Math.floor(this.time + 1e-6));
    },
    score() {
      return this.replay.score(this.frame);
    },
    holder() {
      return this.replay.holder(this.frame);
    },
    outcome() {
      if (this.frame < this.last) return "";
      return this.info.winner === null ? "a draw" : `${this.info.teams[this.info.winner]} wins`;
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
    chosenUrl() {
      this.load();
    },
    time: "draw",
    chosen: "draw",
    isFollowing: "draw",
  },

  async mounted() {
    this.onKey = (event) => this.key(event);
    window.addEventListener("keydown", this.onKey);
    try {
      this.stage = new Stage(this.$refs.stage, (unit) => this.choose(unit));
    } catch (error) {
      this.problem = `This browser cannot draw in 3D (WebGL): ${error.message}`;
      return;
    }
    await this.load();
    this.loop = requestAnimationFrame((now) => this.tick(now));
  },

  beforeUnmount() {
    window.removeEventListener("keydown", this.onKey);
    cancelAnimationFrame(this.loop);
    this.stage?.dispose();
  },

  methods: {
    async load() {
      const url = this.chosenUrl;
      this.ready = this.isPlaying = false;
      try {
        const replay = await fetchReplay(url);
        if (url !== this.chosenUrl) return;
        Object.assign(this, { problem: "", time: 0, chosen: null, isFollowing: false });
        this.replay = replay;
        this.info = replay.info;
        this.last = replay.last;
        this.chart = chartOf(replay);
        this.stage.load(replay);
        this.ready = true;
        this.draw();
      } catch (error) {
        this.problem = error.message;
      }
    },

    tick(now) {
      const passed = Math.min(0.25, (now - (this.before ?? now)) / 1000);
      this.before = now;
      if (this.isPlaying) {
        this.time = Math.min(this.last, this.time + (passed * this.speed) / this.info.decision_s);
        if (this.time >= this.last) this.isPlaying = false;
      }
      this.stage.render();
      this.loop = requestAnimationFrame((next) => this.tick(next));
    },

    draw() {
      if (this.ready) this.stage.show(this.time, this.chosen, this.isFollowing);
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
      if (unit === null) this.isFollowing = false;
    },
    look(name) {
      this.isFollowing = false;
      this.stage.view(name);
    },
    faster(by) {
      this.speed = SPEEDS[Math.max(0, Math.min(SPEEDS.length - 1, SPEEDS.indexOf(this.speed) + by))];
    },

    key(event) {
      const keys = {
        " ": () => this.toggle(),
        ArrowLeft: () => this.step(event.shiftKey ? -20 : -1),
        ArrowRight: () => this.step(event.shiftKey ? 20 : 1),
        ArrowUp: () => this.faster(1),
        ArrowDown: () => this.faster(-1),
        Home: () => this.scrub(0),
        End: () => this.scrub(this.last),
        Escape: () => this.choose(null),
        f: () => (this.isFollowing = this.chosen !== null && !this.isFollowing),
        t: () => this.look("top"),
        r: () => this.look("slant"),
      };
      if (!this.ready || event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "SELECT" || !keys[event.key]) return;
      event.preventDefault();
      document.activeElement?.blur(); // a focused button would take the space key as a click
      keys[event.key]();
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
