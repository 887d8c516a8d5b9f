"""Which optimizers step how, and what their states are called: tables, for whoever steps, shows or saves them."""

import inspect
import types
from typing import Any

import torch

MASTER = "master_weight"
REMAINDER = "master_remainder"  # in its place, of a master that is kept compressed
MARK = "master_recipe"  # beside a remainder: a number for the recipe, or dtype, whose values it is counted from
OF_MASTERS = frozenset({MASTER, REMAINDER, MARK})
# what the 16 bits of a remainder, an int16, travel as: neither gloo nor NCCL moves int16. Nothing computes with it
WORD = torch.float16
# moments -> whether they are means of squares; other entries of a state are kept as they are
SQUARED = {"exp_avg": False, "momentum_buffer": False, "exp_avg_sq": True, "square_avg": True}
# a mean of squares -> the entry beside it whose square is subtracted from it, which leaves no room for rounding
CENTERED = {"square_avg": "grad_avg"}
ROOT = "_root"  # behind the name of a mean of squares that is kept as its root: no reader is to take it for the square
ROOTS = frozenset(name + ROOT for name, squared in SQUARED.items() if squared)
# the entries that may be kept quantized
IN_8_BITS = frozenset(name + ROOT if squared else name for name, squared in SQUARED.items())

CHUNK = {"cpu": 2**22}  # elements; the optimizer's temporaries for that many still fit into the cache
CHUNK_ELSEWHERE = 2**27  # enough to keep a GPU busy through a launch

# torch's optimizers that treat each parameter on its own; any other may look at all gradients together
APART = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.Adamax,
        torch.optim.AdamW,
        torch.optim.ASGD,
        torch.optim.Muon,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)

# those of them that treat each element on its own: a shard of a weight steps as a plain tensor
ELEMENTWISE = APART - {torch.optim.Adafactor, torch.optim.Muon}
# those that take matrices as a whole, for which optim/matrices knows how shards step; a subclass may do more
MATRICES = frozenset({torch.optim.Muon})


def is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer treats each element on its own: one of torch's, or a class that says it does.

    It says so by `elementwise = True`, of itself alone: a subclass may do more. None of Muon does.
    """
    says = vars(kind).get("elementwise") is True and not issubclass(kind, tuple(MATRICES))
    return kind in ELEMENTWISE or says


def takes_shards_apart(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether code of an optimizer takes the local tensors of DTensors, and its class does not say what it does.

    It says so by `elementwise`, True or False. Code that computes on DTensors computes on whole tensors; this need not.
    Only what its methods call by name in Python is looked at.
    """
    # what makes one, such as a functools.partial, has no classes to look at
    mro: tuple[type, ...] = getattr(kind, "__mro__", ())
    if not mro or isinstance(vars(kind).get("elementwise"), bool):
        return False
    own = [base for base in mro if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    due: list[Any] = [value for base in own for value in vars(base).values()]
    seen = set()
    while due:
        function = due.pop()
        if isinstance(function, staticmethod | classmethod):
            function = function.__func__
        if not inspect.isfunction(function):
            continue
        function = inspect.unwrap(function)  # as torch.no_grad() and others wrap it
        if not inspect.isfunction(function) or function in seen or (function.__module__ or "").startswith("torch."):
            continue
        seen.add(function)
        names = _names_in(function.__code__)
        if not names.isdisjoint({"to_local", "_local_tensor"}):
            return True
        due += [function.__globals__[name] for name in names if name in function.__globals__]
    return False


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in a function's code, and in functions inside of it."""
    inner = [_names_in(one) for one in code.co_consts if isinstance(one, types.CodeType)]
    return set(code.co_names).union(*inner)
