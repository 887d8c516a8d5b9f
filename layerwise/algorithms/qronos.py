"""Qronos: GPTQ whose aim is the weight that gives the unquantized model's outputs best, on the inputs that it gets now.

    X, Y    a linear's input in the model whose earlier layers are quantized, and in the unquantized one  [tokens, K]
    GPTQ    least ||X w - X q||^2 over stored rows q
    Qronos  least ||Y w - X q||^2, as GPTAQ

With D = Y - X, which stands for D times alpha if only a part of it is to be answered, damping L (a number) and any
row v in place of q:

    f(v) = ||X w + D w - X v||^2 + L ||v - w||^2

is a parabola in v, and so its least value and a square around it. Where its gradient is zero,

    (X^T X + L) (w* - w) = X^T D w            f(v) = f(w*) + ||X (v - w*)||^2 + L ||v - w*||^2

Over stored rows, then, f is least where GPTQ's own error with its damped Hessian is, to w* instead of w. In GPTQ's
scaling, H = 2 X^T X / tokens (damped), C = 2 D^T X / tokens and H^-1 = U^T U, and with rows W of a weight:

    w*      = w + H^-1 C^T w                  W* = W (I + alpha C U^T U)

So Qronos is GPTQ of W*, with the same factor. Before a column is rounded, the values that have not been rounded are
those of least f given the ones that have: the first column is corrected by all of the difference, and each later one
takes in what is left after rounding those before. Coordinate descent keeps the aim, and brings f itself down.

GPTAQ adds alpha W triu(C U^T, 1) U: of each column's difference it answers what later columns can. Qronos leaves out
the triangle: earlier columns and the column itself answer, too. So W* is the same for any order of columns. If X
equals Y, C is zero and the bytes are GPTQ's. Factors of smoothing divide both inputs.

Zhang et al., "Qronos: Correcting the Past by Shaping the Future... in Post-Training Quantization", 2025 (arXiv
2505.11695). From there are the aim and the two steps, correction and diffusion, with damping that pulls to w. What is
above was derived from the aim alone, and differs in this:

    first column    theirs is rounded where it alone is best, all others as in w: w[1] + X[:, 1]^T D w / |X[:, 1]|^2;
                    here it is rounded from w*[1], with the others free. Given what it was rounded to, all columns after
                    it are the same.
    alpha           theirs is 1.
    damping, order  GPTQ's options; theirs is a fraction of the largest eigenvalue of X^T X.
"""

from dataclasses import dataclass

from torch import Tensor

from layerwise.algorithms.paired import Paired


@dataclass(frozen=True, kw_only=True)
class Qronos(Paired):
    """Rounds as GPTQ does, towards the weights of least error to the outputs of the unquantized model.

    Batches run through every layer twice, on the inputs of the unquantized and on those of the quantized model. If
    an expert gets other tokens in the two, there are no pairs of inputs, and those tokens count as GPTQ counts them.

    Args:
        alpha: how much of the correction is applied, 0 (none: GPTQ) to 1 (all of it). C is known from a sample, like H:
            all of it is best for the calibration's own tokens, and less for others.
        damping: as of GPTQ; more of it makes the correction smaller, too.
        block: as of GPTQ.
        act_order: as of GPTQ.
        descent: as of GPTQ.
        scales: as of GPTQ; they are made for the weights as they were.
        smoothing: as of GPTQ.
        hessians: as of GPTQ; with each Hessian comes a second matrix of its size.

    Raises:
        ValueError: for any other value, as of GPTQ.

    Example:
        ```python
        >>> model, batches = nn.Sequential(nn.Linear(64, 64)), [torch.randn(8, 64)]
        >>> result = calibrate(model, batches, recipe=Int4GroupScaling(), algorithm=Qronos(), layers=["0"])
        ```
    """

    alpha: float = 0.25

    def _correction(self, cross: Tensor, factor: Tensor, columns: Tensor) -> Tensor:
        """Return H^-1 C^T W^T."""
        return factor.t() @ (factor @ (cross.t() @ columns))

    def cost(self, rows: int, columns: int, tokens: int) -> float:
        """Return the cost of GPTQ and of three products."""
        corrections = 3 * rows * columns**2 if tokens else 0
        return super().cost(rows, columns, tokens) + corrections
