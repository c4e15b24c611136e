"""Seeds, gathered by slot and blueprint: what may grow, crews that learn, and members of an ensemble that is measured.

Shapes: R = seeds of one blueprint in one slot, T = steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch

from esper.fleet.errors import FleetError
from esper.fleet.row_bed import RowBed
from esper.fleet.seeds import Crew, Member, SeedBank, Species
from esper.fleet.upload import upload
from esper.growth.config import GrowthConfig
from esper.growth.garden import Garden, options_for
from esper.growth.lifecycle import Stage
from esper.growth.place import Place

Banks = Mapping[str, SeedBank]  # by slot, in the order in which they run
Gardens = Sequence[tuple[int, Garden[RowBed]]]  # row of the fleet, and its garden; positions are places in this list
Named = list[tuple[str, Crew]]  # slot and crew
SpeciesOf = Mapping[str, Mapping[str, Species]]  # slot -> blueprint -> species


def species_for(places: Mapping[str, Place], growth: GrowthConfig) -> dict[str, dict[str, Species]]:
    """What may grow in every slot; slots where nothing may are left out."""
    blending = growth.lifecycle.blending
    species = {
        name: {blueprint.name: Species(place, blueprint.name, blending) for blueprint in options_for(place, growth)}
        for name, place in places.items()
    }
    if not any(species.values()):
        raise FleetError(
            f"none of the blueprints {growth.blueprints} fits any of the slots {', '.join(places)} with {blending!r} blending; "
            "leave `blueprints` out to allow all that fit"
        )
    return {name: some for name, some in species.items() if some}


def crews_of(banks: Banks, gardens: Gardens, steps: int) -> tuple[Named, Named]:
    """Seeds that learn in the next steps: those that the hosts see, and those in the shadow. Alphas move on the way."""
    groups: dict[tuple[str, str, bool], list[tuple[int, int, list[float]]]] = defaultdict(list)
    for position, (row, garden) in enumerate(gardens):
        for slot, blueprint, is_connected, alphas in _alphas(garden, steps):
            groups[slot, blueprint, is_connected].append((row, position, alphas))
    crews: dict[bool, Named] = {True: [], False: []}
    order = list(banks)
    for (slot, blueprint, is_connected), some in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0])):
        crews[is_connected].append((slot, _crew(banks[slot], blueprint, some)))
    return crews[True], crews[False]


def members_of(banks: Banks, gardens: Gardens, *, only_kept: bool) -> list[Member]:
    """Seeds as they are now, of the hosts that see them."""
    groups: dict[tuple[str, str], list[tuple[int, int, list[float]]]] = defaultdict(list)
    for position, (row, garden) in enumerate(gardens):
        for slot, bed in garden.occupied():
            if bed.is_connected and (not only_kept or bed.life.stage is Stage.FOSSILIZED):
                groups[slot, str(bed.life.blueprint)].append((row, position, [bed.alpha]))
    with torch.no_grad():
        crews = [(slot, _crew(banks[slot], blueprint, some)) for (slot, blueprint), some in groups.items()]
        return [crew.as_member(slot, step=0, hosts=len(gardens)) for slot, crew in crews]


def _crew(bank: SeedBank, blueprint: str, some: Sequence[tuple[int, int, list[float]]]) -> Crew:
    alphas = upload([alphas for _, _, alphas in some], bank.place.device, bank.place.dtype).T.contiguous()
    return Crew(bank, blueprint, [row for row, _, _ in some], [position for _, position, _ in some], alphas)


def _alphas(garden: Garden[RowBed], steps: int) -> Iterable[tuple[str, str, bool, list[float]]]:
    """Of every seed of a host that learns: slot, blueprint, whether the host sees it, and its alpha in each of the steps to come."""
    beds = dict(garden.occupied())
    moving = [bed for bed in beds.values() if bed.life.ramp is not None]
    alphas = {name: [bed.alpha] * steps for name, bed in beds.items()}
    if moving:
        for step in range(steps):
            for name, bed in beds.items():
                alphas[name][step] = bed.alpha
            garden.tick()
    return [(name, str(bed.life.blueprint), bed.is_connected, alphas[name]) for name, bed in beds.items()]
