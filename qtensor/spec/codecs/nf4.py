"""NF4: sixteen quantiles of the normal distribution between -1 and 1, two in a byte. No NaN.

The table is that of QLoRA (Dettmers et al. 2023, arXiv 2305.14314, appendix E). Between two neighbours the bound is the
middle of both, rounded to fp32, and belongs to the lower one.
"""

import torch
from torch import Tensor

from qtensor.spec.codecs.nibbles import packed, unpacked
from qtensor.spec.codecs.rounding import onto_numbers, table_of

# fp32 numbers, upwards; the place of each is its code
TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
# between neighbours: half of their fp32 sums
BOUNDS = (
    -0.8480963706970215,
    -0.6106328964233398,
    -0.4599952697753906,
    -0.33967941999435425,
    -0.23460739850997925,
    -0.13791173696517944,
    -0.045525018125772476,
    0.03979014977812767,
    0.120255246758461,
    0.2035212516784668,
    0.2920137643814087,
    0.3893125355243683,
    0.5016634464263916,
    0.6427869200706482,
    0.8614784479141235,
)
# of qtensor.spec.format.Grain. Nowhere is a number further from its element than the lattice has 32767 steps: at most
# 26128, between the elements -0.28 and -0.18 where the unit is nearly two powers of two
GRAIN = (16, -2)


def encode(scaled: Tensor, whole: Tensor) -> Tensor:
    """`scaled` (values over their scale, [.., 8 n]) as a payload [.., 4 n]; 0.0 where they are not `whole`."""
    return packed(_code(onto_numbers(torch.where(whole, scaled, 0.0), TABLE)))


def decode(payload: Tensor) -> Tensor:
    """The fp32 values [.., K] of a payload [.., K // 2]."""
    return _value(unpacked(payload))


def snapped(scaled: Tensor) -> Tensor:
    """`scaled` rounded to NF4, saturating, but still fp32."""
    return _value(_code(scaled))


def _code(scaled: Tensor) -> Tensor:
    """The code (uint8) of each value: how many bounds it is above."""
    codes = (scaled > BOUNDS[0]).to(torch.uint8)
    for bound in BOUNDS[1:]:
        codes = codes + (scaled > bound)
    return codes


def _value(codes: Tensor) -> Tensor:
    """The fp32 values of codes."""
    return table_of(TABLE, codes.device).index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
