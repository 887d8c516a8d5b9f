"""The keys of a nested state dict under which the model's weights are, and their names below these keys."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dcp_adapters.hf.models.adapters import renamed
from fsdp_hooks.wrappers import plain_name
from qtensor.states.kinds import IN_8_BITS


def weights_prefix(paths: Mapping[str, Sequence[Any]], quantized: set[str], like: Collection[str] | None = None) -> str:
    """Return what the names of the model's weights begin with, in a state dict with leaves at `paths`.

    "" for a flat one, else the keys of the innermost dict that holds everything quantized. Raises ValueError if that is
    the outermost dict of a nested one, which may also hold optimizer states, or if weights are outside of it.
    If nothing is quantized, the keys of the dict whose names are in `like`.
    """
    # an optimizer's moments may be quantized, too; a last key may be a part's, or all of a flattened state's name
    above = [[str(key) for key in paths[name][:-1]] for name in quantized if name.rpartition(".")[2] not in IN_8_BITS]
    if all(len(path) == 1 for path in paths.values()):
        return ""
    if not above:
        return "" if like is None else _find_prefix_like(paths, like)
    shared = _find_common_keys(above)
    if not shared:
        tops = sorted({keys[0] if keys else "the outermost" for keys in above})
        raise ValueError(
            f"the state dict is nested, and quantized weights are under {' and '.join(tops)}; say by prefix=... "
            "(--prefix) where the model is"
        )
    prefix = "".join(f"{key}." for key in shared)
    # They may be another model's, so which one is exported must be said.
    outside = [name for name in paths if name.endswith(".weight") and not name.startswith(prefix)]
    if outside:
        raise ValueError(
            f"everything quantized is under {prefix!r}, and {len(outside)} other weights are not ({outside[0]}, ...); "
            "say by prefix=... (--prefix) what to export"
        )
    return prefix


def _find_prefix_like(paths: Mapping[str, Sequence[Any]], like: Collection[str]) -> str:
    """Return the keys under which dense leaves have names of `like`; if there are none, those that hold everything."""
    found: Counter[str] = Counter()
    for name, path in paths.items():
        for depth in range(len(path)):
            prefix = "".join(f"{key}." for key in path[:depth])
            found[prefix] += plain_name(name.removeprefix(prefix)) in like
    most = max(found.values())
    best = [prefix for prefix, count in found.items() if count == most]
    if most and len(best) == 1:
        return best[0]
    shared = _find_common_keys([[str(key) for key in path[:-1]] for path in paths.values()])
    if most or not shared:
        where = (
            f"under {' and '.join(prefix.removesuffix('.') or 'the outermost' for prefix in best)}"
            if most
            else "under none of its keys"
        )
        raise ValueError(
            f"rest= (--rest) is nested, and names of the source's weights are {where}; give what holds the model's "
            "weights alone"
        )
    return "".join(f"{key}." for key in shared)


def _find_common_keys(paths: Sequence[Sequence[str]]) -> list[str]:
    """Return the keys that all paths begin with."""
    shared = []
    for keys in zip(*paths, strict=False):
        if len(set(keys)) > 1:
            break
        shared.append(keys[0])
    return shared


def under(prefix: str, named: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the entries whose names begin with the prefix, under the rest of their names as the plain model has them.

    Raises:
        ValueError: there are none, or two have one name without what wrappers add to it.
    """
    if not named:
        raise ValueError(f"{where}: it holds no tensors")
    # Wrappers may have put words into the prefix as into the names.
    own = plain_name(prefix)
    pairs = [(name, plain) for name in named if (plain := plain_name(name)).startswith(own)]
    if not pairs:
        tops = sorted({name.partition(".")[0] for name in named})
        raise ValueError(f"{where}: no tensor's name begins with {prefix!r}; names begin with {', '.join(tops[:8])}")
    return renamed(named, ((name, plain.removeprefix(own)) for name, plain in pairs), "wrappers")


OUTER = ("module.", "base_model.model.")  # of DistributedDataParallel and of peft, and perhaps of a model itself


def outer_prefix(names: Collection[str], known: Collection[str], *, strict: bool) -> str:
    """Return what all names begin with and those in the model's files do not: a wrapper's or a holder's name.

    Args:
        names: of tensors, by plain names.
        known: those in the files of the model; empty if they are not known.
        strict: refuse what may be a wrapper's name if nothing is known.

    Raises:
        ValueError: all names begin as those of a wrapped model do, and no files tell whether this one is.
    """
    steps = _find_common_keys([name.split(".")[:-1] for name in names])
    prefixes = ["".join(f"{key}." for key in steps[:count]) for count in range(len(steps) + 1)]
    if known:
        counts = [sum(name.removeprefix(prefix) in known for name in names) for prefix in prefixes]
        # The shortest one that brings most names among the known ones.
        return prefixes[counts.index(max(counts))]
    doubtful = next((outer for outer in OUTER if outer in prefixes), None)
    if strict and doubtful is not None:
        raise ValueError(
            f"all names begin with {doubtful!r}, as those of a wrapped model do, and nothing tells whether this one "
            f"is: give the module itself, config= the model's directory, or prefix={doubtful!r} (--prefix); "
            "prefix='' where the model has these names"
        )
    return ""
