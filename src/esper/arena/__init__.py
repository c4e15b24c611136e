"""Batched team battles: B battles × U units as one tensor program."""
