"""Seeds, gathered by slot and blueprint: what may grow, crews that learn, and members of an ensemble that is measured.

Shapes: R = seeds of one blueprint in one slot, T = steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from esper.fleet.crews import Cohort, Crew
from esper.fleet.errors import FleetError
from esper.fleet.members import Member
from esper.fleet.row_bed import RowBed
from esper.fleet.seeds import SeedBank, Species
from esper.fleet.upload import upload
from esper.growth.config import GrowthConfig
from esper.growth.garden import Garden, options_for
from esper.growth.lifecycle import Stage
from esper.growth.place import Place

Banks = Mapping[str, SeedBank]  # by slot, in the order in which they run
Gardens = Sequence[tuple[int, Garden[RowBed]]]  # row of the fleet, and its garden; positions are places in this list
Placed = tuple[int, int, list[float]]  # a seed: the row of its host, its position, and its alphas
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


def cohorts_of(banks: Banks, gardens: Gardens, steps: int) -> tuple[Cohort, Cohort]:
    """Seeds that learn in the next steps: those that the hosts see, and those in the shadow. Alphas move on the way."""
    groups: dict[tuple[str, str, bool], list[Placed]] = defaultdict(list)
    for position, (row, garden) in enumerate(gardens):
        for slot, blueprint, is_connected, alphas in _alphas(garden, steps):
            groups[slot, blueprint, is_connected].append((row, position, alphas))
    crews: dict[bool, list[Crew]] = {True: [], False: []}
    order = list(banks)
    for (slot, blueprint, is_connected), some in sorted(groups.items(), key=lambda item: (order.index(item[0][0]), item[0])):
        crews[is_connected].append(_crew(slot, banks[slot], blueprint, some))
    return Cohort(crews[True]), Cohort(crews[False])


def members_of(banks: Banks, gardens: Gardens, *, only_kept: bool) -> list[Member]:
    """Seeds as they are now, of the hosts that see them."""
    groups: dict[tuple[str, str], list[Placed]] = defaultdict(list)
    for position, (row, garden) in enumerate(gardens):
        for slot, bed in garden.occupied():
            if bed.is_connected and (not only_kept or bed.life.stage is Stage.FOSSILIZED):
                groups[slot, str(bed.life.blueprint)].append((row, position, [bed.alpha]))
    crews = [_crew(slot, banks[slot], blueprint, some) for (slot, blueprint), some in groups.items()]
    weights = [crew.species.layout.unflatten(crew.read("weights")) for crew in crews]
    return [crew.member(own, crew.alphas[0], hosts=len(gardens)) for crew, own in zip(crews, weights, strict=True)]


def _crew(slot: str, bank: SeedBank, blueprint: str, some: Sequence[Placed]) -> Crew:
    alphas = upload([alphas for _, _, alphas in some], bank.place.device, bank.place.dtype).T.contiguous()
    return Crew.of(slot, bank, blueprint, [row for row, _, _ in some], [position for _, position, _ in some], alphas)


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
