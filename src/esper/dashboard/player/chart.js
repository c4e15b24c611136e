// The timeline as SVG shapes: scores of both teams, holders of the zone, and kills. 1000 wide, 100 high.

const WIDTH = 1000, FLOOR = 92, CEILING = 10;

export function chartOf(replay) {
  const last = Math.max(1, replay.last);
  const x = (frame) => (WIDTH * frame) / last;
  const scores = Array.from({ length: replay.frames }, (_, frame) => replay.score(frame));
  const toWin = replay.info.score_to_win;
  const highest = Math.max(1, ...scores.flat());
  // Draw the winning score only if a team comes near it; otherwise the lines of the scores would be flat.
  const top = toWin && highest > 0.4 * toWin ? Math.max(toWin, highest) : highest * 1.1;
  const y = (score) => FLOOR - ((FLOOR - CEILING) * score) / top;
  const line = (team) => scores.map((score, frame) => `${x(frame).toFixed(1)},${y(score[team]).toFixed(1)}`).join(" ");
  return {
    lines: [line(0), line(1)],
    winAt: toWin && top >= toWin ? y(toWin) : null,
    holds: holds(replay).map(({ from, to, team }) => ({ x: x(from), width: x(to) - x(from), team })),
    kills: replay.info.feed
      .filter((item) => item.kind === "kill")
      .map((item) => ({ x: x(item.frame), frame: item.frame, team: item.by === null ? -1 : replay.team(item.by) })),
  };
}

// Returns the ranges of frames in which one team held the zone.
function holds(replay) {
  const found = [];
  for (let frame = 0; frame < replay.last; frame++) {
    const team = replay.holder(frame);
    const open = found.at(-1);
    if (team < 0) continue;
    if (open?.team === team && open.to === frame) open.to = frame + 1;
    else found.push({ from: frame, to: frame + 1, team });
  }
  return found;
}
