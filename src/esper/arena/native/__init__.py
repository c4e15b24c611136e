"""The rules of the arena as scalar functions of one battle or one unit, compiled by Numba."""
