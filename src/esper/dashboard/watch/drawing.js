// Drawings as SVG: the growing network, the lives of its seeds, and the small curves of a table. All texts go through `escape`.

export const STAGES = {
  DORMANT: { color: "#9aa4ae", word: "empty" },
  GERMINATED: { color: "#56b4e9", word: "germinated" },
  TRAINING: { color: "#56b4e9", word: "learns in the shadow" },
  BLENDING: { color: "#cc79a7", word: "blends" },
  HOLDING: { color: "#e69f00", word: "on probation" },
  FOSSILIZED: { color: "#009e73", word: "kept" },
  PRUNED: { color: "#d55e00", word: "pruned" },
  EMBARGOED: { color: "#7a7a7a", word: "under embargo" },
};

export function escape(text) {
  return String(text).replace(/[&<>"']/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" })[letter]);
}

function short(text, most) {
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
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
  const step = 148;
  const width = Math.max(slots.length, 1) * step + 130;
  const base = slots.some((slot) => slot.blueprint) ? 176 : 56; // seeds are drawn above the modules
  const parts = [`<line x1="34" y1="${base}" x2="${width - 34}" y2="${base}" class="wire"/>`, `<circle cx="26" cy="${base}" r="6" class="port"/>`, `<circle cx="${width - 26}" cy="${base}" r="6" class="port"/>`];
  slots.forEach((slot, index) => {
    const x = 70 + index * step;
    const stage = STAGES[slot.stage] ?? STAGES.DORMANT;
    const isAlphaKnown = slot.alpha !== null && slot.alpha !== undefined;
    const title = [`${slot.slot}: ${stage.word}`, ...(slot.blueprint ? [slot.blueprint] : []), ...(slot.blueprint && isAlphaKnown ? [`alpha ${Number(slot.alpha).toFixed(2)}`] : [])].join(", ");
    parts.push(`<g class="slot" data-slot="${escape(slot.slot)}" tabindex="0" role="button" aria-label="${escape(title)}"><title>${escape(title)}</title>`);
    const alpha = Math.min(Math.max(Number(slot.alpha ?? 0), 0), 1);
    const isWide = slot.blueprint && slot.kind === "width";
    if (isWide) parts.push(wideSeed(slot, alpha, x, base, stage, hostParameters));
    parts.push(`<rect x="${x}" y="${base - 16}" width="104" height="32" rx="6" class="module"/>`);
    parts.push(`<text x="${x + 52}" y="${base + 4}" class="name">${escape(short(slot.slot, 15))}</text>`);
    if (slot.blueprint && !isWide) {
      const share = Math.min((slot.parameters ?? 0) / Math.max(hostParameters ?? 1, 1), 1.5);
      const size = Math.max(64 + Math.round(40 * Math.min(share, 1)), 7 * short(slot.blueprint, 14).length + 14);
      const left = x + 52 - size / 2;
      parts.push(`<path d="M ${x - 14} ${base} C ${x - 14} ${base - 70}, ${left - 6} ${base - 84}, ${left} ${base - 84}" class="branch" stroke="${stage.color}"/>`);
      parts.push(`<path d="M ${left + size} ${base - 84} C ${left + size + 6} ${base - 84}, ${x + 118} ${base - 70}, ${x + 118} ${base}" class="branch" stroke="${stage.color}"/>`);
      parts.push(`<rect x="${left}" y="${base - 104}" width="${size}" height="40" rx="6" class="seed" stroke="${stage.color}"/>`);
      parts.push(`<rect x="${left}" y="${base - 64 - 40 * alpha}" width="${size}" height="${40 * alpha}" rx="6" fill="${stage.color}" opacity="0.35"/>`);
      parts.push(`<text x="${x + 52}" y="${base - 80}" class="name">${escape(short(slot.blueprint, 14))}</text>`);
    }
    if (slot.blueprint) {
      parts.push(`<text x="${x + 52}" y="${base - 114}" class="note" style="fill: ${stage.color}">${escape(stage.word)}${isAlphaKnown ? ` · α ${alpha.toFixed(2)}` : ""}</text>`);
      if (slot.gain !== null && slot.gain !== undefined) {
        const [gain, low, high] = [slot.gain, slot.gain_low, slot.gain_high].map((value) => Number(value).toPrecision(2));
        parts.push(`<text x="${x + 52}" y="${base - 130}" class="note">${gain} [${low}, ${high}]</text>`);
      }
      if (slot.age !== undefined) parts.push(`<text x="${x + 52}" y="${base + 34}" class="note">age ${Number(slot.age ?? 0)} · ${Number(slot.parameters ?? 0).toLocaleString("en")} weights</text>`);
    } else if (slot.stage !== "DORMANT") {
      parts.push(`<text x="${x + 52}" y="${base - 26}" class="note" style="fill: ${stage.color}">${escape(stage.word)}</text>`);
    }
    parts.push("</g>");
  });
  return `<svg class="network" viewBox="0 0 ${width} ${base + 50}" width="${width}" height="${base + 50}" role="img" aria-label="the network with its slots">${parts.join("")}</svg>`;
}

// The part that a seed of kind "width" adds to its module: a strip above it, filled up to its alpha.
function wideSeed(slot, alpha, x, base, stage, hostParameters) {
  const share = Math.min((slot.parameters ?? 0) / Math.max(hostParameters ?? 1, 1), 1);
  const height = 26 + Math.round(60 * share);
  const top = base - 12 - height;
  return (
    `<rect x="${x}" y="${top}" width="104" height="${height}" rx="6" class="seed" stroke="${stage.color}" data-kind="width"/>` +
    `<rect x="${x}" y="${top + height * (1 - alpha)}" width="104" height="${height * alpha}" rx="6" fill="${stage.color}" opacity="0.35"/>` +
    `<text x="${x + 52}" y="${top + 15}" class="name">${escape(short(slot.blueprint, 14))}</text>`
  );
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
      parts.push(`<circle cx="${x(entry.epoch).toFixed(1)}" cy="4" r="3" fill="${STAGES[entry.stage].color}"/>`);
    }
  }
  return `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" aria-hidden="true">${parts.join("")}</svg>`;
}

// One bar per seed from its birth to its end, in the colours of its stages.
export function timelineSvg(seeds, epochs) {
  const row = 26;
  const left = 220;
  const width = 760;
  const x = (epoch) => left + (epoch / Math.max(epochs, 1)) * (width - left - 16);
  const parts = [];
  seeds.forEach((seed, index) => {
    const y = 8 + index * row;
    parts.push(`<g class="life" data-seed="${seed.number}" tabindex="0" role="button" aria-label="seed ${seed.number}">`);
    parts.push(`<text x="0" y="${y + 14}" class="name-left">${seed.number} ${escape(short(`${seed.blueprint} · ${seed.slot}`, 24))} <tspan class="note-left">${escape(seed.outcome)}</tspan></text>`);
    const end = seed.ended ?? epochs;
    seed.stages.forEach((entry, number) => {
      const next = Math.min(seed.stages[number + 1]?.epoch ?? end, end);
      const stage = STAGES[entry.stage] ?? STAGES.DORMANT;
      if (next > entry.epoch) {
        parts.push(`<rect x="${x(entry.epoch)}" y="${y}" width="${Math.max(x(next) - x(entry.epoch), 2)}" height="18" rx="3" fill="${stage.color}" opacity="0.85"><title>${escape(`${stage.word} from epoch ${entry.epoch}: ${entry.reason}`)}</title></rect>`);
      }
    });
    if (seed.outcome === "kept") parts.push(`<rect x="${x(end)}" y="${y + 6}" width="${x(epochs) - x(end)}" height="6" fill="${STAGES.FOSSILIZED.color}"><title>kept since epoch ${end}</title></rect>`);
    parts.push("</g>");
  });
  const bottom = 14 + seeds.length * row;
  for (let tick = 0; tick <= 4; tick += 1) {
    const epoch = Math.round((tick * epochs) / 4);
    parts.push(`<text x="${x(epoch)}" y="${bottom + 12}" class="note">${epoch}</text>`);
  }
  return `<svg class="timeline" viewBox="0 0 ${width} ${bottom + 18}" width="${width}" height="${bottom + 18}" role="img" aria-label="the lives of the seeds by epoch">${parts.join("")}</svg>`;
}
