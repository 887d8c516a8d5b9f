"""Which product grouped operands get: a decision over a record, in the order of the dense ones (see ../dynamic.py).

SCALED      torch.nn.functional.scaled_grouped_mm, one launch: where the format's route knows the device and sizes
BF16        grouped_mm of decoded values, one launch: bf16 holds them, and the result is rounded once. Formats with
            factors of rows (Float8, INT8, NVFP4) would be rounded before their factors and behind them: not these
BF16_EACH   theirs: the dense product in bf16 (../in_bf16.py), expert by expert, so the device is asked for the ends
FP32_EACH   the emulation, expert by expert
"""

import enum
from dataclasses import dataclass

import torch

from qtensor.spec.format import GroupedRoute
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import format_of, registered, specs_of

MOST_GROUPS = 1023  # "Can't process more than 1024 groups", says torch, and means fewer than 1024


class Way(enum.Enum):
    """How grouped operands are multiplied, see above."""

    SCALED = enum.auto()
    BF16 = enum.auto()
    BF16_EACH = enum.auto()
    FP32_EACH = enum.auto()


@dataclass(frozen=True, kw_only=True)
class Case:
    """What decides.

    Attributes:
        device: its type.
        capability: of an NVIDIA GPU, else None.
        cuda: the version that torch is built for, None for ROCm and others.
        a: the recipe of the rows' operand.
        b: that of the experts', or of x in dw.
        dtype: of the result.
        experts: how many.
        contraction: elements of a sum; of dw what tokens are padded to.
        width: of a row of the result.
        missing: what torch said when it was asked for SCALED, if it has been built without.
    """

    device: str
    capability: tuple[int, int] | None
    cuda: tuple[int, int] | None
    a: Recipe
    b: Recipe
    dtype: torch.dtype
    experts: int
    contraction: int
    width: int
    missing: str = ""


def case_of(device: torch.device, a: Recipe, b: Recipe, dtype: torch.dtype, sizes: tuple[int, int, int]) -> Case:
    """Return the case on a device; sizes: experts, contraction, width."""
    found, version = None, torch.version.cuda
    if device.type == "cuda" and version is not None:
        properties = torch.cuda.get_device_properties(device)
        found = properties.major, properties.minor
    cuda = None if version is None else (int(version.split(".")[0]), int(version.split(".")[1]))
    experts, contraction, width = sizes
    return Case(
        device=device.type,
        capability=found,
        cuda=cuda,
        a=a,
        b=b,
        dtype=dtype,
        experts=experts,
        contraction=contraction,
        width=width,
    )


def choose(case: Case) -> tuple[Way, str]:
    """Return the way, and why it is not SCALED ("" if it is)."""
    route = registered(case.b).route
    grouped = None if route is None else route.grouped
    reason = _unfit(case, grouped)
    if not reason:
        return Way.SCALED, ""
    if not _is_nvidia(case) or case.dtype not in (torch.bfloat16, torch.float16) or not _in_bf16(case):
        return Way.FP32_EACH, reason
    # torch wants rows of whole 16 bytes
    whole = not case.contraction % 8 and not case.width % 8 and case.experts <= MOST_GROUPS
    if case.dtype == torch.bfloat16 and whole and not has_factors(case.a) and not has_factors(case.b):
        return Way.BF16, reason
    return Way.BF16_EACH, reason


def has_factors(recipe: Recipe) -> bool:
    """Return whether a scale belongs to whole rows or to the tensor."""
    return any(not spec.per_row or not spec.block for spec in specs_of(recipe))


def _in_bf16(case: Case) -> bool:
    return format_of(case.a).exact_in_bf16 and format_of(case.b).exact_in_bf16


def _is_nvidia(case: Case) -> bool:
    return case.device == "cuda" and case.cuda is not None


def _unfit(case: Case, route: GroupedRoute | None) -> str:
    name = type(case.b).__name__
    if route is None:
        return f"scaled_grouped_mm does not know {name}"
    if not _is_nvidia(case):
        return f"scaled_grouped_mm is used on NVIDIA GPUs, not on this device ({case.device})"
    if case.capability not in route.capabilities:
        known = ", ".join(f"{major}.{minor}" for major, minor in route.capabilities)
        found = "?" if case.capability is None else f"{case.capability[0]}.{case.capability[1]}"
        return f"scaled_grouped_mm knows {name} on compute capability {known}, not on {found}"
    if case.missing:
        return f"this build of torch has no scaled_grouped_mm for {name}: {case.missing}"
    return _unfit_operands(case, route.multiple)


def _unfit_operands(case: Case, multiple: int) -> str:
    if {specs_of(recipe)[0].dtype for recipe in (case.a, case.b)} != {torch.float8_e4m3fn}:
        return "scaled_grouped_mm multiplies e4m3 by e4m3 alone"
    if case.dtype != torch.bfloat16:
        return f"scaled_grouped_mm is used for bfloat16, not for {case.dtype}"
    if case.contraction % multiple or case.width % multiple or 0 in (case.contraction, case.width):
        return (
            f"scaled_grouped_mm needs N and K that are multiples of {multiple}, not {case.width} and {case.contraction}"
        )
    return (
        f"scaled_grouped_mm takes up to {MOST_GROUPS} experts, not {case.experts}" if case.experts > MOST_GROUPS else ""
    )
