// The battle in 3D: terrain, zone, units, effects, camera. Draws a replay at a given time, and reports which unit was clicked.

import { OrbitControls, THREE } from "nicegui-scene";
import { NOBODY, TEAM_COLOURS } from "./bodies.js";
import { Effects } from "./effects.js";
import { Figure } from "./figures.js";
import { terrainMesh } from "./terrain.js";

const FOLLOWED = 20; // distance in metres from which a unit is followed
const GLIDE_S = 0.7; // seconds of the way to a unit, and back
const SLOW_S = 0.1; // time between pictures from which fewer pixels are drawn
const COARSEST = 0.5; // pixels drawn for one of the page, along one side
const FAR = 85; // distance in metres from which labels are short
const LABEL = { wide: 48, narrow: 34, high: 22 }; // size of a label in pixels
const NEAR_CLICK = 26; // pixels around a unit in which a click chooses it

export class Stage {
  constructor(container, onPick) {
    this.container = container;
    this.onPick = onPick;
    this.renderer = new THREE.WebGLRenderer({ antialias: true });
    this.renderer.setPixelRatio(Math.min(window.devicePixelRatio, 2));
    this.labels = document.createElement("div");
    this.labels.className = "unit-labels";
    container.append(this.renderer.domElement, this.labels);
    this.scene = new THREE.Scene();
    this.scene.background = new THREE.Color();
    this.camera = new THREE.PerspectiveCamera(38, 1, 0.5, 1000);
    this.camera.up.set(0, 0, 1);
    this.controls = new OrbitControls(this.camera, this.renderer.domElement);
    this.controls.maxPolarAngle = 0.47 * Math.PI;
    this.controls.addEventListener("change", () => (this.isStale = true));
    this.controls.addEventListener("start", () => this.#give());
    this.followed = this.glide = null; // the unit in the middle, and the way of the camera to it or back
    this.margin = 0; // pixels on either side that panels cover
    this.isStill = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.#light();
    this.#listen();
    this.isStale = true;
  }

  #light() {
    const sun = new THREE.DirectionalLight("#fff4e0", 2.4);
    sun.position.set(-0.55, -0.35, 0.76);
    this.scene.add(new THREE.HemisphereLight("#dfeaf5", "#6a6258", 2.5), sun);
  }

  #listen() {
    let down = null;
    const canvas = this.renderer.domElement;
    canvas.addEventListener("pointerdown", (event) => (down = [event.clientX, event.clientY]));
    canvas.addEventListener("pointerup", (event) => {
      if (down && Math.hypot(event.clientX - down[0], event.clientY - down[1]) < 5) this.onPick(this.#unitAt(event));
      down = null;
    });
    this.observer = new ResizeObserver(() => this.#resize());
    this.observer.observe(this.container);
  }

  load(replay) {
    const before = this.content;
    if (before) this.scene.remove(before);
    this.labels.replaceChildren();
    this.terrain = null;
    this.replay = replay;
    this.content = new THREE.Group();
    this.scene.add(this.content);
    this.figures = replay.names.map((_, unit) => unit).filter((unit) => replay.isPresent[unit]).map((unit) => new Figure(replay, unit, this.labels));
    this.content.add(...this.figures.map((figure) => figure.group));
    this.effects = new Effects(this.content);
    this.zone = new Zone(replay.info.zone_radius);
    this.wish = wishArrow();
    this.content.add(this.zone.group, this.wish);
    this.changes = -1;
    this.#rebuildTerrain(0);
    this.view("slant");
    if (!before) return;
    this.renderer.compile(this.scene, this.camera); // with the shaders of the replay before, which are lost with its materials
    dispose(before);
  }

  paint(background) {
    this.scene.background.set(background);
    this.isStale = true;
  }

  // Draws fewer pixels if pictures take long, as they do without a GPU, so that a training on the same machine keeps its cores.
  adapt(passed) {
    this.usual = 0.7 * (this.usual ?? 0) + 0.3 * passed; // seconds between two pictures
    const ratio = this.renderer.getPixelRatio();
    if (this.usual < SLOW_S || ratio <= COARSEST) return;
    this.usual = 0;
    this.renderer.setPixelRatio(Math.max(COARSEST, ratio / 2));
    this.isStale = true;
  }

  // Shows the whole map between the panels, from the side or from above.
  view(name) {
    const { size } = this.replay;
    const { clientWidth, clientHeight } = this.container;
    const shape = Math.max(0.3, (clientWidth - 2 * this.margin) / Math.max(1, clientHeight)); // width of the free area over its height
    const far = 1.9 * size * (name === "top" ? Math.max(0.82, 0.86 / shape) : Math.max(0.92, 1.13 / shape));
    this.home = name;
    this.followed = this.glide = null;
    if (name === "top") {
      this.controls.target.set(0, 0, 0);
      this.camera.position.set(0, -0.01 * far, 1.05 * far); // not exactly above, so that the up direction is defined
    } else {
      // Look so that the first team comes from the left and the second from the right.
      this.controls.target.set(0.075 * size, -0.075 * size, 0);
      this.camera.position.set(0.53 * far, -0.53 * far, 0.66 * far).add(this.controls.target);
    }
    this.controls.minDistance = 6;
    this.controls.maxDistance = 3 * far;
    this.controls.update();
    this.isStale = true;
  }

  // Moves the camera near a unit, where it stays with it; null moves it back to where it was before.
  follow(unit) {
    if (unit === this.followed) return;
    const offset = this.camera.position.clone().sub(this.controls.target);
    const begins = this.followed === null;
    if (begins) this.before = { target: this.controls.target.clone(), offset: offset.clone() };
    const near = begins ? offset.clone().setLength(Math.min(FOLLOWED, offset.length())) : offset;
    this.followed = unit;
    this.glide = { share: 0, target: this.controls.target.clone(), offset, goal: unit === null ? this.before.offset : near };
  }

  // A user who turns or zooms takes over the camera; it still goes to the unit and stays with it.
  #give() {
    this.home = null;
    if (this.followed === null) this.glide = null;
    else if (this.glide) this.glide.isGiven = true;
  }

  // Moves the camera on its way, and with the unit that it follows.
  move(passed, time) {
    if (!this.replay || (this.followed === null && !this.glide)) return;
    const { camera, controls, glide } = this;
    const { x, y, z } = this.followed === null ? this.before.target : this.replay.pose(time, this.followed);
    const target = new THREE.Vector3(x, y, z), offset = camera.position.clone().sub(controls.target);
    if (!glide && target.equals(controls.target)) return;
    if (glide) {
      glide.share = this.isStill ? 1 : Math.min(1, glide.share + passed / GLIDE_S);
      const share = glide.share ** 2 * (3 - 2 * glide.share);
      target.lerpVectors(glide.target, target.clone(), share);
      if (!glide.isGiven) offset.lerpVectors(glide.offset, glide.goal, share);
      if (glide.share === 1) this.glide = null;
    }
    controls.target.copy(target);
    camera.position.copy(target).add(offset);
    controls.update();
    this.isStale = true;
  }

  // `chosen` is a unit or null.
  show(time, chosen) {
    const { replay } = this;
    this.#rebuildTerrain(Math.floor(time));
    this.zone.show(replay.holder(Math.floor(time)));
    for (const figure of this.figures) figure.draw(replay, time, figure.unit === chosen);
    this.effects.draw(replay, time, chosen);
    this.#showWish(time, chosen);
    this.isStale = true;
  }

  #rebuildTerrain(frame) {
    const changes = this.replay.changesUntil(frame);
    if (changes === this.changes) return;
    this.changes = changes;
    if (this.terrain) {
      this.content.remove(this.terrain);
      this.terrain.geometry.dispose();
      for (const material of this.terrain.material) material.dispose();
    }
    this.terrain = terrainMesh(this.replay.terrain(frame));
    this.content.add(this.terrain);
  }

  #showWish(time, chosen) {
    const frame = Math.floor(time);
    const action = chosen === null ? null : this.replay.action(frame, chosen);
    const length = action ? Math.min(1.4, Math.hypot(action.forward, action.strafe)) : 0;
    this.wish.visible = length > 0.05 && this.replay.isAlive(frame, chosen);
    if (!this.wish.visible) return;
    const { x, y, z, heading } = this.replay.pose(time, chosen);
    this.wish.position.set(x, y, z + 0.25);
    this.wish.rotation.z = heading - Math.atan2(action.strafe, action.forward);
    this.wish.scale.set(1.5 + 2.5 * length, 1.6, 1);
  }

  render() {
    if (!this.isStale || !this.replay) return;
    this.isStale = false;
    // Draw distant units larger than they are, so that they can be told apart.
    const distance = this.controls.getDistance();
    this.container.dataset.distance = distance.toFixed(1);
    for (const figure of this.figures) figure.resize(Math.max(1.2, Math.min(2.6, distance / 62)));
    const isFar = distance > FAR;
    this.labels.classList.toggle("is-far", isFar);
    this.renderer.render(this.scene, this.camera);
    this.#placeLabels(isFar ? LABEL.narrow : LABEL.wide);
  }

  // Place labels, nearest first; move a label up if it would cover another one.
  #placeLabels(width) {
    const wanted = this.figures.map((figure) => [figure, ...this.#onScreen(figure.head)]).sort((a, b) => b[2] - a[2]);
    const placed = [];
    for (const [figure, x, above, isVisible] of wanted) {
      const isShown = isVisible && figure.hasLabel;
      let y = above;
      const isTaken = () => placed.some((other) => Math.abs(other[0] - x) < width && Math.abs(other[1] - y) < LABEL.high);
      for (let tries = 0; tries < 6 && isShown && isTaken(); tries++) y -= LABEL.high / 2;
      figure.label.place(x, y, isShown);
      if (isShown) placed.push([x, y]);
    }
  }

  #onScreen(point) {
    const { x, y, z } = point.clone().project(this.camera);
    const { clientWidth, clientHeight } = this.container;
    return [((x + 1) / 2) * clientWidth, ((1 - y) / 2) * clientHeight, Math.abs(z) < 1 && Math.abs(x) < 1.1 && Math.abs(y) < 1.1];
  }

  #unitAt(event) {
    const box = this.renderer.domElement.getBoundingClientRect();
    let nearest = null, least = NEAR_CLICK;
    for (const figure of this.figures ?? []) {
      const chest = figure.group.position.clone();
      chest.z += 1.2;
      const [x, y, isVisible] = this.#onScreen(chest);
      const distance = Math.hypot(event.clientX - box.left - x, event.clientY - box.top - y);
      if (isVisible && distance < least) [nearest, least] = [figure.unit, distance];
    }
    return nearest;
  }

  #resize() {
    const { clientWidth, clientHeight } = this.container;
    if (!clientWidth || !clientHeight) return;
    this.renderer.setSize(clientWidth, clientHeight);
    this.camera.aspect = clientWidth / clientHeight;
    this.camera.updateProjectionMatrix();
    this.isStale = true;
    if (this.replay && this.home && this.followed === null) this.view(this.home); // the user has not moved the camera
  }

  dispose() {
    this.observer.disconnect();
    if (this.content) dispose(this.content);
    this.controls.dispose();
    this.renderer.dispose();
    this.container.replaceChildren();
  }
}

function dispose(content) {
  content.traverse((object) => {
    object.geometry?.dispose();
    for (const material of [object.material ?? []].flat()) material.dispose();
  });
}

// A disc on the ground with a low wall of light around it, in the colour of the team that holds it.
class Zone {
  constructor(radius) {
    const glass = { transparent: true, depthWrite: false, side: THREE.DoubleSide };
    this.disc = new THREE.Mesh(new THREE.CircleGeometry(radius, 64), new THREE.MeshBasicMaterial({ ...glass, opacity: 0.16 }));
    this.disc.position.z = 0.05;
    this.edge = new THREE.Mesh(new THREE.RingGeometry(radius - 0.22, radius, 96), new THREE.MeshBasicMaterial({ ...glass, opacity: 0.85 }));
    this.edge.position.z = 0.08;
    this.wall = new THREE.Mesh(new THREE.CylinderGeometry(radius, radius, 3, 96, 1, true).rotateX(Math.PI / 2), this.#fading(glass));
    this.wall.position.z = 1.5;
    this.group = new THREE.Group().add(this.disc, this.edge, this.wall);
  }

  #fading(glass) {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [1, 64];
    const pen = canvas.getContext("2d");
    const fade = pen.createLinearGradient(0, 0, 0, 64);
    fade.addColorStop(0, "rgb(0,0,0)");
    fade.addColorStop(1, "rgb(110,110,110)");
    pen.fillStyle = fade;
    pen.fillRect(0, 0, 1, 64);
    return new THREE.MeshBasicMaterial({ ...glass, alphaMap: new THREE.CanvasTexture(canvas) });
  }

  show(holder) {
    for (const { material } of [this.disc, this.edge, this.wall]) material.color.set(holder < 0 ? NOBODY : TEAM_COLOURS[holder]);
  }
}

// An arrow for the direction in which the chosen unit wants to go, one metre long along +x.
function wishArrow() {
  const shape = new THREE.Shape([[0.3, -0.09], [0.78, -0.09], [0.78, -0.26], [1, 0], [0.78, 0.26], [0.78, 0.09], [0.3, 0.09]].map(([x, y]) => new THREE.Vector2(x, y)));
  const material = new THREE.MeshBasicMaterial({ color: "#f4f7fa", transparent: true, opacity: 0.9, depthTest: false, side: THREE.DoubleSide });
  return new THREE.Mesh(new THREE.ShapeGeometry(shape), material);
}
