"""Tell which linears of a state dict, a checkpoint or a directory take inputs that are rotated at run time.

Beside such a weight `<module>.weight` stands `<module>.input_rotation`, uint8 [block] (see
qtensor/products/input_rotation.py). Its name and its shape say everything, so entries are enough to know it:
no value is read.
"""

from collections.abc import Collection, Mapping

from dcp_adapters.records.entry import Entry
from qtensor.products.input_rotation import MARKER, is_block_marker


def is_marker(name: str) -> bool:
    """Tell whether this is the name of an entry that says that inputs are rotated."""
    return name == MARKER or name.endswith(f".{MARKER}")


def markers_among(*sides: Collection[str]) -> set[str]:
    """The names in any of these collections that say that inputs are rotated."""
    return {name for names in sides for name in names if is_marker(name)}


def weight_beside(name: str) -> str:
    """Return the name of the weight that an entry `<module>.input_rotation` is about."""
    return f"{name.removesuffix(MARKER)}weight"


def has_weight(name: str, names: Collection[str]) -> bool:
    """Tell whether the weight of an entry `<module>.input_rotation` is among the names, whole or as parts."""
    weight = weight_beside(name)
    return weight in names or f"{weight}.payload" in names


def block_of(entry: Entry) -> int:
    """Return the block that an entry `<module>.input_rotation` says.

    Raises:
        ValueError: it has another dtype or shape.
    """
    if entry.recipe is not None or not is_block_marker(entry.dtype, entry.shape):
        raise ValueError(
            f"{entry.name} is {entry.kind} {list(entry.shape)}; under this name, expected uint8 [block] with a power "
            "of two from 2 on, which says that the inputs of the linear are rotated at run time; use another name for "
            "anything else"
        )
    return entry.shape[0]


def blocks_in(entries: Mapping[str, Entry]) -> dict[str, int]:
    """Return name -> block of each entry that says that inputs are rotated. Raises ValueError as `block_of`."""
    return {name: block_of(entry) for name, entry in entries.items() if is_marker(name)}


def rotations_in(entries: Mapping[str, Entry]) -> dict[str, int]:
    """Return fqn -> block of each linear of a flat state dict whose inputs are rotated at run time.

    Raises:
        ValueError: as `block_of`; the weight is not there.
    """
    rotated = {}
    for name, block in blocks_in(entries).items():
        if not has_weight(name, entries):
            raise ValueError(
                f"{name} says that inputs of a linear are rotated at run time, and {weight_beside(name)} is not there; "
                "give both together, or leave both out"
            )
        rotated[name.removesuffix(MARKER).removesuffix(".")] = block
    return rotated


def say_inputs(block: int) -> str:
    """Say what reaches a weight whose inputs are rotated in such blocks; 0: not at all."""
    return f"inputs that are rotated at run time in blocks of {block}" if block else "inputs as they are"


def advise_rotating(entry: Entry, held: Collection[str]) -> str:
    """Say what to do about an entry that a model of these names lacks: "", unless it says that inputs rotate."""
    if not is_marker(entry.name):
        return ""
    if not has_weight(entry.name, held):
        return (
            f", nor {weight_beside(entry.name)}, which is for {say_inputs(block_of(entry))}: build the model with that "
            "linear (experts that it stacks in one weight can not rotate their inputs)"
        )
    block, module = block_of(entry), entry.name.removesuffix(MARKER).removesuffix(".")
    return (
        f", and {weight_beside(entry.name)} is for {say_inputs(block)}: "
        f"call layerwise.rotate_inputs_(model, {{{module!r}: {block}}}) first"
    )


def advise_not_rotating(name: str, held: Collection[str]) -> str:
    """Say what to do about an entry that a source lacks: "", unless it says that inputs are rotated."""
    if not (is_marker(name) and has_weight(name, held)):
        return ""
    return (
        f", which rotates inputs, and {weight_beside(name)} is for {say_inputs(0)}: import it into a model that does "
        "not rotate them, and call layerwise.rotate_ on that"
    )
