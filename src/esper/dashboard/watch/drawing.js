// Drawings as SVG: the growing network, the lives of its seeds, and the small curves of a table. All texts go through `escape`.

import { figure, shortened, withInterval } from "./figures.js";

// Stage -> its word, as `esper.runs.stages` has them; the page fills it in. The colours are CSS variables with the names of the stages.
export const STAGES = {};

const NAME = 24; // characters of a name in the network

export const colourOf = (stage) => `var(--${String(stage).toLowerCase()})`;

export function escape(text) {
  return String(text).replace(/[&<>"']/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[letter]);
}

export function sparkline(values, { width = 96, height = 22 } = {}) {
  if (values.length < 2) return "";
  const low = Math.min(...values);
  const span = Math.max(...values) - low || 1;
  const points = values.map((value, index) => `${((index / (values.length - 1)) * width).toFixed(1)},${(height - 2 - ((value - low) / span) * (height - 4)).toFixed(1)}`);
  return `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" aria-hidden="true"><polyline points="${points.join(" ")}" fill="none" stroke="currentColor" stroke-width="1.5"/></svg>`;
}

// The host as a row of its slots, in the order of the forward pass. A seed that adds depth is a branch above its slot, as wide as its
// parameters are many. A seed that adds width (kind "width") makes its module taller, by its share of the host's parameters. Both are filled
// up to their alpha, in the colour of their stage.
export function networkSvg(slots, hostParameters) {
  const longest = Math.max(0, ...slots.flatMap((slot) => [slot.slot, slot.blueprint ?? ""]).map((name) => Math.min(name.length, NAME)));
  const box = Math.max(104, 7.5 * longest + 12);
  const step = box + (slots.some((slot) => slot.blueprint) ? 70 : 30);
  const width = Math.max(slots.length, 1) * step + 70;
  const base = slots.some((slot) => slot.blueprint) ? 176 : 40; // seeds are drawn above the modules
  const parts = [`<line x1="34" y1="${base}" x2="${width - 34}" y2="${base}" class="wire"/>`, `<circle cx="26" cy="${base}" r="6" class="port"/>`, `<circle cx="${width - 26}" cy="${base}" r="6" class="port"/>`];
  slots.forEach((slot, index) => {
    const x = 50 + (step - box) / 2 + index * step;
    const middle = x + box / 2;
    const [word, colour] = [STAGES[slot.stage] ?? slot.stage, colourOf(slot.stage)];
    const isAlphaKnown = slot.alpha !== null && slot.alpha !== undefined;
    const alpha = Math.min(Math.max(Number(slot.alpha ?? 0), 0), 1);
    const title = [`${slot.slot}: ${word}`, ...(slot.blueprint ? [slot.blueprint] : []), ...(slot.blueprint && isAlphaKnown ? [`alpha ${alpha.toFixed(2)}`] : [])].join(", ");
    parts.push(`<g class="slot" data-slot="${escape(slot.slot)}" tabindex="0" role="button" aria-label="${escape(title)}"><title>${escape(title)}</title>`);
    const text = (y, words, look = "note", style = "") => parts.push(`<text x="${middle}" y="${y}" class="${look}"${style}>${escape(words)}</text>`);
    const isWide = slot.blueprint && slot.kind === "width";
    const share = Math.min((slot.parameters ?? 0) / Math.max(hostParameters ?? 1, 1), 1);
    if (slot.blueprint) {
      // A wider module is a strip above it; a branch leaves the wire before its slot and comes back behind it.
      const height = isWide ? 26 + Math.round(60 * share) : 40;
      const [left, top, size] = isWide ? [x, base - 12 - height, box] : [x + 8 - 12 * share, base - 104, box - 16 + 24 * share];
      if (!isWide) {
        parts.push(`<path d="M ${x - 16} ${base} C ${x - 16} ${base - 70}, ${left - 6} ${base - 84}, ${left} ${base - 84}" class="branch" stroke="${colour}"/>`);
        parts.push(`<path d="M ${left + size} ${base - 84} C ${left + size + 6} ${base - 84}, ${x + box + 16} ${base - 70}, ${x + box + 16} ${base}" class="branch" stroke="${colour}"/>`);
      }
      parts.push(`<rect x="${left}" y="${top}" width="${size}" height="${height}" rx="6" class="seed" stroke="${colour}"${isWide ? ' data-kind="width"' : ""}/>`);
      parts.push(`<rect x="${left}" y="${top + height * (1 - alpha)}" width="${size}" height="${height * alpha}" rx="6" fill="${colour}" opacity="0.35"/>`);
      text(isWide ? top + 16 : base - 80, shortened(slot.blueprint, NAME), "name");
      text(base - 114, `${word}${isAlphaKnown && alpha < 1 ? ` · alpha ${alpha.toFixed(2)}` : ""}`, "note", ` style="fill: ${colour}"`);
      if (slot.gain !== null && slot.gain !== undefined) {
        text(base - 146, "cost of removal");
        text(base - 130, withInterval(slot.gain, slot.gain_low, slot.gain_high, { isShort: true }));
      }
      if (slot.age !== undefined) text(base + 34, `${figure(slot.parameters ?? 0)} parameters`);
    }
    parts.push(`<rect x="${x}" y="${base - 16}" width="${box}" height="32" rx="6" class="module"/>`);
    text(base + 4, shortened(slot.slot, NAME), "name");
    if (!slot.blueprint && slot.stage !== "DORMANT") text(base - 26, word, "note", ` style="fill: ${colour}"`);
    parts.push("</g>");
  });
  return `<svg class="network" viewBox="0 0 ${width} ${base + 44}" width="${width}" height="${base + 44}" role="img" aria-label="the network with its slots">${parts.join("")}</svg>`;
}

// The life of one host, small: its validation losses beside those of its twin, and the moments when seeds grew, were kept or were pruned.
export function lifeSvg(life, { width = 150, height = 56 } = {}) {
  const own = life.val_losses;
  const twin = life.twin_losses;
  const values = [...own, ...twin].filter((value) => value !== null);
  if (values.length < 2) return "";
  const low = Math.min(...values);
  const span = Math.max(...values) - low || 1;
  const x = (epoch) => (epoch / Math.max(own.length, twin.length)) * (width - 4) + 2;
  const y = (value) => height - 6 - ((value - low) / span) * (height - 12);
  const curve = (losses) => losses.map((value, index) => (value === null ? "" : `${x(index + 1).toFixed(1)},${y(value).toFixed(1)}`)).join(" ");
  const parts = [`<polyline points="${curve(twin)}" class="twin"/>`, `<polyline points="${curve(own)}" class="own"/>`];
  for (const seed of life.seeds) {
    for (const entry of seed.stages) {
      if (!["GERMINATED", "FOSSILIZED", "PRUNED"].includes(entry.stage)) continue;
      parts.push(`<circle cx="${x(entry.epoch).toFixed(1)}" cy="4" r="3" fill="${colourOf(entry.stage)}"/>`);
    }
  }
  return `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" aria-hidden="true">${parts.join("")}</svg>`;
}

// One bar per seed from its birth to its end, in the colours of its stages.
export function timelineSvg(seeds, epochs) {
  const row = 26;
  const names = seeds.map((seed) => shortened(`${seed.number} ${seed.blueprint} after ${seed.slot}, ${seed.outcome}`, 52));
  const left = 16 + 5.8 * Math.max(0, ...names.map((name) => name.length));
  const width = left + 560;
  const x = (epoch) => left + (epoch / Math.max(epochs, 1)) * (width - left - 16);
  const parts = [];
  seeds.forEach((seed, index) => {
    const y = 8 + index * row;
    parts.push(`<g class="life" data-seed="${seed.number}" tabindex="0" role="button" aria-label="seed ${seed.number}">`);
    parts.push(`<text x="0" y="${y + 14}" class="name-left">${escape(names[index])}</text>`);
    const last = seed.outcome === "kept" || seed.ended === null ? epochs : seed.ended;
    seed.stages.forEach((entry, number) => {
      const next = Math.min(seed.stages[number + 1]?.epoch ?? last, last);
      const title = `${STAGES[entry.stage] ?? entry.stage} from epoch ${entry.epoch}: ${entry.reason}`;
      if (next > entry.epoch) parts.push(`<rect x="${x(entry.epoch)}" y="${y}" width="${Math.max(x(next) - x(entry.epoch), 2)}" height="18" rx="3" fill="${colourOf(entry.stage)}" opacity="0.85"><title>${escape(title)}</title></rect>`);
    });
    parts.push("</g>");
  });
  const bottom = 14 + seeds.length * row;
  for (let tick = 0; tick <= 4; tick += 1) {
    const epoch = Math.round((tick * epochs) / 4);
    parts.push(`<text x="${x(epoch)}" y="${bottom + 12}" class="note">${epoch}</text>`);
  }
  return `<svg class="timeline" viewBox="0 0 ${width} ${bottom + 18}" width="${width}" height="${bottom + 18}" role="img" aria-label="the lives of the seeds by epoch">${parts.join("")}</svg>`;
}
