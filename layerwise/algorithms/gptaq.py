"""GPTAQ: GPTQ whose aim is the output of the unquantized model, not that of the layer on the inputs that it gets now.

    X, Y    a linear's input in the model whose earlier layers are quantized, and in the unquantized one  [tokens, K]
    GPTQ    least ||X w - X q||^2 over stored rows q
    GPTAQ   least ||Y w - X q||^2: q also makes up for what earlier layers did to the input

With D = Y - X the difference is Y w - X q = X (w - q) + sum_j w[j] D[:, j]. Each term of the sum is answered by a
change of w at the columns R after j alone: those before are rounded by then, and j's own value is kept for GPTQ. Along
R, least squares give

    min over v of ||w[j] D[:, j] - X[:, R] v||^2      v = w[j] (X_R^T X_R)^-1 X_R^T D[:, j] = w[j] P[j, R]^T

and with H = 2 X^T X / tokens (damped), C = 2 D^T X / tokens and GPTQ's factor U, U^T U = H^-1, whose lower right corner
is the factor of the inverse of that of H (so (H_RR)^-1 = U_RR^T U_RR):

    P       = triu(C U^T, 1) U                         [K, K], upper triangular, zero on its diagonal
    w[k]   += alpha * w[j] P[j, k]                     for each column j in its turn, beside GPTQ's
    w[k]   -= (w[j] - q[j]) / U[j, j] * U[j, k]        for all k > j

The w[j] in front of P is the weight of the unquantized model, which D[:, j] was multiplied with; not the value that
corrections have made of it, since what they added acts on X. So all corrections are known before the first column:
GPTAQ is GPTQ of W (I + alpha P). If X equals Y, C is zero and nothing is corrected: the bytes are GPTQ's.

With act_order, H and C are permuted alike, and P is made in the order of processing. Factors of smoothing divide both
inputs. Coordinate descent keeps the aim: it comes closer to the outputs of W (I + alpha P) on X.

Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration", 2025 (arXiv 2504.02692), where P
is theorem and algorithm; their code multiplies it by the column as it stands.
"""

from dataclasses import dataclass

from torch import Tensor

from layerwise.algorithms.paired import Paired


@dataclass(frozen=True, kw_only=True)
class GPTAQ(Paired):
    """Rounds as GPTQ does, towards the outputs of the unquantized model.

    Batches run through every layer twice, on the inputs of the unquantized and on those of the quantized model. If
    an expert gets other tokens in the two, there are no pairs of inputs, and those tokens count as GPTQ counts them.

    Args:
        alpha: how much of the correction is applied, 0 (none: GPTQ) to 1 (all of it). C is known from a sample, like H:
            all of it is best for the calibration's own tokens, and less for others.
        damping: as of GPTQ.
        block: as of GPTQ.
        act_order: as of GPTQ.
        descent: as of GPTQ.
        scales: as of GPTQ.
        smoothing: as of GPTQ.
        hessians: as of GPTQ; with each Hessian comes a second matrix of its size.

    Raises:
        ValueError: for any other value, as of GPTQ.

    Example:
        ```python
        >>> model, batches = nn.Sequential(nn.Linear(64, 64)), [torch.randn(8, 64)]
        >>> result = calibrate(model, batches, recipe=Int4GroupScaling(), algorithm=GPTAQ(), layers=["0"])
        ```
    """

    alpha: float = 0.25

    def _correction(self, cross: Tensor, factor: Tensor, columns: Tensor) -> Tensor:
        """Return P^T W^T."""
        later = (cross @ factor.t()).triu_(diagonal=1)  # [K, K]
        return factor.t() @ (later.t() @ columns)

    def cost(self, rows: int, columns: int, tokens: int) -> float:
        """Return the cost of GPTQ and of three products."""
        corrections = columns**3 + 2 * rows * columns**2 if tokens else 0
        return super().cost(rows, columns, tokens) + corrections
