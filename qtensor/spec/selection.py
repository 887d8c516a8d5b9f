"""Names chosen by globs ("lm_head", "model.layers.*.mlp.*"); case matters, and a * also matches dots."""

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of the globs."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def unmatched(patterns: Iterable[str], names: Collection[str]) -> list[str]:
    """The globs that match none of the names."""
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]


def check_lists(caller: str, **patterns: Iterable[str]) -> None:
    """Raise TypeError where an argument is a string: its characters would be taken for globs."""
    for argument, given in patterns.items():
        if isinstance(given, str):
            raise TypeError(f"{caller}: {argument} is a list of patterns, got {given!r}; write [{given!r}]")
