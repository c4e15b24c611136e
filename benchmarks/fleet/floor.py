"""How fast a convolutional host could train at most, on a device whose memory is the limit.

A host this small computes little for every number that it moves, so what bounds it is the memory's bandwidth. Let n be the numbers that
the convolutions of all blocks put out for one sample (channels × positions before the pool) and i those of the input. Every number goes
through memory once for each purpose:

    forward     the input is read: i
                each convolution's output is written, its mean and spread being found on the way; read to normalise, clip and pool it: 2 n
    backward    each output is read for the two sums of the batch norm's gradient, and read for the gradient of the output: 2 n
                that gradient is written, and read for the gradients of the weights and of what came before: 2 n
                the input is read for the gradient of the first weights: i

    a sample moves (6 n + 2 i) × bytes of a number

Pooled outputs are a quarter of n and can be made where they are used, weights and their moments are shared by all samples of a batch: both
are left out, as are labels. So no program that keeps to these purposes is faster; one that fuses them further may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from benchmarks.clock import now
from benchmarks.records import Record
from esper.tasks import ConvHost

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}  # of a number that flows
COPIED = {"cuda": 2**30, "cpu": 2**28}  # bytes: far more than any cache holds


def least_bytes(host: ConvHost, shape: Sequence[int], precision: str) -> int:
    """That a training step moves for one sample of this shape (channels, then positions).

    >>> host = ConvHost(3, 10, (8, 16, 32), pool=(True, True, True))
    >>> least_bytes(host, (3, 32, 32), "bfloat16")          # n = 8·32² + 16·16² + 32·8² = 14,336 and i = 3·32²
    184320
    """
    positions, put_out = list(shape[1:]), 0
    for block in host.blocks:
        put_out += block.conv.out_channels * math.prod(positions)
        if not isinstance(block.pool, torch.nn.Identity):
            positions = [size // 2 for size in positions]
    return (6 * put_out + 2 * math.prod(shape)) * BYTES[precision]


def copy_bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Bytes per second of a large copy, read and written ones together: the best of some."""
    source = torch.zeros(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 1):  # the first one also maps the memory
        start = now(device)
        target.copy_(source)
        seconds.append(now(device) - start)
    return 2 * source.numel() / min(seconds[1:])


def floor(host: ConvHost, shape: Sequence[int], *, precision: str, samples_per_s: float, device: torch.device) -> Record:
    """How far what was measured, of a fleet without seeds that only trains, is from what the memory would allow."""
    bandwidth = copy_bandwidth(device)
    most = bandwidth / least_bytes(host, shape, precision)
    return {"bandwidth": bandwidth, "floor_samples_per_s": most, "distance_from_floor": most / samples_per_s}
