"""What inference engines call things, if that differs from the model's own names.

    fused      linears that an engine runs as one, and which therefore share scales
    experts    a weight [E, N, K] of all experts is E linears `<experts>.<e>.<name>`; gate_up_proj is two of each

Names in a layout's files are built on these.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import Tensor

# In NVFP4 they must share one global scale, and in every format one scale of their common input.
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),  # of latent attention
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
)
# What engines call the linear that they make of several.
JOINED = {"qkv_proj": FUSED[0], "fused_qkv_a_proj": FUSED[1], "gate_up_proj": FUSED[2], "w13": FUSED[3]}
WHOLE = ("gate_up_proj", "down_proj")  # weights of all experts that some files have as they are
HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3")}


# Models (`model_type`) whose files have linears of experts under other names than <experts>.<e>.gate_proj, up_proj and
# down_proj: w1, w3, w2 and the like, or one tensor for all. Recent transformers rename them when they load.
RENAMED = frozenset(
    {"aria_text", "deepseek_v4", "granitemoe", "granitemoehybrid", "granitemoeshared", "kimi_linear", "lfm2_moe"}
    | {"minimax", "minimax_m2", "minimax_m3_vl", "mixtral", "phimoe", "qwen3_vl_moe"}
)


@dataclass(frozen=True)
class Piece:
    """A linear [N, K] that engines know by a module's name: some rows of one expert, or all of a weight.

    expert: its number, None for a weight of 2 dims, and for one of all experts that is stored whole. rows: (first,
    last + 1) in the weight [.., N, K]. turned: they are columns of a weight [E, K, N], and the linear is its transpose.
    """

    module: str
    expert: int | None
    rows: tuple[int, int]
    turned: bool = False

    def of(self, weight: Tensor) -> Tensor:
        """Return the linear, of the values of the weight."""
        first, last = self.rows
        own = weight if self.expert is None else weight[self.expert]
        return own[:, first:last].transpose(0, 1) if self.turned else own[first:last]


def pieces_of(name: str, shape: Sequence[int]) -> list[Piece] | None:
    """Return the linears that a weight consists of; None for one that engines do not know as a linear.

    Args:
        name: its fqn; `<module>.weight`, or `<module>.experts.<parameter>` for the weights of all experts.
        shape: [N, K] or [E, N, K].
    """
    parent, _, own = name.rpartition(".")
    if len(shape) == 2 and own == "weight":
        return [Piece(parent, None, (0, shape[0]))]
    if len(shape) != 3 or parent.rpartition(".")[2] != "experts":
        return None
    halves = HALVES.get(own, (own,))
    # Rows that cannot be halved are not gate and up, whatever the name says.
    if shape[1] % len(halves):
        return None
    rows = shape[1] // len(halves)
    return [
        Piece(f"{parent}.{expert}.{half}", expert, (number * rows, (number + 1) * rows))
        for expert in range(shape[0])
        for number, half in enumerate(halves)
    ]


def turned_pieces(name: str, shape: Sequence[int]) -> list[Piece]:
    """Return the linears of a dense weight of all experts that models multiply by as it is, [E, K, N]."""
    return [replace(piece, turned=True) for piece in pieces_of(name, (shape[0], shape[2], shape[1])) or ()]


def whole_experts(name: str, shape: Sequence[int]) -> list[Piece] | None:
    """Return a weight of all experts that is stored whole as one piece; None for any other weight."""
    parent, _, own = name.rpartition(".")
    if len(shape) != 3 or parent.rpartition(".")[2] != "experts" or own not in WHOLE:
        return None
    return [Piece(name, None, (0, shape[1]))]


def turned_experts(shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Find weights of all experts that are not linears [E, N, K], although their names say so.

    Models that multiply by the weight as it is (x @ W) have gate_up_proj [E, K, 2 N] and down_proj [E, N, K]: their
    rows are columns of a linear. One weight alone could be read both ways; the two together fit only one.

    Args:
        shapes: of all tensors, by name.
    """
    turned: set[str] = set()
    for name, shape in shapes.items():
        parent, _, own = name.rpartition(".")
        down = f"{parent}.down_proj"
        if own == "gate_up_proj" and len(shape) == 3 and len(shapes.get(down, ())) == 3:
            _, rows, columns = shape
            # As linears, gate_up_proj is [E, 2 I, H] and down_proj [E, H, I].
            if (rows, columns) != (2 * shapes[down][2], shapes[down][1]):
                turned |= {name, down}
    return turned


def fused_key(module: str) -> tuple[str, ...] | None:
    """Return a key that all linears share which an engine runs as one; None for a linear that it runs alone."""
    parent, _, own = module.rpartition(".")
    fused = next((names for names in FUSED if own in names), None)
    return (parent, *fused) if fused else None


def fused_sets(modules: Iterable[str], also: Mapping[str, str] = MappingProxyType({})) -> list[list[str]]:
    """Return the modules in sets that an engine fuses, in order; a module that is fused with none is alone.

    also: module -> its name in memory, if that differs; files may call q_proj otherwise.
    """
    sets: dict[tuple[str, ...], list[str]] = {}
    for module in modules:
        sets.setdefault(fused_key(module) or fused_key(also.get(module, module)) or (module,), []).append(module)
    return list(sets.values())
