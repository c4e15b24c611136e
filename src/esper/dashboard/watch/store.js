// The series of runs in the browser. Points are asked for once; afterwards only the new ones.

const MOST = 2000; // points of one series; with more, all are asked for again, thinned by the server

export class SeriesStore {
  constructor() {
    this.runs = new Map(); // key of a run -> {generation, series: name -> {total, columns of equal length: steps, times, values, ...}}
    this.wanted = new Map(); // key of a run -> name -> number of charts that show it
    this.onNeed = () => {}; // called when a chart wants a series that was never asked for
  }

  static key(run) {
    return run.twin ? `${run.id}/twin` : run.id;
  }

  want(run, names) {
    const own = this.wanted.get(SeriesStore.key(run)) ?? new Map();
    for (const name of names) own.set(name, (own.get(name) ?? 0) + 1);
    this.wanted.set(SeriesStore.key(run), own);
    if (names.some((name) => !this.get(run, name))) this.onNeed();
  }

  release(run, names) {
    const own = this.wanted.get(SeriesStore.key(run));
    for (const name of names) {
      const left = (own?.get(name) ?? 1) - 1;
      if (left > 0) own.set(name, left);
      else own?.delete(name);
    }
  }

  get(run, name) {
    return this.runs.get(SeriesStore.key(run))?.series.get(name);
  }

  // Asks for new points of everything that is wanted. Returns whether anything changed.
  async refresh() {
    const answers = await Promise.all([...this.wanted].filter(([, names]) => names.size).map(([key, names]) => this.#ask(key, [...names.keys()])));
    return answers.some(Boolean);
  }

  async #ask(key, names) {
    const [id, twin] = key.split("/");
    const known = this.runs.get(key) ?? { generation: null, series: new Map() };
    const seen = {};
    for (const name of names) {
      const own = known.series.get(name);
      // New points are added to those that are here; only a much longer series is thinned by the server again.
      seen[name] = own && own.values.length <= MOST + MOST / 4 ? own.total : 0;
    }
    const body = JSON.stringify({ names, seen, generation: known.generation, twin: twin === "twin" });
    const response = await fetch(`/api/runs/${id}/series`, { method: "POST", body });
    if (!response.ok) return false;
    const answer = await response.json();
    const isAnew = answer.generation !== known.generation;
    const series = isAnew ? new Map() : known.series;
    let hasChanged = isAnew;
    for (const [name, { start, total, ...columns }] of Object.entries(answer.series)) {
      const before = series.get(name);
      if (!columns.values.length && start) continue;
      // Points that have changed are sent again.
      const again = start && before ? before.total - start : 0;
      const kept = start && before ? before.values.length - again : 0;
      const joined = Object.fromEntries(Object.entries(columns).map(([column, values]) => [column, kept ? [...before[column].slice(0, kept), ...values] : values]));
      hasChanged ||= !before || before.total !== total || before.values.length !== joined.values.length || columns.values.some((value, place) => value !== before.values[kept + place]);
      series.set(name, { total, ...joined });
    }
    this.runs.set(key, { generation: answer.generation, series });
    return hasChanged;
  }
}
