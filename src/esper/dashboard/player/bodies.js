// Bodies of units: a few boxes per class in one geometry, nose along +x, feet at 0. Shades of grey, tinted by the team's colour.

import { THREE } from "nicegui-scene";

export const TEAM_COLOURS = ["#4da3ff", "#ff7b4a"];
export const NOBODY = "#c3cad2";

// [length, width, height] of a box, [x, y, z] of its centre, shade.
const DARK = 0.42, PLAIN = 0.85, BRIGHT = 1.35, GLOW = 2.4;
const mirrored = (...parts) => parts.flatMap(([size, [x, y, z], shade]) => [[size, [x, y, z], shade], [size, [x, -y, z], shade]]);
const BODIES = {
  scout: [
    ...mirrored([[0.14, 0.12, 0.62], [-0.1, 0.22, 0.36], DARK], [[0.36, 0.16, 0.1], [0.02, 0.22, 0.05], DARK]),
    [[0.72, 0.42, 0.32], [0, 0, 0.86], PLAIN],
    [[0.26, 0.26, 0.2], [0.42, 0, 0.86], BRIGHT],
    [[0.06, 0.24, 0.1], [0.54, 0, 0.9], GLOW],
    [[0.05, 0.05, 0.6], [-0.26, 0.12, 1.28], BRIGHT],
    [[0.5, 0.08, 0.08], [0.2, -0.26, 0.74], DARK],
  ],
  light: [
    ...mirrored([[0.2, 0.16, 0.72], [-0.05, 0.28, 0.38], DARK], [[0.46, 0.22, 0.12], [0.04, 0.28, 0.06], DARK]),
    [[0.74, 0.6, 0.46], [0, 0, 0.98], PLAIN],
    [[0.24, 0.3, 0.22], [0.44, 0, 1.04], BRIGHT],
    [[0.06, 0.26, 0.1], [0.55, 0, 1.06], GLOW],
    ...mirrored([[0.62, 0.13, 0.14], [0.22, 0.4, 0.92], BRIGHT], [[0.24, 0.2, 0.5], [-0.42, 0.2, 1.06], DARK]),
  ],
  medium: [
    ...mirrored([[0.28, 0.24, 0.8], [-0.02, 0.34, 0.42], DARK], [[0.56, 0.3, 0.14], [0.06, 0.34, 0.07], DARK]),
    [[0.8, 0.8, 0.6], [0, 0, 1.14], PLAIN],
    [[0.3, 0.34, 0.24], [0.44, 0, 1.26], BRIGHT],
    [[0.06, 0.28, 0.1], [0.58, 0, 1.28], GLOW],
    ...mirrored([[0.3, 0.24, 0.44], [0, 0.52, 1.1], PLAIN], [[0.7, 0.16, 0.16], [0.36, 0.54, 0.94], DARK]),
    ...mirrored([[0.42, 0.28, 0.26], [-0.08, 0.3, 1.58], BRIGHT]),
  ],
  heavy: [
    ...mirrored([[0.38, 0.34, 0.86], [-0.04, 0.42, 0.45], DARK], [[0.76, 0.42, 0.18], [0.06, 0.42, 0.09], DARK]),
    [[1.04, 1.06, 0.74], [0, 0, 1.26], PLAIN],
    [[0.3, 0.5, 0.3], [0.58, 0, 1.3], BRIGHT],
    [[0.06, 0.38, 0.11], [0.74, 0, 1.36], GLOW],
    ...mirrored([[0.5, 0.34, 0.6], [0.02, 0.68, 1.2], PLAIN]),
    [[1.35, 0.2, 0.2], [0.6, 0.7, 1.1], DARK],
    [[0.62, 0.26, 0.26], [0.42, -0.7, 1.1], DARK],
    [[0.56, 0.5, 0.36], [-0.16, -0.34, 1.8], BRIGHT],
    [[0.4, 0.3, 0.3], [-0.2, 0.38, 1.76], BRIGHT],
  ],
};

const made = new Map();

// Returns the geometry of a class; an unknown class looks like the known one nearest in weight.
export function bodyGeometry(name, tons) {
  const known = BODIES[name] ? name : tons < 28 ? "scout" : tons < 45 ? "light" : tons < 70 ? "medium" : "heavy";
  if (!made.has(known)) made.set(known, joined(BODIES[known]));
  return made.get(known);
}

function joined(parts) {
  const positions = [], normals = [], colours = [];
  for (const [[length, width, height], [x, y, z], shade] of parts) {
    const box = new THREE.BoxGeometry(length, width, height).translate(x, y, z).toNonIndexed();
    positions.push(...box.attributes.position.array);
    normals.push(...box.attributes.normal.array);
    colours.push(...new Array(box.attributes.position.array.length).fill(shade));
  }
  const geometry = new THREE.BufferGeometry();
  geometry.setAttribute("position", new THREE.Float32BufferAttribute(positions, 3));
  geometry.setAttribute("normal", new THREE.Float32BufferAttribute(normals, 3));
  geometry.setAttribute("color", new THREE.Float32BufferAttribute(colours, 3));
  return geometry;
}
