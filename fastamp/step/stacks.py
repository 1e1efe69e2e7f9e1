"""Muon's products: matrices in stacks, which are multiplied at once and orthogonalized in place.

Of sharded matrices each rank multiplies some, which it gathers from all ranks.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Bytes that each rank holds at a time; the products take about three times as much beside. On the
# CPU they stay in the caches from the first pass to the last, in memory that malloc has at hand:
# with fresh pages for 42 MiB of matrices of width 384 a step took 1.1x as long.
ROUND = 64 << 20
CPU_ROUND = 2 << 20
# Bytes of matrices that are multiplied together; on the CPU two products find them in the caches.
CPU_STACK = 1 << 19


class Matrix(NamedTuple):
    """What a step reads and writes; of a sharded matrix this rank's rows."""

    group: dict[str, Any]
    whole: Any
    """The parameter, or the DTensor whose rows are here."""
    param: Tensor
    grad: Tensor
    buffer: Any
    """The momentum; None where there is none yet."""

    def kind(self) -> tuple[Any, ...]:
        """Return what matrices of one stack have in common: where, shape and products."""
        own, whole = self.group, self.whole
        products = tuple(own["ns_coefficients"]), own["ns_steps"], own["eps"]
        return ranks_of(whole), whole.shape, *products

    def nbytes(self) -> int:
        """Return the size of the whole matrix in a stack."""
        return 2 * int(self.whole.numel())


def ranks_of(whole: Any) -> Any:
    """Return the process group that a matrix is sharded over; None if each rank has all of it."""
    for dim, place in enumerate(getattr(whole, "placements", ())):
        if not place.is_replicate():
            return whole.device_mesh.get_group(dim)
    return None


def in_rounds(of_kinds: list[list[Matrix]]) -> list[list[list[Matrix]]]:
    """Return the matrices in rounds: those of one are held at a time, and have the same ranks.

    The ranks of a process group get the same rounds, whatever else each of them has.
    """
    shared: dict[Any, list[list[Matrix]]] = {}
    for matrices in of_kinds:
        shared.setdefault(ranks_of(matrices[0].whole), []).append(matrices)
    rounds: list[list[list[Matrix]]] = []
    for ranks, its_kinds in shared.items():
        is_cpu = its_kinds[0][0].param.device.type == "cpu"
        most = (CPU_ROUND if is_cpu else ROUND) * _size_of(ranks)
        room = -1
        for some in (part for matrices in its_kinds for part in _cut(matrices, most)):
            nbytes = len(some) * some[0].nbytes()
            if nbytes > room:
                rounds.append([])
                room = most
            rounds[-1].append(some)
            room -= nbytes
    return rounds


def _size_of(ranks: Any) -> int:
    return 1 if ranks is None else int(ranks.size())


def _cut(matrices: list[Matrix], most: int) -> list[list[Matrix]]:
    """Cut matrices of a kind into lists of at most so many bytes, or of one matrix."""
    count = max(1, most // matrices[0].nbytes()) if matrices else 1
    return [matrices[i : i + count] for i in range(0, len(matrices), count)]


class Stacks:
    """The directions of a round: bfloat16 matrices that are orthogonalized in place.

    Args:
        of_kinds: the matrices of each kind.
        device: of the matrices.
    """

    def __init__(self, of_kinds: list[list[Matrix]], device: torch.device) -> None:
        self._ranks = ranks_of(of_kinds[0][0].whole)
        self._device = device
        count = _size_of(self._ranks)
        most = CPU_STACK if device.type == "cpu" else ROUND
        # A matrix goes to the rank with the least work so far: the same one on all ranks.
        shared: list[list[list[Matrix]]] = [[] for _ in range(count)]
        work = [0] * count
        for matrices in of_kinds:
            shares: list[list[Matrix]] = [[] for _ in work]
            for matrix in matrices:
                rank = work.index(min(work))
                shares[rank].append(matrix)
                work[rank] += math.prod(matrix.whole.shape) * min(matrix.whole.shape)
            for stacks, share in zip(shared, shares, strict=True):
                stacks.extend(_cut(share, most))
        own = shared[0 if self._ranks is None else self._ranks.rank()]
        self._stacks = [self._empty(len(some), *some[0].whole.shape) for some in own]
        self._products = [some[0].kind()[2:] for some in own]
        by_rank = [[matrix for some in stacks for matrix in some] for stacks in shared]
        self.matrices = [matrix for some in by_rank for matrix in some]
        """In the order of `directions`."""
        if self._ranks is None:
            self.directions = [each for stack in self._stacks for each in stack.unbind()]
            """For each matrix what is orthogonalized, or this rank's rows of it."""
        else:
            self._share(by_rank)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self._device)

    def _share(self, by_rank: list[list[Matrix]]) -> None:
        """Lay out this rank's rows by the rank that multiplies them, and its stacks by rows."""
        sizes = [matrix.param.numel() for matrix in self.matrices]
        self._sent = [sum(each.param.numel() for each in some) for some in by_rank]
        self._rows = self._empty(sum(sizes))
        views = zip(torch.split(self._rows, sizes), self.matrices, strict=True)
        self.directions = [rows.view(matrix.param.shape) for rows, matrix in views]
        parts = []
        for rank in range(len(by_rank)):  # DTensor's rows, as torch.chunk has them
            sizes = [-(-stack.size(1) // len(by_rank)) for stack in self._stacks]
            slices = [slice(rank * size, (rank + 1) * size) for size in sizes]
            parts.append([s[:, rows] for s, rows in zip(self._stacks, slices, strict=True)])
        self._parts = [part for of_rank in parts for part in of_rank]
        self._received = [sum(part.numel() for part in of_rank) for of_rank in parts]

    def orthogonalize_(self) -> None:
        """Orthogonalize the directions in place; of sharded ones all ranks have to call it."""
        if self._ranks is None:
            self._multiply()
            return
        whole = self._empty(sum(self._received))
        self._send(whole, self._received, self._rows, self._sent)
        pieces = torch.split(whole, [part.numel() for part in self._parts])
        for piece, part in zip(pieces, self._parts, strict=True):
            part.copy_(piece.view(part.shape))
        self._multiply()
        for piece, part in zip(pieces, self._parts, strict=True):
            piece.view(part.shape).copy_(part)
        self._send(self._rows, self._sent, whole, self._received)

    def _multiply(self) -> None:
        for stack, products in zip(self._stacks, self._products, strict=True):
            orthogonalize_(stack, *products)

    def _send(self, to: Tensor, received: list[int], values: Tensor, sent: list[int]) -> None:
        sizes = [2 * size for size in received], [2 * size for size in sent]
        to, values = to.view(torch.uint8), values.view(torch.uint8)  # gloo sends no bfloat16
        dist.all_to_all_single(to, values, sizes[0], sizes[1], group=self._ranks)


def orthogonalize_(
    stack: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> None:
    """Orthogonalize stacked bfloat16 matrices in place, by the Newton-Schulz steps of torch's Muon.

    Args:
        stack: (matrices, rows, columns); each matrix gets the operations that torch's gets.
        coefficients: of the polynomial.
        steps: how often it is applied.
        eps: least norm that a matrix is divided by.
    """
    a, b, c = coefficients
    wide = stack.mT if stack.size(1) > stack.size(2) else stack
    norms = torch.linalg.vector_norm(wide, dim=(1, 2), keepdim=True)
    found = wide.div_(norms.clamp(min=eps))
    for _ in range(steps):
        gram = torch.bmm(found, found.mT)
        # torch's baddbmm ignores `beta` where alpha is 0, as in the cubic polynomial.
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) if c else gram * b
        found = torch.baddbmm(found, gram, found, beta=a)
    wide.copy_(found)
