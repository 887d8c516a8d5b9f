"""Linears whose inputs are rotated at run time: finds those that globs name, and checks that their blocks fit."""

from collections.abc import Iterator, Mapping

from torch import nn

from qtensor.products.input_rotation import MARKER
from qtensor.spec.selection import matches, unmatched


def find_linears(
    caller: str, modules: Mapping[str, nn.Module], blocks: Mapping[str, int]
) -> Iterator[tuple[str, nn.Linear, int]]:
    """Yield fqn, linear and block of all that the globs name.

    Args:
        caller: for messages.
        modules: of the model, by fqn.
        blocks: glob over fqns -> block.

    Raises:
        ValueError, TypeError: a glob that matches nothing, something else than a linear, several blocks for one, a
            block that does not divide its inputs, inputs that are rotated already.
    """
    for pattern in unmatched([*blocks], modules):
        raise ValueError(f"{caller}: the pattern {pattern!r} of online= matches no module")
    for name, module in modules.items():
        found = sorted({block for pattern, block in blocks.items() if matches(name, [pattern])})
        if not found:
            continue
        linear, block = check_linear(caller, name, module), found[0]
        if len(found) > 1:
            raise ValueError(f"{caller}: online= has several blocks for {name}: {', '.join(map(str, found))}")
        if linear.in_features % block:
            raise ValueError(
                f"{caller}: block={block} does not divide the {linear.in_features} inputs of {name}, which online= "
                "names"
            )
        # A second hook would rotate the inputs again, and with the same block undo what the first has done.
        if hasattr(linear, MARKER):
            raise ValueError(f"{caller}: the inputs of {name} are rotated at run time already; leave it out of online=")
        yield name, linear, block


def check_linear(caller: str, name: str, module: nn.Module) -> nn.Linear:
    """Return the module; raise TypeError unless it is a linear with the forward of nn.Linear."""
    # A subclass may do more with its inputs or its weight than multiply them.
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise TypeError(f"{caller}: {name} is a {type(module).__name__}; only nn.Linear, as it is, can be rotated")
    return module
