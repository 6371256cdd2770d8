"""The sum of the squares of a matrix A from A R and A^T A R, for a few columns of signs R.

    M = A^T A    Y = M R    M^ = Y (R^T Y)^-1 Y^T         the trace of M^ is known, that of M - M^ is small

M^ is exact where A has no more rank than R has columns, and near where its singular values fall, as they do in an
attention. Each column in turn is left out of M^ and tells what the others miss, so that the mean has no bias:

    estimate_i = tr M^_i + c r_i^T (M - M^_i) r_i = tr M^ + (c - |w_i|^2) / h_ii     w = Y h,  h = (R^T Y)^-1

(XNysTrace: Epperly, Tropp and Webber 2024, "XTrace: Making the most of every sample in stochastic trace estimation",
arXiv:2301.07825.) There c is 1; the columns of a Hadamard matrix of size n are drawn without putting back, and
M - M^_i is 0 between those that are in M^_i, so c is (n - m + 1) / n for m columns.

Letters: B batch, H heads, S keys, m columns.
"""

import torch
from torch import Tensor

SHIFT = 1e-5
"""Of the size of M, added to M and taken off its trace, for M^ has no inverse where A has less rank than R."""


def sum_of_squares(columns: Tensor, products: Tensor, size: int) -> Tensor:
    """The sum of A_ij^2.

    Args:
        columns: R, of +1 and -1, as ``signs`` gives them for more than 2 m keys; [B, S, m].
        products: A^T A R, [B, H, S, m].
        size: n.

    Returns:
        float64 [B, H].

    Example:
        >>> from attnzoo.heads.probe import signs
        >>> a = torch.randn(50, 3) @ torch.randn(3, 64)  # of rank 3
        >>> r = signs(64, 8, 1, torch.Generator().manual_seed(0))
        >>> found = sum_of_squares(r, (a.T @ a @ r)[:, None], 64)
        >>> torch.allclose(found, a.square().sum().double(), rtol=1e-3)
        True
    """
    r, y = columns.double()[:, None], products.double()
    keys, m = y.shape[2:]
    shift = SHIFT * y.square().sum((2, 3), keepdim=True).sqrt() / keys**0.5
    shift = shift.clamp(min=torch.finfo(torch.float32).tiny)
    y = y + shift * r
    middle = r.transpose(2, 3) @ y
    inverse = torch.linalg.inv((middle + middle.transpose(2, 3)) / 2)
    w = y @ inverse
    known = (w * y).sum((2, 3))
    missed = ((size - m + 1) / size - w.square().sum(2)) / inverse.diagonal(dim1=2, dim2=3)
    return (known + missed.mean(-1) - keys * shift[..., 0, 0]).clamp(min=0)
