// A replay from the server: a safetensors file (8 bytes length, JSON, bytes of the tensors), read by name and index.
// Python has checked it: every tensor is there, in the right shape.

// All types in the table of esper/replay_file.py.
const ARRAYS = { F32: Float32Array, I32: Int32Array, I8: Int8Array, U8: Uint8Array };
const FARTHEST = 14; // most metres that a projectile flies in one decision; a longer distance means another projectile in the same slot

export async function fetchReplay(url) {
  const response = await fetch(url);
  if (!response.ok) throw new Error(await response.text());
  return new Replay(await response.arrayBuffer());
}

export class Replay {
  constructor(buffer) {
    const length = Number(new DataView(buffer).getBigUint64(0, true));
    const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
    this.info = JSON.parse(header.__metadata__.info);
    this.tensors = {};
    for (const [name, { dtype, shape, data_offsets }] of Object.entries(header)) {
      if (name === "__metadata__") continue;
      if (!ARRAYS[dtype]) {
        const known = Object.keys(ARRAYS).join(", ");
        throw new Error(`${name} is of type ${dtype}, and this page reads ${known}; watch it with the esper that recorded it`);
      }
      const bytes = buffer.slice(8 + length + data_offsets[0], 8 + length + data_offsets[1]);
      this.tensors[name] = { shape, data: new ARRAYS[dtype](bytes) };
    }
    this.size = this.info.size;
    this.units = this.info.unit_classes.length;
    this.teamSize = this.units / 2;
    this.frames = this.tensors["frames/units"].shape[0];
    this.last = this.frames - 1;
    this.projectiles = this.tensors["frames/projectiles"].shape[1];
    this.places = Math.floor(this.projectiles / this.units); // projectile slots of one unit
    this.clouds = this.tensors["frames/clouds"].shape[1];
    this.column = Object.fromEntries(this.info.unit_columns.map((name, index) => [name, index]));
    this.names = this.info.unit_classes.map((name, unit) => `${name} ${(unit % this.teamSize) + 1}`);
    // Smaller battles leave units out: a unit that is dead at the start takes no part.
    this.isPresent = this.names.map((_, unit) => this.unit(0, unit, "hit_points") > 0);
    this.most = this.names.map((_, unit) => this.#mostOf(unit));
  }

  #mostOf(unit) {
    const table = this.info.class_table[this.info.unit_classes[unit]];
    const highest = (name) => {
      let most = 0;
      for (let frame = 0; frame < this.frames; frame++) most = Math.max(most, this.unit(frame, unit, name));
      return most;
    };
    return {
      hit_points: table.hit_points ?? highest("hit_points"),
      legs: table.legs ?? highest("legs"),
      heat: table.heat_cap ?? highest("heat"),
      stability: table.stability ?? highest("stability"),
      fuel: table.fuel ?? highest("fuel"),
    };
  }

  team(unit) {
    return unit < this.teamSize ? 0 : 1;
  }

  row(name, frame, index) {
    const { shape, data } = this.tensors[name];
    const width = shape[2];
    const start = (frame * shape[1] + index) * width;
    return data.subarray(start, start + width);
  }

  unit(frame, unit, column) {
    const { shape, data } = this.tensors["frames/units"];
    return data[(frame * shape[1] + unit) * shape[2] + this.column[column]];
  }

  isAlive(frame, unit) {
    return this.unit(frame, unit, "hit_points") > 0;
  }

  position(frame, unit) {
    return [this.unit(frame, unit, "x"), this.unit(frame, unit, "y"), this.unit(frame, unit, "z")];
  }

  // Position and heading between two frames.
  pose(time, unit) {
    const frame = Math.min(Math.floor(time), this.last);
    const next = Math.min(frame + 1, this.last);
    const share = time - frame;
    const between = (column) => {
      const from = this.unit(frame, unit, column);
      return from + share * (this.unit(next, unit, column) - from);
    };
    const from = this.unit(frame, unit, "heading");
    const turn = this.unit(next, unit, "heading") - from;
    const shortest = turn - 2 * Math.PI * Math.round(turn / (2 * Math.PI));
    return { x: between("x"), y: between("y"), z: between("z"), heading: from + share * shortest };
  }

  shot(frame, unit) {
    const [weapon, target] = this.row("frames/shots", frame, unit);
    return weapon < 0 ? null : { weapon: this.info.weapons[weapon], target };
  }

  // Whether the projectile that the unit fired in the decision before this frame still flies. If it burst within the decision, no frame
  // contains it.
  shotFlies(frame, unit) {
    const [weapon] = this.row("frames/shots", frame, unit);
    for (let place = unit * this.places; place < (unit + 1) * this.places; place++) {
      const now = this.row("frames/projectiles", frame, place);
      if (now[0] > 0 && now[1] === weapon && !(frame > 0 && this.goesOn(frame - 1, place))) return true;
    }
    return false;
  }

  // Whether a slot holds the same projectile one frame later. A projectile that was just fired is nearer to its unit than the one before.
  goesOn(frame, place) {
    const next = Math.min(frame + 1, this.last);
    const now = this.row("frames/projectiles", frame, place), then = this.row("frames/projectiles", next, place);
    if (!now[0] || !then[0] || now[1] !== then[1] || distance(now.subarray(2), then.subarray(2)) >= FARTHEST) return false;
    const unit = Math.floor(place / this.places);
    if (unit >= this.units || this.row("frames/shots", next, unit)[0] !== now[1]) return true;
    return distance(then.subarray(2), this.position(next, unit)) >= distance(now.subarray(2), this.position(frame, unit));
  }

  // 0 not sensed, 1 sensed, 2 seen.
  sensed(frame, unit) {
    return this.row("frames/sensed", frame, unit);
  }

  score(frame) {
    const { data } = this.tensors["frames/score"];
    return [data[2 * frame], data[2 * frame + 1]];
  }

  holder(frame) {
    return this.tensors["frames/holder"].data[frame];
  }

  // The unit's decision at this frame; null after the end of the battle.
  action(frame, unit) {
    if (frame >= this.last) return null;
    const one = (name) => this.tensors[name].data[frame * this.units + unit];
    const [forward, strafe, yaw, jets] = this.row("actions/motion", frame, unit);
    const fire = one("actions/fire");
    return {
      ...{ forward, strafe, yaw, jets },
      weapon: fire > 0 ? this.info.weapons[fire - 1] : null,
      target: one("actions/target"),
      vent: one("actions/vent") > 0,
    };
  }

  // Number of terrain columns that are destroyed at this frame.
  changesUntil(frame) {
    const { shape, data } = this.tensors["terrain/changes"];
    let count = 0;
    for (let row = 0; row < shape[0]; row++) if (data[3 * row] <= frame) count++;
    return count;
  }

  terrain(frame) {
    const height = this.tensors["terrain/height"].data.slice();
    const material = this.tensors["terrain/material"].data.slice();
    const { shape, data } = this.tensors["terrain/changes"];
    for (let row = 0; row < shape[0]; row++) {
      if (data[3 * row] > frame) continue;
      const column = data[3 * row + 1] * this.size + data[3 * row + 2];
      height[column] = 0;
      material[column] = 0;
    }
    return { size: this.size, height, material };
  }
}

function distance(one, other) {
  return Math.hypot(one[0] - other[0], one[1] - other[1], one[2] - other[2]);
}
