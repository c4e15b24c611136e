"""Action specs: the heads of an action, the dependencies between them, and when each head is relevant.

An action is a dictionary with one tensor per head: `[N]` int64 for a discrete head, `[N, size]` float for a continuous head, in [-1, 1] if
it is bounded. Heads are chosen in their order, so a head may depend only on heads before it.

Shapes: N = parallel environments.
"""

from __future__ import annotations

import msgspec


class Discrete(msgspec.Struct, frozen=True, tag="discrete"):
    """One of `size` choices.

    A mask for this head is `[N, size]` bool, true where allowed. With `parent`, the mask depends on the choice of that discrete head: it is
    `[N, parent size, size]`, and the row of the parent's choice applies. With `has_own_logits`, the policy also has separate logits for
    this head for each choice of the parent.
    """

    name: str
    size: int
    parent: str | None = None
    has_own_logits: bool = False


class Continuous(msgspec.Struct, frozen=True, tag="continuous"):
    """`size` numbers. If bounded, they are a Gaussian squashed by tanh to [-1, 1], which the environment scales to its own units.

    If not, they are the Gaussian itself, in the environment's own units.
    """

    name: str
    size: int
    is_bounded: bool = True


Head = Discrete | Continuous


class Relevance(msgspec.Struct, frozen=True):
    """A rule: `head` is relevant only where the discrete head `given` is relevant and chose one of `choices`."""

    head: str
    given: str
    choices: tuple[int, ...]


class ActionSpec(msgspec.Struct, frozen=True):
    """The heads of an action and the rules of their relevance. A head without a rule is always relevant.

    >>> spec = ActionSpec(
    ...     heads=(Discrete("op", 3), Discrete("slot", 4, parent="op")),
    ...     relevance=(Relevance("slot", given="op", choices=(1, 2)),),
    ... )
    >>> [head.name for head in spec.discrete]
    ['op', 'slot']
    """

    heads: tuple[Head, ...]
    relevance: tuple[Relevance, ...] = ()

    def __post_init__(self) -> None:
        names = [head.name for head in self.heads]
        if not names:
            raise ValueError("an action needs at least one head")
        if len(set(names)) != len(names):
            raise ValueError(f"head names must differ; got {names}")
        seen: dict[str, Head] = {}
        for head in self.heads:
            if head.size < 1:
                raise ValueError(f"head {head.name!r} needs a size of at least 1; got {head.size}")
            if isinstance(head, Discrete) and head.parent is not None and not isinstance(seen.get(head.parent), Discrete):
                raise ValueError(
                    f"head {head.name!r} depends on {head.parent!r}, which is no discrete head listed before it; there are {list(seen)}"
                )
            if isinstance(head, Discrete) and head.has_own_logits and head.parent is None:
                raise ValueError(f"head {head.name!r} has logits of its own for every choice of its parent, but no parent; name one")
            seen[head.name] = head
        ruled: set[str] = set()
        for rule in self.relevance:
            self._check_rule(rule, names, seen, ruled)
            ruled.add(rule.head)

    @staticmethod
    def _check_rule(rule: Relevance, names: list[str], heads: dict[str, Head], ruled: set[str]) -> None:
        if rule.head not in heads or rule.given not in heads:
            raise ValueError(f"relevance of {rule.head!r} given {rule.given!r}: the heads are {names}")
        if rule.head in ruled:
            raise ValueError(f"relevance of {rule.head!r} is given twice")
        given = heads[rule.given]
        if not isinstance(given, Discrete) or names.index(rule.given) >= names.index(rule.head):
            raise ValueError(f"relevance of {rule.head!r}: {rule.given!r} must be a discrete head listed before it")
        if not rule.choices or any(not 0 <= choice < given.size for choice in rule.choices):
            raise ValueError(f"relevance of {rule.head!r}: choices of {rule.given!r} are 0..{given.size - 1}; got {rule.choices}")

    @property
    def discrete(self) -> tuple[Discrete, ...]:
        return tuple(head for head in self.heads if isinstance(head, Discrete))

    @property
    def continuous(self) -> tuple[Continuous, ...]:
        return tuple(head for head in self.heads if isinstance(head, Continuous))

    def mask_shape(self, head: Discrete) -> tuple[int, ...]:
        """Return the shape of one environment's mask for `head`."""
        if head.parent is None:
            return (head.size,)
        parent = next(other for other in self.discrete if other.name == head.parent)
        return (parent.size, head.size)

    def logits_shape(self, head: Discrete) -> tuple[int, ...]:
        """Return the shape of one environment's logits for `head`."""
        return self.mask_shape(head) if head.has_own_logits else (head.size,)
