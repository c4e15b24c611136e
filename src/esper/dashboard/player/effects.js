// Shots, projectiles, blasts, smoke and the lines of the chosen unit. Everything is a function of time, so that seeking back works.

import { THREE } from "nicegui-scene";

// Unknown weapons look like the laser. `flies`: length and thickness of the projectile, and metres that it flies in a decision.
const LOOKS = {
  laser: { colour: "#ff5d7a", thick: 0.07 },
  flamer: { colour: "#ff9a2e", puffs: 7 },
  painter: { colour: "#5ff0b0", thick: 0.04 },
  missile: { colour: "#ffd9a0", flies: [0.7, 0.16, 3], blast: 2.5 },
  gauss: { colour: "#a8e6ff", flies: [1.9, 0.13, 10], blast: 1.5 },
  autocannon: { colour: "#ffe27a", flies: [0.8, 0.1, 6.25], blast: 0.6 },
  smoke: { colour: "#b8c0c8", flies: [0.4, 0.3, 3.75], blast: 0 },
};
for (const look of Object.values(LOOKS)) look.colour = new THREE.Color(look.colour);
const look = (weapon) => LOOKS[weapon] ?? LOOKS.laser;

export const weaponColour = (weapon) => `#${look(weapon).colour.getHexString()}`;

const MUZZLE = 1.2; // metres above the feet
const AHEAD = 7; // length of a shot without a target, in metres
const FIRE = new THREE.Color("#ff8a3c");
const STEAM = new THREE.Color("#9fb4c4");
const SEEN = new THREE.Color("#fff2b8"), SENSED = new THREE.Color("#8fb3d9"), AIM = new THREE.Color("#ff4d5e");
const X = new THREE.Vector3(1, 0, 0);

// A fixed number of copies of one shape. Those that were put since `begin` are shown.
class Copies {
  constructor(scene, geometry, material, most) {
    this.mesh = new THREE.InstancedMesh(geometry, material, most);
    this.mesh.instanceMatrix.setUsage(THREE.DynamicDrawUsage);
    this.mesh.setColorAt(0, new THREE.Color());
    this.mesh.frustumCulled = false;
    this.most = most;
    this.matrix = new THREE.Matrix4();
    this.colour = new THREE.Color();
    this.turn = new THREE.Quaternion();
    this.place = new THREE.Vector3();
    this.size = new THREE.Vector3();
    scene.add(this.mesh);
  }

  begin() {
    this.mesh.count = 0;
  }

  put(place, size, turn, colour, strength) {
    if (this.mesh.count >= this.most) return;
    this.mesh.setMatrixAt(this.mesh.count, this.matrix.compose(place, turn, size));
    this.mesh.setColorAt(this.mesh.count, this.colour.copy(colour).multiplyScalar(strength));
    this.mesh.count++;
  }

  blob(place, radius, colour, strength) {
    this.put(place, this.size.setScalar(radius), this.turn.identity(), colour, strength);
  }

  // A rod from one point to another.
  rod(from, to, thick, colour, strength) {
    const way = this.place.copy(to).sub(from);
    const length = way.length();
    if (length < 1e-3) return;
    this.turn.setFromUnitVectors(X, way.divideScalar(length));
    const middle = way.copy(from).add(to).multiplyScalar(0.5);
    this.put(middle, this.size.set(length, thick, thick), this.turn, colour, strength);
  }

  end() {
    this.mesh.instanceMatrix.needsUpdate = true;
    this.mesh.instanceColor.needsUpdate = true;
  }
}

// Round, soft sprites that always face the camera.
class Puffs extends Copies {
  constructor(scene, blending, opacity, most) {
    const material = new THREE.ShaderMaterial({
      ...{ blending, transparent: true, depthWrite: false, uniforms: { opacity: { value: opacity } } },
      vertexShader: `
        varying vec2 place;
        varying vec3 colour;
        void main() {
          place = position.xy;
          colour = instanceColor;
          vec4 centre = modelViewMatrix * instanceMatrix * vec4(0.0, 0.0, 0.0, 1.0);
          float radius = length(instanceMatrix[0].xyz);
          // Draw it in front of its true depth; otherwise the ground would cut it off in a straight line.
          gl_Position = projectionMatrix * (centre + vec4(position.xy * radius, 0.8 * radius, 0.0));
        }`,
      fragmentShader: `
        uniform float opacity;
        varying vec2 place;
        varying vec3 colour;
        void main() {
          float inside = max(0.0, 1.0 - dot(place, place));
          gl_FragColor = vec4(colour, opacity * inside * inside);
          #include <colorspace_fragment>
        }`,
    });
    super(scene, new THREE.PlaneGeometry(2, 2), material, most);
  }
}

export class Effects {
  constructor(scene) {
    const rod = new THREE.CylinderGeometry(1, 1, 1, 6, 1, true).rotateZ(Math.PI / 2);
    const light = { transparent: true, blending: THREE.AdditiveBlending, depthWrite: false };
    const over = { transparent: true, opacity: 0.75, depthTest: false, depthWrite: false };
    this.beams = new Copies(scene, rod, new THREE.MeshBasicMaterial(light), 512);
    this.shells = new Copies(scene, new THREE.IcosahedronGeometry(1, 2), new THREE.MeshBasicMaterial(light), 1024);
    this.lights = new Puffs(scene, THREE.AdditiveBlending, 1, 1024);
    this.smoke = new Puffs(scene, THREE.NormalBlending, 0.4, 512);
    this.lines = new Copies(scene, rod, new THREE.MeshBasicMaterial(over), 2048);
    this.all = [this.beams, this.shells, this.lights, this.smoke, this.lines];
  }

  draw(replay, time, chosen) {
    for (const copies of this.all) copies.begin();
    const frame = Math.floor(time);
    for (const event of [frame, frame + 1]) {
      const age = time - (event - 1); // age of the events in the decision before frame `event`, in decisions
      if (event < 1 || event > replay.last || age <= 0) continue;
      this.#shots(replay, time, event, age);
      this.#blasts(replay, event, age);
    }
    this.#projectiles(replay, frame, time - frame);
    this.#clouds(replay, frame, time - frame);
    this.#steam(replay, time);
    if (chosen !== null) this.#senses(replay, time, chosen);
    for (const copies of this.all) copies.end();
  }

  #shots(replay, time, event, age) {
    const strength = Math.max(0, Math.min(1, 1.5 - age));
    for (let unit = 0; unit < replay.units; unit++) {
      const shot = replay.shot(event, unit);
      if (!shot || !strength) continue;
      const { colour, thick, puffs, flies } = look(shot.weapon);
      const from = muzzle(replay, time, unit, 0.8);
      if (flies) {
        this.lights.blob(from, 0.9 * strength, colour, Math.max(0, 1 - age));
        if (shot.target >= 0 && !replay.shotFlies(event, unit)) this.#tracer(from, muzzle(replay, time, shot.target, 0), shot.weapon, strength);
        continue;
      }
      const to = shot.target >= 0 ? muzzle(replay, time, shot.target, 0) : muzzle(replay, time, unit, AHEAD);
      if (puffs) {
        for (let puff = 1; puff <= puffs; puff++) {
          const share = ((puff + age * 2) % puffs) / puffs;
          this.lights.blob(from.clone().lerp(to, share), 0.25 + 0.8 * share, colour, strength * (1 - 0.6 * share));
        }
        continue;
      }
      this.beams.rod(from, to, thick, colour, strength);
      this.beams.rod(from, to, thick * 3, colour, 0.3 * strength);
      this.lights.blob(to, 0.7 * strength, colour, strength);
    }
  }

  // The blast of a shot that burst within its decision, at its target or at an obstacle.
  #tracer(from, to, weapon, strength) {
    const { colour, flies, blast } = look(weapon);
    const [, thick, most] = flies;
    const end = from.clone().lerp(to, Math.min(1, most / Math.max(1e-3, from.distanceTo(to))));
    this.beams.rod(from, end, thick, colour, strength);
    if (blast) this.lights.blob(end, blast * (1.3 - 0.8 * strength), FIRE, 1.4 * strength);
  }

  #blasts(replay, event, age) {
    for (let unit = 0; unit < replay.units; unit++) {
      if (!replay.isAlive(event - 1, unit) || replay.isAlive(event, unit)) continue;
      const share = age / 2;
      this.lights.blob(muzzle(replay, event, unit, 0), 1.5 + 3.5 * share, FIRE, 2 * (1 - share));
    }
    for (let place = 0; place < replay.projectiles; place++) {
      const before = replay.row("frames/projectiles", event - 1, place);
      if (!before[0] || replay.goesOn(event - 1, place)) continue;
      const { blast } = look(replay.info.weapons[before[1]]);
      const share = (age - 0.25) / 1.1;
      if (!blast || share < 0 || share > 1) continue;
      this.lights.blob(new THREE.Vector3(before[2], before[3], before[4]), blast * (0.5 + 0.8 * share), FIRE, 1.4 * (1 - share));
    }
  }

  #projectiles(replay, frame, share) {
    const at = new THREE.Vector3(), way = new THREE.Vector3(), size = new THREE.Vector3(), turn = new THREE.Quaternion();
    const next = Math.min(frame + 1, replay.last);
    for (let place = 0; place < replay.projectiles; place++) {
      const now = replay.row("frames/projectiles", frame, place), then = replay.row("frames/projectiles", next, place);
      const stays = replay.goesOn(frame, place);
      if (!now[0] || (!stays && share > 0.3)) continue;
      const before = replay.row("frames/projectiles", Math.max(0, frame - 1), place);
      if (stays) way.set(then[2] - now[2], then[3] - now[3], then[4] - now[4]);
      else if (frame > 0 && replay.goesOn(frame - 1, place)) way.set(now[2] - before[2], now[3] - before[3], now[4] - before[4]);
      else way.set(0, 0, 0);
      at.set(now[2], now[3], now[4]).addScaledVector(way, stays ? share : 0);
      const { flies, colour } = look(replay.info.weapons[now[1]]);
      const [length, thick] = flies ?? [0.5, 0.2];
      if (way.lengthSq() > 1e-6) turn.setFromUnitVectors(X, way.normalize());
      else turn.identity();
      this.shells.put(at, size.set(length, thick, thick), turn, colour, 1.3);
      this.lights.blob(at, length, colour, 0.5);
    }
  }

  #clouds(replay, frame, share) {
    const grey = new THREE.Color("#8b949d"), at = new THREE.Vector3();
    const radius = replay.info.cloud_radius;
    for (let place = 0; place < replay.clouds; place++) {
      const [x, y, z, left] = replay.row("frames/clouds", frame, place);
      const rest = left - share * replay.info.decision_s;
      if (left <= 0 || rest <= 0) continue;
      const full = radius * Math.min(1, 0.4 + rest / 2);
      for (let lump = 0; lump < 7; lump++) {
        const angle = lump * 2.4 + place, far = lump ? 0.5 : 0;
        at.set(x + far * full * Math.cos(angle), y + far * full * Math.sin(angle), z + 0.3 * full * (lump % 3));
        this.smoke.blob(at, full * (lump ? 0.8 : 1), grey, 1);
      }
    }
  }

  #steam(replay, time) {
    const frame = Math.floor(time);
    for (let unit = 0; unit < replay.units; unit++) {
      if (!replay.isAlive(frame, unit) || !replay.unit(frame, unit, "venting")) continue;
      for (let puff = 0; puff < 4; puff++) {
        const share = (time * 0.6 + puff / 4) % 1;
        const at = muzzle(replay, time, unit, -0.4);
        at.z += 0.6 + 2 * share;
        this.lights.blob(at, 0.4 + 0.7 * share, STEAM, 0.6 * (1 - share));
      }
    }
  }

  // Lines from the chosen unit: solid to units that it sees, dashed to units that it senses, red to its target.
  #senses(replay, time, chosen) {
    const frame = Math.floor(time);
    if (!replay.isAlive(frame, chosen)) return;
    const from = muzzle(replay, time, chosen, 0);
    replay.sensed(frame, chosen).forEach((how, other) => {
      if (!how || other === chosen) return;
      const to = muzzle(replay, time, other, 0);
      if (how === 2) this.lines.rod(from, to, 0.06, SEEN, 1);
      else this.#broken(from, to, SENSED);
    });
    const action = replay.action(frame, chosen);
    if (action?.weapon && action.target >= 0) this.lines.rod(from, muzzle(replay, time, action.target, 0), 0.13, AIM, 1);
  }

  #broken(from, to, colour) {
    const pieces = Math.max(2, Math.round(from.distanceTo(to) / 1.4));
    for (let piece = 0; piece < pieces; piece++) {
      const [start, end] = [piece / pieces, (piece + 0.5) / pieces].map((share) => from.clone().lerp(to, share));
      this.lines.rod(start, end, 0.05, colour, 1);
    }
  }
}

function muzzle(replay, time, unit, ahead) {
  const { x, y, z, heading } = replay.pose(Math.min(time, replay.last), unit);
  return new THREE.Vector3(x + ahead * Math.cos(heading), y + ahead * Math.sin(heading), z + MUZZLE);
}
