"""Merging heads whose keys or values lie in spaces of their own: each is turned to the others.

Of the attention of a layer, any matrix may stand between V and the output projection, and any
complex factor between each rotary pair of Q and K, which rotary positions leave in its place (a
rotation of each pair is the factor's phase). So keys are vectors of complex numbers of a width of 1
each, values a real one of the head's width, and both are merged by the same lines.

Shapes: B such parts of a head, m their width, n heads of a group, N = n·m. Moments are
``[B, N, N]``: the mean of z zᴴ over tokens, z being the heads of a group one behind the other.
"""

import torch

_ROUNDS = 30
_DAMPING = 1e-6


def merge(moments_BNN: torch.Tensor, width: int, method: str) -> torch.Tensor:
    """``[B, m, N]``: what makes one head of those of a group.

    - "aligned": the mean of the heads, once each is rotated to the mean of the others (orthogonal
      Procrustes, Schönemann 1966; generalised, Gower 1975), until no more changes.
    - "principal": the combination from which the heads are restored with the least error.
    - "mean", as they are (Ainslie et al. 2023, arXiv 2305.13245), and "first", to compare with.
    """
    parts, total = moments_BNN.shape[:2]
    count = total // width
    eye = torch.eye(width, dtype=moments_BNN.dtype).expand(parts, width, width)
    match method:
        case "principal":
            vectors: torch.Tensor = torch.linalg.eigh(moments_BNN).eigenvectors
            return vectors[..., -width:].mH
        case "first":
            return torch.cat([eye, *[torch.zeros_like(eye)] * (count - 1)], dim=-1)
        case "mean":
            return torch.cat([eye / count] * count, dim=-1)
    blocks = moments_BNN.reshape(parts, count, width, count, width)
    turns = [eye] * count
    for _ in range(_ROUNDS):
        for head in range(count):
            others = (turns[j] @ blocks[:, j, :, head] for j in range(count) if j != head)
            u, _, vh = torch.linalg.svd(sum(others, torch.zeros_like(eye)))
            turns[head] = u @ vh if count > 1 else eye
    return torch.cat(turns, dim=-1) / count


def restore(moments_BNN: torch.Tensor, down_BmN: torch.Tensor) -> torch.Tensor:
    """``[B, N, m]``: what gives the heads of a group back from one, with the least mean square."""
    cross_BNm = moments_BNN @ down_BmN.mH
    return fit(cross_BNm, down_BmN @ cross_BNm)


def fit(cross_BNm: torch.Tensor, own_Bmm: torch.Tensor) -> torch.Tensor:
    """E[z yᴴ] E[y yᴴ]⁻¹: what gives z from y with the least mean square."""
    size = own_Bmm.shape[-1]
    trace = own_Bmm.diagonal(dim1=-2, dim2=-1).real.mean(-1).clamp(min=1e-30)
    damped = own_Bmm + (_DAMPING * trace)[:, None, None] * torch.eye(size, dtype=own_Bmm.dtype)
    found: torch.Tensor = torch.linalg.solve(damped, cross_BNm, left=False)
    return found


def groups_of_heads(likeness: torch.Tensor, num_groups: int) -> list[list[int]]:
    """Heads in groups of one size with the largest sum of ``likeness`` ``[n, n]`` within them.

    From neighbours on, two heads of two groups change places as long as the sum grows: a local
    best, found the same each time.
    """
    count = len(likeness)
    size = count // num_groups
    groups = [list(range(first, first + size)) for first in range(0, count, size)]

    def within(group: list[int]) -> float:
        return float(likeness[group][:, group].sum())

    while True:
        best, gain = None, 1e-9 * float(likeness.abs().sum())
        for a in range(num_groups):
            for b in range(a + 1, num_groups):
                before = within(groups[a]) + within(groups[b])
                for i in range(size):
                    for j in range(size):
                        one, two = list(groups[a]), list(groups[b])
                        one[i], two[j] = two[j], one[i]
                        found = within(one) + within(two) - before
                        if found > gain:
                            best, gain = (a, b, one, two), found
        if best is None:
            return [sorted(group) for group in groups]
        a, b, groups[a], groups[b] = best


def likeness_of(moments_BNN: torch.Tensor, width: int) -> torch.Tensor:
    """``[n, n]``: how much of two heads is the same once one is rotated to the other (Jin et al.
    2024, arXiv 2412.20677): the sum of the singular values of their moments."""
    parts, count = len(moments_BNN), moments_BNN.shape[1] // width
    blocks = moments_BNN.reshape(parts, count, width, count, width)
    found: torch.Tensor = torch.linalg.svdvals(blocks.movedim(3, 2)).sum((0, -1))
    return found
