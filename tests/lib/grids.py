"""Parts of grids of parameters."""

import itertools
from collections.abc import Hashable, Sequence


def where_each_pair_meets(points: Sequence[Sequence[Hashable]]) -> list[int]:
    """The places of points in which any two values of different parameters that meet in a point still meet."""
    pairs = {
        place: set(itertools.combinations(enumerate(point), 2))
        for place, point in enumerate(points)
    }
    missing = set().union(*pairs.values())
    taken = []
    while missing:
        best = max(pairs, key=lambda place: len(pairs[place] & missing))
        missing -= pairs.pop(best)
        taken.append(best)
    return sorted(taken) or list(range(len(points)))  # of one parameter, no two values meet
