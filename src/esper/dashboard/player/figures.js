// The units on the stage: body, ring with a wedge for the heading, and a label with name and bars.

import { THREE } from "nicegui-scene";
import { bodyGeometry, TEAM_COLOURS } from "./bodies.js";

const WRECK = new THREE.Color("#3b4047"), COLD = new THREE.Color("#59626e");

export class Figure {
  constructor(replay, unit, labels) {
    this.unit = unit;
    this.team = new THREE.Color(TEAM_COLOURS[replay.team(unit)]);
    const name = replay.info.unit_classes[unit];
    const geometry = bodyGeometry(name, replay.info.class_table[name].tons);
    this.material = new THREE.MeshLambertMaterial({ vertexColors: true, color: this.team });
    this.body = new THREE.Mesh(geometry, this.material);
    // A faint copy of the body that shows through terrain. It is drawn before all bodies, so that no body shines through itself.
    const behind = { depthFunc: THREE.GreaterDepth, depthWrite: false, blending: THREE.CustomBlending, opacity: 0.45 };
    this.ghost = new THREE.Mesh(geometry, new THREE.MeshBasicMaterial({ color: this.team, ...behind }));
    this.ghost.renderOrder = 1;
    this.body.renderOrder = 2;
    this.ring = new THREE.Mesh(ringGeometry(replay.team(unit)), new THREE.MeshBasicMaterial({ color: this.team, transparent: true, opacity: 0.75, depthWrite: false }));
    this.ring.position.z = 0.07;
    this.tilted = new THREE.Group().add(this.body, this.ghost);
    this.group = new THREE.Group().add(this.tilted, this.ring);
    this.head = new THREE.Vector3(); // position of the label
    this.tall = 2; // metres from the feet to the label, for a body of true size
    this.label = new Label(replay, unit, labels);
  }

  draw(replay, time, isChosen) {
    const frame = Math.floor(time);
    const { x, y, z, heading } = replay.pose(time, this.unit);
    const isAlive = replay.isAlive(frame, this.unit);
    const isFallen = replay.unit(frame, this.unit, "fallen") > 0;
    const isShutDown = replay.unit(frame, this.unit, "shut_down") > 0;
    this.group.position.set(x, y, z);
    this.group.rotation.z = heading;
    this.tilted.rotation.set(isAlive ? 0 : 1.25, isAlive && isFallen ? 1.35 : 0, 0);
    this.tilted.position.z = isAlive && !isFallen ? 0 : 0.45;
    this.material.color.copy(this.team);
    if (!isAlive) this.material.color.lerp(WRECK, 0.88);
    if (isAlive && isShutDown) this.material.color.lerp(COLD, 0.75);
    this.ghost.visible = isAlive;
    this.ring.visible = isAlive;
    this.ring.scale.setScalar(isChosen ? 1.45 : 1);
    this.ring.material.color.set(isChosen ? "#ffffff" : this.team);
    this.tall = isAlive && !isFallen ? 2 : 1.2;
    this.hasLabel = isAlive || isChosen;
    this.label.draw(replay, frame, { isAlive, isFallen, isShutDown, isChosen });
  }

  resize(scale) {
    this.tilted.scale.setScalar(scale);
    this.head.copy(this.group.position);
    this.head.z += this.tall * scale;
  }
}

// A ring around the feet that opens into a wedge ahead: round for the first team, square for the second.
function ringGeometry(team) {
  const shape = new THREE.Shape();
  const hole = new THREE.Path();
  if (team === 0) {
    shape.absarc(0, 0, 1.02, 0.42, 2 * Math.PI - 0.42, false);
    shape.lineTo(1.75, 0);
    hole.absarc(0, 0, 0.84, 0, 2 * Math.PI, true);
  } else {
    shape.setFromPoints([[0.98, 0.4], [0.98, 0.98], [-0.98, 0.98], [-0.98, -0.98], [0.98, -0.98], [0.98, -0.4], [1.75, 0]].map(([x, y]) => new THREE.Vector2(x, y)));
    hole.setFromPoints([[0.8, 0.8], [0.8, -0.8], [-0.8, -0.8], [-0.8, 0.8]].map(([x, y]) => new THREE.Vector2(x, y)));
  }
  shape.closePath();
  shape.holes.push(hole);
  return new THREE.ShapeGeometry(shape, 24);
}

class Label {
  constructor(replay, unit, labels) {
    this.unit = unit;
    this.element = element("div", `unit-label team-${replay.team(unit)}`);
    this.element.dataset.unit = unit;
    const name = element("div", "unit-name", replay.names[unit]);
    name.dataset.short = replay.names[unit].replace(/^(.)\S* /, (_, first) => first.toUpperCase());
    this.marks = element("div", "unit-marks");
    this.hitPoints = element("i", "hit-points");
    this.heat = element("i", "heat");
    const bars = [this.hitPoints, this.heat].map((bar) => {
      const frame = element("div", "unit-bar");
      frame.append(bar);
      return frame;
    });
    this.element.append(this.marks, name, ...bars);
    labels.append(this.element);
    this.shown = "";
  }

  // Change the page only where something has changed.
  draw(replay, frame, { isAlive, isFallen, isShutDown, isChosen }) {
    const share = (name) => Math.round(100 * Math.min(1, replay.unit(frame, this.unit, name) / (replay.most[this.unit][name] || 1)));
    const marks = [isFallen && "fallen", isShutDown && "shut down", replay.unit(frame, this.unit, "painted") > 0 && "painted"];
    const text = isAlive ? marks.filter(Boolean).join(" · ") : "";
    const wanted = [isAlive, isChosen, share("hit_points"), share("heat"), text].join();
    if (wanted === this.shown) return;
    this.shown = wanted;
    this.element.classList.toggle("is-dead", !isAlive);
    this.element.classList.toggle("is-chosen", isChosen);
    this.hitPoints.style.width = `${share("hit_points")}%`;
    this.heat.style.width = `${share("heat")}%`;
    this.heat.classList.toggle("is-hot", share("heat") > 80);
    this.marks.textContent = text;
  }

  place(x, y, isVisible) {
    this.element.style.display = isVisible ? "" : "none";
    this.element.style.transform = `translate(${x.toFixed(1)}px, ${y.toFixed(1)}px) translate(-50%, -100%)`;
  }
}

function element(tag, name, text = "") {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}
