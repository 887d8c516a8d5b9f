"""Changes of bytes, and of JSON as a tree that is written anew; every one says what it did."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

EXTREMES = (
    *(0, 1, -1, 2, 7, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53),
    *(2**62, 2**63 - 1, 2**63, 2**64, -(2**31), -(2**63), 10**30, 10**400),
)
TEXTS = (
    *("", "x", ".", "..", "/", "../outside", "../../outside", "/etc/passwd", "a/../../outside", "C:\\outside", "a\0b"),
    *("\u00e9", "\ud800", "\u202e", "\u00df" * 300, "9" * 5000, "NaN", "null", "__class__", "payload"),
    *("torch.float32", "float32", "bfloat16", "float8_e4m3fn", "int8", "BF16", "F4"),
    *("re:(.+)+!", "re:[", "5 ffffffffffffffff"),
)


class Raw:
    """Text that stands for a value as it is, valid JSON or not."""

    def __init__(self, text: str) -> None:
        self.text = text


class Twice:
    """An object in which a key is there twice."""

    def __init__(self, held: dict[str, Any], key: str, other: Any) -> None:
        self.held, self.key, self.other = held, key, other


DEEP = Raw("[" * 30000 + "]" * 30000)


def changed_bytes(rng: Random, data: bytes, told: list[str], *, within: tuple[int, int] | None = None) -> bytes:
    """One to four of: bits flipped, bytes set, cut out, doubled, swapped, inserted, a number of 8 bytes moved."""
    held = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        low, high = within or (0, len(held))
        high = min(high, len(held))
        if low >= high:
            break
        at, size = rng.randrange(low, high), rng.choice((1, 1, 2, 4, 8, 40))
        kind = rng.choice(("flip", "flip", "set", "drop", "repeat", "swap", "insert", "cut", "count"))
        told.append(f"{kind} at {at} ({size})")
        if kind == "flip":
            held[at] ^= 1 << rng.randrange(8)
        elif kind == "set":
            held[at] = rng.randrange(256)
        elif kind == "drop":
            del held[at : at + size]
        elif kind == "repeat":
            held[at:at] = held[at : at + size]
        elif kind == "swap":
            other = rng.randrange(low, high)
            held[at], held[other] = held[other], held[at]
        elif kind == "insert":
            held[at:at] = rng.randbytes(size)
        elif kind == "cut":
            del held[at:]
        else:
            held[at : at + 8] = (rng.choice(EXTREMES) % 2**64).to_bytes(8, "little")
    return bytes(held)


def as_text(value: Any) -> str:
    """JSON of a tree with `Raw` and `Twice` in it."""
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, Twice):
        inside = [f"{json.dumps(key)}:{as_text(item)}" for key, item in value.held.items()]
        return "{" + ",".join([*inside, f"{json.dumps(value.key)}:{as_text(value.other)}"]) + "}"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(str(key))}:{as_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(as_text, value)) + "]"
    return json.dumps(value)


def changed_json(rng: Random, value: Any, told: list[str], *, plain: bool = False) -> Any:
    """A copy of a JSON value with one or two changes; `plain`: without `Raw` and `Twice`."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2))):
        found = list(_places(value, ""))
        if not found:
            return _other(rng, value, plain=plain)
        holder, key, where = rng.choice(found)
        told.append(_change(rng, value, holder, key, plain=plain) + f" at {where}")
    return value


def _places(value: Any, where: str) -> Iterator[tuple[Any, Any, str]]:
    """(container, key or index, path) of everything below a value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield value, key, f"{where}/{str(key)[:40]}"
        yield from _places(item, f"{where}/{str(key)[:40]}")


def _change(rng: Random, whole: Any, holder: Any, key: Any, *, plain: bool) -> str:
    kinds: dict[str, Callable[[], None]] = {
        "another value": lambda: holder.__setitem__(key, _other(rng, holder[key], plain=plain)),
        "left out": lambda: holder.__delitem__(key),
        "a value from elsewhere": lambda: holder.__setitem__(key, _elsewhere(rng, whole)),
        "swapped with its neighbour": lambda: _swap(rng, holder, key),
        "renamed": lambda: _rename(rng, holder, key),
        "put in a list": lambda: holder.__setitem__(key, [holder[key]]),
        "doubled": lambda: _double(rng, holder, key, plain=plain),
    }
    weights = (8, 2, 2, 2, 2, 1, 2)
    kind = rng.choices(list(kinds), weights)[0]
    kinds[kind]()
    return kind


def _other(rng: Random, value: Any, *, plain: bool) -> Any:
    """Another value: often of the same type, else of any."""
    if rng.random() < 0.6:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            near = value + rng.choice((-1, 1, 2, 8)), value * 2, -value, value // 2, rng.choice(EXTREMES)
            return rng.choice(near)
        if isinstance(value, float):
            return rng.choice((0.0, -value, value * 2, 1e308, -1e308, 5e-324, float("nan"), float("inf")))
        if isinstance(value, str):
            cut = rng.randrange(len(value) + 1)
            near = value[:cut], value[:cut] + "x" + value[cut:], value.upper(), f" {value}", value[::-1], value * 2
            return rng.choice((*near, rng.choice(TEXTS), rng.choice(TEXTS)))
    strange = [None, True, False, rng.choice(EXTREMES), 0.5, float("nan"), rng.choice(TEXTS), [], {}, [value], {"": 1}]
    return rng.choice(strange if plain else [*strange, DEEP, Raw("1e999"), Raw("-"), Raw('"\\ud800"')])


def _elsewhere(rng: Random, whole: Any) -> Any:
    holder, key, _ = rng.choice(list(_places(whole, "")))
    return copy.deepcopy(holder[key])


def _swap(rng: Random, holder: Any, key: Any) -> None:
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    other = rng.choice(keys)
    holder[key], holder[other] = holder[other], holder[key]


def _rename(rng: Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder[str(_other(rng, key, plain=True))] = holder.pop(key)
    else:
        holder.insert(rng.randrange(len(holder) + 1), holder.pop(key))


def _double(rng: Random, holder: Any, key: Any, *, plain: bool) -> None:
    item = holder[key]
    if isinstance(holder, list):
        holder.insert(key, copy.deepcopy(item))
    elif isinstance(item, dict) and item and not plain:
        own = rng.choice(list(item))
        holder[key] = Twice(item, own, _other(rng, item[own], plain=False))
    else:
        holder[f"{key}x"] = copy.deepcopy(item)
