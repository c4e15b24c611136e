// The whole map as one mesh: the tops of the columns and the walls between neighbours of different height.
// Light is part of the colours of the vertices: corners beside higher neighbours and places in the sun's shadow are darker.

import { THREE } from "nicegui-scene";

const OPEN = 0, GLASS = 3, WATER = 4, LAVA = 5, FOLIAGE = 6; // codes in the file
// [colour, name] of each code.
export const GROUNDS = [
  ["#4b5450", "open ground"],
  ["#80838a", "wall, breaks"],
  ["#545e72", "reinforced wall"],
  ["#9fdcf5", "glass"],
  ["#2c6a94", "water"],
  ["#ff6a24", "lava"],
  ["#4f8a4c", "trees"],
];
const COLOURS = GROUNDS.map(([code]) => new THREE.Color(code));
const HIGH_GROUND = new THREE.Color("#8d8571");
const SUN = [-0.55, -0.35, 0.76]; // direction of the sun
const SHADOW = 0.55, CORNER = 0.13, SUNK = -0.18;

export function terrainMesh({ size, height, material }) {
  const heightMap = new HeightMap(size, height, material);
  const solid = new Quads(), clear = new Quads();
  for (let i = 0; i < size; i++) {
    for (let j = 0; j < size; j++) {
      const kind = heightMap.kind(i, j);
      if (kind === FOLIAGE) addTree(solid, heightMap, i, j);
      else addColumn(kind === GLASS ? clear : solid, heightMap, i, j);
    }
  }
  const geometry = Quads.geometry(solid, clear);
  const materials = [
    new THREE.MeshLambertMaterial({ vertexColors: true }),
    new THREE.MeshLambertMaterial({ vertexColors: true, transparent: true, opacity: 0.42, depthWrite: false }),
  ];
  return new THREE.Mesh(geometry, materials);
}

class HeightMap {
  constructor(size, height, material) {
    Object.assign(this, { size, height, material });
    this.half = size / 2;
  }

  kind(i, j) {
    return this.material[i * this.size + j];
  }

  isInside(i, j) {
    return i >= 0 && j >= 0 && i < this.size && j < this.size;
  }

  // Height as drawn: liquids are a little lower, and trees stand on the ground.
  top(i, j) {
    if (!this.isInside(i, j)) return -1.2;
    const kind = this.kind(i, j);
    if (kind === WATER || kind === LAVA) return SUNK;
    return kind === FOLIAGE ? 0 : this.height[i * this.size + j];
  }

  // Height that casts shadows: trees do, glass does not.
  shade(x, y) {
    const i = Math.floor(x), j = Math.floor(y);
    if (!this.isInside(i, j)) return -1;
    return this.kind(i, j) === GLASS ? 0 : this.height[i * this.size + j];
  }

  // 1 in full light; x and y in columns from the map's corner.
  light(x, y, z) {
    let covered = 0;
    for (const offset of [-0.25, 0.25]) {
      for (let step = 1; step < 14; step++) {
        const far = step * 0.7;
        if (this.shade(x + offset + SUN[0] * far, y + offset + SUN[1] * far) > z + 0.05 + SUN[2] * far) {
          covered += 0.5;
          break;
        }
      }
    }
    return 1 - covered * (1 - SHADOW);
  }

  // Light at a corner of a top: less for each higher column that meets there.
  corner(i, j, di, dj) {
    const own = this.top(i, j) + 0.3;
    const higher = [[di, 0], [0, dj], [di, dj]].filter(([a, b]) => this.top(i + a, j + b) > own).length;
    return 1 - CORNER * higher;
  }

  colour(i, j) {
    const kind = this.kind(i, j);
    const colour = COLOURS[kind].clone();
    if (kind === OPEN) colour.lerp(HIGH_GROUND, Math.min(1, this.height[i * this.size + j] / 6));
    const speckle = Math.abs(Math.sin(i * 127.1 + j * 311.7) * 43758.5453) % 1;
    return colour.multiplyScalar(kind === LAVA ? 0.75 + 0.6 * speckle : 0.94 + 0.12 * speckle);
  }
}

function addColumn(quads, heightMap, i, j) {
  const top = heightMap.top(i, j), colour = heightMap.colour(i, j);
  const glows = heightMap.kind(i, j) === LAVA;
  const corners = [[0, 0], [1, 0], [1, 1], [0, 1]];
  const lights = corners.map(([a, b]) => {
    const light = heightMap.light(i + 0.1 + 0.8 * a, j + 0.1 + 0.8 * b, top) * heightMap.corner(i, j, a ? 1 : -1, b ? 1 : -1);
    return glows ? 1 : light;
  });
  const at = ([a, b], z) => [i + a - heightMap.half, j + b - heightMap.half, z];
  quads.add(corners.map((corner) => at(corner, top)), [0, 0, 1], colour, lights);
  const sides = [[[1, 0], [1, 1], [1, 0, 0]], [[0, 1], [0, 0], [-1, 0, 0]], [[1, 1], [0, 1], [0, 1, 0]], [[0, 0], [1, 0], [0, -1, 0]]];
  for (const [from, to, normal] of sides) {
    const below = heightMap.top(i + normal[0], j + normal[1]);
    if (below >= top) continue;
    quads.add([at(from, below), at(to, below), at(to, top), at(from, top)], normal, colour, [0.55, 0.55, 0.92, 0.92]);
  }
}

// A tree becomes narrower towards its top, so that a wood does not look like a wall, and stands on ordinary ground.
function addTree(quads, heightMap, i, j) {
  const height = heightMap.height[i * heightMap.size + j];
  const colour = heightMap.colour(i, j);
  const lights = [[0.1, 0.1], [0.9, 0.1], [0.9, 0.9], [0.1, 0.9]].map(([a, b]) => Math.min(0.8, heightMap.light(i + a, j + b, 0)));
  const x = i - heightMap.half, y = j - heightMap.half;
  quads.add([[x, y, 0], [x + 1, y, 0], [x + 1, y + 1, 0], [x, y + 1, 0]], [0, 0, 1], COLOURS[OPEN], lights);
  const lean = Math.abs(Math.sin(i * 12.9898 + j * 78.233) * 43758.5453) % 1;
  const top = height * (0.75 + 0.25 * lean), cx = x + 0.4 + 0.2 * lean, cy = y + 0.6 - 0.2 * lean;
  const tiers = [[0.15, 0.46, 0.72], [0.42, 0.36, 1]]; // [share of the height where it starts, width, share where it ends]
  for (const [from, wide, to] of tiers) {
    const foot = [[-1, -1], [1, -1], [1, 1], [-1, 1]].map(([a, b]) => [cx + a * wide, cy + b * wide, top * from]);
    const tip = [cx, cy, top * to];
    for (let side = 0; side < 4; side++) {
      const a = foot[side], b = foot[(side + 1) % 4];
      const normal = [[0, -0.8, 0.6], [0.8, 0, 0.6], [0, 0.8, 0.6], [-0.8, 0, 0.6]][side];
      quads.add([a, b, tip, tip], normal, colour, [0.7, 0.7, 1.15, 1.15]);
    }
  }
}

class Quads {
  positions = [];
  normals = [];
  colours = [];
  indices = [];

  add(corners, normal, colour, lights) {
    const first = this.positions.length / 3;
    corners.forEach(([x, y, z], corner) => {
      this.positions.push(x, y, z);
      this.normals.push(...normal);
      this.colours.push(colour.r * lights[corner], colour.g * lights[corner], colour.b * lights[corner]);
    });
    // Split along the lighter diagonal; the other one would show as a crease.
    const turned = lights[0] + lights[2] < lights[1] + lights[3] ? 1 : 0;
    for (const corner of [0, 1, 2, 0, 2, 3]) this.indices.push(first + ((corner + turned) % 4));
  }

  static geometry(...groups) {
    const geometry = new THREE.BufferGeometry();
    const joined = (name) => groups.flatMap((group) => group[name]);
    geometry.setAttribute("position", new THREE.Float32BufferAttribute(joined("positions"), 3));
    geometry.setAttribute("normal", new THREE.Float32BufferAttribute(joined("normals"), 3));
    geometry.setAttribute("color", new THREE.Float32BufferAttribute(joined("colours"), 3));
    const indices = [];
    let vertices = 0;
    groups.forEach((group, index) => {
      geometry.addGroup(indices.length, group.indices.length, index);
      for (const vertex of group.indices) indices.push(vertex + vertices);
      vertices += group.positions.length / 3;
    });
    geometry.setIndex(indices);
    return geometry;
  }
}
