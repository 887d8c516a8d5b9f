"""What users can call, as text: each public name with its kind and signature, version by version.

`public_api.json` holds it for every version; tests/packaging/test_public_api.py compares the newest with the code.
After a change that is meant:

    python -m tests.packaging.public_api      # writes the entry of the version in fsdp_hooks/release.py

The names are those of the packages' `__all__` (tests/test_imports.py lists them). A public class tells its own members
and those from bases that are not public; what it has from a public base stands there. Annotations are told without
modules, so that moving a class changes nothing.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fsdp_hooks.all_gather import SignedMethod
from fsdp_hooks.release import VERSION

ROOT = Path(__file__).resolve().parent.parent.parent
STORED = Path(__file__).with_name("public_api.json")
PACKAGES = ("fsdp_hooks", "qtensor", "dcp_adapters", "layerwise")
REGENERATE = "python -m tests.packaging.public_api"

Surface = dict[str, str]  # "qtensor.quantize" -> "function (x: Tensor, recipe: Recipe) -> QuantizedTensor"


def surface(packages: Mapping[str, Any]) -> Surface:
    """The public API of packages: name -> module."""
    public = {id(getattr(module, name)) for module in packages.values() for name in module.__all__}
    found: Surface = {}
    for package, module in packages.items():
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isclass(value):
                bases = ", ".join(base.__name__ for base in value.__mro__[1:] if id(base) in public)
                found[f"{package}.{name}"] = f"class({bases}) {signature(value)}"
                own = (base for base in value.__mro__ if base is value or id(base) not in public)
                found |= {f"{package}.{name}.{member}": text for member, text in members(value, own, {*packages})}
            else:
                found[f"{package}.{name}"] = f"function {signature(value)}"
    return dict(sorted(found.items()))


def members(cls: type[Any], bases: Iterator[type[Any]], packages: set[str]) -> Iterator[tuple[str, str]]:
    """Names without an underscore, from bases that the packages define: each once, as the class has it."""
    fields = {field.name: field for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else {}
    seen: set[str] = set()
    for base in bases:
        if base.__module__.partition(".")[0] not in packages:
            continue
        for name in [*vars(base), *inspect.get_annotations(base)]:
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            if name in fields:
                yield name, f"field: {short(inspect.formatannotation(fields[name].type))}"
            else:
                yield name, member(vars(base).get(name))


def member(value: Any) -> str:
    if isinstance(value, SignedMethod):
        value = value.method
    if isinstance(value, property):
        returns = inspect.signature(value.fget).return_annotation if value.fget else Any
        return f"property{'' if value.fset is None else ', settable'}: {short(inspect.formatannotation(returns))}"
    if isinstance(value, staticmethod | classmethod):
        return f"{type(value).__name__} {signature(value.__func__)}"
    return f"method {signature(value)}" if inspect.isfunction(value) else "attribute"


def signature(value: Any) -> str:
    return short(str(inspect.signature(value)))


def short(text: str) -> str:
    """Without modules: `torch.nn.modules.module.Module | None` is `Module | None`."""
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text)


def changes(before: Surface, after: Surface) -> list[str]:
    """What went and what came, as lines of a diff."""
    gone = [f"- {name}: {text}" for name, text in before.items() if after.get(name) != text]
    come = [f"+ {name}: {text}" for name, text in after.items() if before.get(name) != text]
    return sorted(gone + come, key=lambda line: line[2:].partition(":")[0])


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def may_follow(before: str, after: str, changed: list[str]) -> bool:
    """Whether Semantic Versioning lets `after` change this: what goes needs a new major number, in 0.x a new minor."""
    old, new = numbers(before), numbers(after)
    depth = 0
    while depth < len(old) and old[depth] == new[depth]:
        depth += 1
    breaking = any(line.startswith("-") for line in changed)
    return new > old and (not breaking or depth == 0 or (depth == 1 and new[0] == 0))


def released() -> set[str]:
    """Versions that the changelog has a section for."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return set(re.findall(r"^## \[(\d+(?:\.\d+)*)\]", text, flags=re.MULTILINE))


def current() -> str:
    return VERSION


def of_the_code() -> Surface:
    return surface({package: importlib.import_module(package) for package in PACKAGES})


def stored() -> dict[str, Surface]:
    versions: dict[str, Surface] = json.loads(STORED.read_text(encoding="utf-8"))
    return versions


def updated(versions: dict[str, Surface], version: str, now: Surface, done: set[str]) -> dict[str, Surface]:
    """The versions with the API of this one, which must not have been released with another."""
    if version in done and versions.get(version) != now:
        raise SystemExit(
            f"{version} is released and its API stays as it was: raise the version in fsdp_hooks/release.py first "
            "(Semantic Versioning; what goes or changes its signature breaks users)"
        )
    return {**versions, version: now}


if __name__ == "__main__":
    known = stored() if STORED.exists() else {}
    text = json.dumps(updated(known, current(), of_the_code(), released()), indent=2)
    STORED.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(f"wrote {STORED.relative_to(ROOT)}: {current()}\n")
