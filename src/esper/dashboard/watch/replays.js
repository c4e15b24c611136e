// The battles of an arena run: the player, which follows the newest one while the run trains, and a list of all replays.

const template = `
<section class="card battles" data-battles>
  <header><h3>battles</h3>
    <span v-if="replays.length" class="quiet" data-playing>{{ chosen === null ? "plays the newest, and each newer one after it" : "plays " + chosen }}</span><span class="spacer"></span>
    <button v-if="chosen !== null" type="button" class="tiny" data-newest @click="play(null)">newest</button>
    <a v-if="replays.length" class="tiny" :href="address(chosen)" target="_blank">own page</a></header>
  <p v-if="!replays.length && isTraining" class="quiet">No battle is recorded yet. The next evaluation records one, unless eval_replays or eval_battles is 0.</p>
  <p v-else-if="!replays.length" class="quiet">No battle is recorded. Record one: <code>esper arena eval {{ folder }} --replay {{ folder }}</code></p>
  <template v-else>
    <iframe ref="player" :src="first" loading="lazy" title="the battle in 3D"></iframe>
    <div class="scroll"><table><thead><tr><th>battle</th><th class="wide">players</th><th>result</th><th class="number">length</th><th class="wide">recorded</th></tr></thead>
      <tbody><tr v-for="row in replays" :key="row.url" :class="{ 'is-here': row.name === chosen }" :data-replay="row.name">
        <td><button type="button" class="link" @click="play(row.name)">{{ row.name }}</button></td>
        <template v-if="row.problem"><td colspan="4"><small>{{ row.problem }}</small></td></template>
        <template v-else><td class="wide">{{ row.players.join(" against ") }}</td><td>{{ row.winner === null ? "a draw" : row.players[row.winner] + " wins" }}</td>
          <td class="number">{{ clock(row.seconds) }}</td><td class="wide"><small>{{ ago(row.time) }}</small></td></template>
      </tr></tbody></table></div>
  </template>
</section>`;

export const ReplayList = {
  props: ["run", "folder", "replays", "isTraining", "ago"],
  template,
  data: () => ({ chosen: null }), // the name of a replay; null: the newest
  created() {
    this.first = this.address(null); // later addresses are set without loading the page again
  },
  methods: {
    address(name) {
      return `/?replays=${this.run}#${name === null ? "live" : `play=${encodeURIComponent(name)}`}`;
    },
    play(name) {
      this.chosen = name;
      this.$refs.player.contentWindow.location.replace(this.address(name));
      this.$refs.player.scrollIntoView({ block: "nearest" });
    },
    clock(seconds) {
      return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
    },
  },
};
