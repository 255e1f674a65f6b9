"""Newton-Schulz iteration: from a matrix U S V^T nearly to U V^T, by products alone (Jordan et
al., 2024).

[Note: two ways]
One step takes X, of m rows and n >= m columns, to p(X X^T) X with p(G) = a + b G + c G^2, which is
what "standard" does. As p(G) is a polynomial of G = X X^T all of them commute, and the next step's
Gram matrix is p(G) G p(G). So "gram" takes three steps with one Gram matrix, then two with another,
and multiplies X twice, by the products of their p(G): for n = 4 m two thirds of the work. Where n
is less than 1.5 m it would be more, which goes the other way.

Three in a row is the most, and they come first: rounding gives G small negative eigenvalues, which
grow twelvefold with each step until X makes G anew, and G of a matrix divided by its norm has the
smaller ones. Four, or two before three, are measurably further from the polynomial.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

NS_METHODS = ("standard", "gram")
NS_STEPS = 5
STEPS_OF_GRAM = (3, 2)  # with each Gram matrix
# Of p, chosen so that five steps bring singular values from above 0.001 to about 0.7 to 1.2.
COEFFICIENTS = (3.4445, -4.775, 2.0315)
EPSILON = 1e-7


def orthogonalize(tensor: torch.Tensor, ns_method: str = "standard") -> torch.Tensor:
    """Return the nearly orthogonal factor of a matrix `[m, n]`, in bf16; of three dimensions a
    stack of matrices; of more the matrix of its first and all others (a convolution's filters).
    """
    matrix = tensor.to(torch.bfloat16)
    if tensor.dim() > 3:
        matrix = matrix.reshape(tensor.shape[0], -1)
    if matrix.numel() == 0:
        return matrix.reshape(tensor.shape)
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if tall else matrix
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    wide = wide / norm.clamp(min=EPSILON)
    rows, columns = wide.shape[-2:]
    wide = _gram(wide) if ns_method == "gram" and 2 * columns > 3 * rows else _standard(wide)
    return (wide.mT if tall else wide).reshape(tensor.shape)


def multiplications(shape: torch.Size) -> int:
    """Count those of a step as `orthogonalize` takes it; below two dimensions, elements."""
    numel = shape.numel()
    if len(shape) < 2 or numel == 0:
        return numel
    short = min(shape[-2:] if len(shape) == 3 else (shape[0], shape[1:].numel()))
    stack = shape[0] if len(shape) == 3 else 1
    return 2 * numel * short + stack * short**3


def _multiply_add(wide: torch.Tensor) -> Callable[..., torch.Tensor]:
    return torch.addmm if wide.dim() == 2 else torch.baddbmm


def _standard(wide: torch.Tensor) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    multiply_add = _multiply_add(wide)
    for _ in range(NS_STEPS):
        gram = wide @ wide.mT
        rest = multiply_add(gram, gram, gram, beta=b, alpha=c)  # p(G) - a
        wide = multiply_add(wide, rest, wide, beta=a)
    return wide


def _gram(wide: torch.Tensor) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    multiply_add = _multiply_add(wide)
    for steps in STEPS_OF_GRAM:
        gram = wide @ wide.mT
        rest = multiply_add(gram, gram, gram, beta=b, alpha=c)
        product = step = _plus(rest, a)
        for _ in range(steps - 1):
            gram = step @ gram @ step
            rest = multiply_add(gram, gram, gram, beta=b, alpha=c)
            product = multiply_add(product, rest, product, beta=a)
            step = _plus(rest, a)
        wide = product @ wide
    return wide


def _plus(rest: torch.Tensor, a: float) -> torch.Tensor:
    """Add a to p(G) - a, in its place. Its diagonal is rounded, which a Gram matrix does not
    notice, and the product of several p(G) does.
    """
    rest.diagonal(dim1=-2, dim2=-1).add_(a)
    return rest
