"""How strong the scripted players are: every bot against the one below it, and each against itself.

    python benchmarks/arena/bots.py --battles 512 --seed 6000 --output benchmarks/results/arena_bots_5v5.jsonl
    python benchmarks/arena/bots.py --battles 512 --seed 6000 --team-size 2 --output benchmarks/results/arena_bots_2v2.jsonl

Every map is fought on twice, with sides swapped; draws count half, and intervals are over maps. Aims: every bot beats the one below it in
at least 80 % of the battles, and of the matches of a bot against itself at least 80 % end before the time limit. Settings of bots were
chosen on other seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from esper.arena.config import ArenaConfig
from esper.devices import find_device, threads
from esper.league.matches import MatchArena

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository

from benchmarks.records import Output, Record

LADDER = ("random", "weak", "middle", "strong", "expert")
PAIRS = tuple(zip(LADDER[1:], LADDER[:-1], strict=True))
MIRRORS = LADDER[1:]
BAR = 0.8


def measured(match_arena: MatchArena, first: str, second: str) -> Record:
    result = match_arena.play(first, second)
    record = result.record
    interval = record.interval()
    return {
        "first": first,
        "second": second,
        "battles": record.battles,
        "maps": sum(record.maps),
        "won": record.wins,
        "drawn": record.draws,
        "lost": record.losses,
        "score": record.score,
        "interval": [interval.low, interval.high],
        "decided_before_time": 1 - result.by_time / record.battles,
        "mean_decisions": result.decisions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--battles", type=int, default=512)
    parser.add_argument("--team-size", type=int, default=5)
    parser.add_argument("--seed", type=int, default=6000)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--output", type=Path, default=None, help="a file for the records besides the terminal")
    options = parser.parse_args()
    write = Output(options.output).write if options.output else lambda record: print(json.dumps(record), flush=True)
    with threads(options.threads):
        match_arena = MatchArena(
            ArenaConfig(battles=options.battles, team_size=options.team_size), seed=options.seed, device=find_device(options.device)
        )
        for first, second in PAIRS:
            write({**measured(match_arena, first, second), "team_size": options.team_size, "bar": BAR})
        for name in MIRRORS:
            write({**measured(match_arena, name, name), "team_size": options.team_size, "bar_decided": BAR})


if __name__ == "__main__":
    main()
