"""Read what DCP writes into `.metadata`, without the ability to run anything.

`.metadata` is a pickle, and a pickle is a program. Restricting what a general unpickler may import is not enough: with
harmless names alone a few bytes can reserve gigabytes (a memo index of 2^32), copy one list a million times, hash a
nest of tuples for ever, or change the attributes of a class for the whole process. So this is a separate interpreter
for the few operations that pickling DCP's records needs:

    plain values                 None, bool, int, float, str, tuple, list, dict with names or MetadataIndex as keys
    STACK_GLOBAL, GLOBAL         only the names of metadata_names.py; nothing is imported
    NEWOBJ, BUILD                a record of DCP without calling its class, and its fields
    REDUCE                       torch.Size, a layout's name, a memory format, a path, Metadata with its first field

Anything else stops it. Memory and time stay proportional to the bytes read. What comes out has the right types of
records, but not yet sensible contents: see metadata_checks.py.

Records of another version of torch are read, too. A field that the running torch does not know is left out if its
value is plain, and refused if it is not; a field that the file does not hold has torch's default.
"""

import dataclasses
import struct
from collections.abc import Callable, Mapping
from pickletools import opcodes
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties

from dcp_adapters.stored.reading.metadata_names import FIELDS, MOST_DIMS, NAMES, PATHS, Function

MOST_PATHS = 16  # a checkpoint names itself once
MOST_UNKNOWN = 16  # fields of one record that the running torch does not have
KNOWN_FIELDS = {kind: {field.name: field for field in dataclasses.fields(kind)} for kind in FIELDS}
ATOMS = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.layout)
UINT4 = struct.Struct("<I")


def read_plain(
    data: bytes,
    what: str,
    *,
    names: Mapping[tuple[str, str], Any] = NAMES,
    storage: Callable[[Any], Any] | None = None,
) -> Any:
    """Read the one object that is pickled in `data`.

    Args:
        data: the whole pickle.
        what: names it in errors.
        names: what globals stand for: a class in FIELDS, a Function, or a value.
        storage: what a persistent id stands for; None: the pickle may hold none.

    Raises:
        ValueError: a global or an operation that no metadata of DCP has, or data that is damaged or cut off. Nothing
            has been imported, called or executed.
    """
    machine = _Machine(data, names, storage)
    try:
        return machine.run()
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, struct.error, UnicodeDecodeError) as error:
        raise ValueError(
            f"{what}: damaged or cut off: {type(error).__name__} at byte {min(machine.at, len(data))} of {len(data)}; "
            "use another checkpoint"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{what}: refused at byte {min(machine.at, len(data))}: it holds {error}. Nothing of it has been executed. "
            "DCP writes nothing of that kind: use another checkpoint, and do not read this one with a reader that "
            "unpickles freely"
        ) from error


class _Machine:
    """The interpreter. `stack` is the part above the last mark, `below` holds the parts under each mark."""

    def __init__(self, data: bytes, names: Mapping[tuple[str, str], Any], storage: Callable[[Any], Any] | None) -> None:
        self.data, self.names, self.storage = data, names, storage
        self.at = 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.paths = 0

    def run(self) -> Any:
        data, steps = self.data, {op: step.__get__(self) for op, step in STEPS.items()}
        while (op := data[self.at]) != STOP:
            self.at += 1
            step = steps.get(op)
            if step is None:
                name = next((known.name for known in opcodes if ord(known.code) == op), f"0x{op:02x}")
                raise ValueError(f"the pickle operation {name}")
            step()
        if len(self.stack) != 1 or self.below:
            raise ValueError("more or less than one object")
        return self.stack[0]

    # -- values --------------------------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        piece = self.data[self.at : self.at + count]
        if len(piece) != count:
            raise IndexError("the data ends here")
        self.at += count
        return piece

    def protocol(self) -> None:
        if (version := self.take(1)[0]) > 5:
            raise ValueError(f"pickle protocol {version}")

    def frame(self) -> None:
        self.take(8)  # says how far to read ahead; everything is here already

    def int1(self) -> None:
        self.stack.append(self.data[self.at])
        self.at += 1

    def int2(self) -> None:
        self.stack.append(int.from_bytes(self.take(2), "little"))

    def int4(self) -> None:
        self.stack.append(int.from_bytes(self.take(4), "little", signed=True))

    def long1(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.take(1)[0]), "little", signed=True))

    def float8(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def short_text(self) -> None:
        start = self.at + 1
        self.at = start + self.data[self.at]
        if self.at > len(self.data):
            raise IndexError("the data ends here")
        self.stack.append(_text(self.data[start : self.at]))

    def text(self) -> None:
        self.stack.append(_text(self.take(int.from_bytes(self.take(4), "little"))))

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get1(self) -> None:
        self.stack.append(self.memo[self.data[self.at]])
        self.at += 1

    def get4(self) -> None:
        self.stack.append(self.memo[UINT4.unpack_from(self.data, self.at)[0]])
        self.at += 4

    def put1(self) -> None:
        self.memo[self.take(1)[0]] = self.stack[-1]

    def put4(self) -> None:
        self.memo[int.from_bytes(self.take(4), "little")] = self.stack[-1]

    # -- containers ----------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.below.pop()
        return items

    def tuple_(self) -> None:
        items = tuple(self.since_mark())
        self.stack.append(items)

    def tuple1(self) -> None:
        self.stack[-1] = (self.stack[-1],)

    def tuple2(self) -> None:
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def tuple3(self) -> None:
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def append(self) -> None:
        item = self.stack.pop()
        self.extend([item])

    def appends(self) -> None:
        self.extend(self.since_mark())

    def extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise ValueError("items for something that is no list")
        self.stack[-1].extend(items)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.update([key, value])

    def set_items(self) -> None:
        self.update(self.since_mark())

    def update(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("items for something that is no dict")
        pairs = iter(items)
        # Only these hash in a time that their bytes explain: a nest of tuples that name each other hashes for ever.
        for key, value in zip(pairs, pairs, strict=True):
            if type(key) is not str and not _is_index(key):
                raise ValueError("a dict whose keys are neither strings nor MetadataIndex")
            target[key] = value

    # -- records -------------------------------------------------------------------------------------------------------

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.push_named(module, name)

    def global_(self) -> None:
        module, name = self.line(), self.line()
        self.push_named(module, name)

    def line(self) -> str:
        return self.take(self.data.index(b"\n", self.at) + 1 - self.at)[:-1].decode()

    def instance(self) -> None:
        module, name = self.line(), self.line()
        raise ValueError(f"the global {module[:200]}.{name[:200]}")

    def push_named(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a global whose name is no string")
        found = self.names.get((module, name))
        if found is None:
            raise ValueError(f"the global {module[:200]}.{name[:200]}")
        self.stack.append(found)

    def persistent(self) -> None:
        if self.storage is None:
            raise ValueError("a persistent id")
        self.stack.append(self.storage(self.stack.pop()))

    def new(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if not isinstance(kind, type) or kind not in FIELDS or arguments != ():
            raise ValueError("a new object that is no record of DCP")
        self.stack.append(object.__new__(kind))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        # As the metadata of QuantizedSavePlanner is pickled (torch_private.Committed).
        if function is Metadata and type(arguments) is tuple and len(arguments) == 1:
            self.stack.append(object.__new__(Metadata))
            vars(self.stack[-1])["state_dict_metadata"] = arguments[0]
            return
        if type(function) is not Function or type(arguments) is not tuple:
            raise ValueError("a call of something that is not called in metadata")
        if function in PATHS:
            self.paths += 1
            if self.paths > MOST_PATHS:
                raise ValueError(f"more than {MOST_PATHS} paths")
        self.stack.append(function.call(*arguments))

    def build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        kind = type(record)
        if kind not in FIELDS:
            raise ValueError("fields for something that is no record of DCP")
        known = KNOWN_FIELDS[kind]
        # Before anything walks over them: one long dict may be given to a million records.
        if type(state) in (tuple, dict) and len(state) > len(known) + MOST_UNKNOWN:
            raise ValueError(f"a {kind.__name__} with more than {MOST_UNKNOWN} fields that this torch does not know")
        # TensorProperties pickles its fields as a tuple, to which later torch appends.
        if kind is TensorProperties and type(state) is tuple and len(state) >= len(FIELDS[kind]):
            names = [*known, *(f"the {at + 1}th" for at in range(len(known), len(state)))]
            state = dict(zip(names, state, strict=False))
        # An index with fields may be a key already, and a dict is lost whose keys change their hashes.
        if type(state) is not dict or (kind is MetadataIndex and vars(record)):
            raise ValueError(f"a {kind.__name__} whose fields are no dict, or are given twice")
        unknown = [name for name in state if name not in known]
        for name in unknown:
            if not _is_small_and_flat(state[name]):
                raise ValueError(
                    f"a {kind.__name__} with a field {str(name)[:200]!r}, which this torch does not know, and whose "
                    "value is not plain"
                )
        given = {name: value for name, value in state.items() if name in known} if unknown else state
        for name, default in DEFAULTS[kind].items():
            vars(record).setdefault(name, default)
        vars(record).update(given)


def _text(data: bytes) -> str:
    """Decode a string as pickle writes it: a path may hold bytes that are no UTF-8, in Python lone surrogates."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        text = data.decode("utf-8", "surrogatepass")
        text.encode("utf-8", "surrogateescape")  # raises for what stands for no byte
        return text


def _defaults(kind: type) -> dict[str, Any]:
    """Return torch's defaults for fields that a file may leave out: those that not every torch from 2.11 on has."""
    return {
        name: field.default
        for name, field in KNOWN_FIELDS[kind].items()
        if name not in FIELDS[kind] and field.default is not dataclasses.MISSING
    }


DEFAULTS = {kind: _defaults(kind) for kind in FIELDS}


def _is_small_and_flat(value: Any) -> bool:
    """Tell whether this is a value without contents, or a short flat sequence or dict of such values."""
    if type(value) in (tuple, list, dict) and len(value) > MOST_DIMS:
        return False
    if type(value) in (tuple, list):
        return all(type(item) in ATOMS for item in value)
    if type(value) is dict:
        return all(type(key) is str and type(item) in ATOMS for key, item in value.items())
    return type(value) in ATOMS


def _is_index(key: Any) -> bool:
    """Tell whether this is a MetadataIndex that can be hashed."""
    return (
        type(key) is MetadataIndex
        and type(vars(key).get("fqn")) is str
        and type(vars(key).get("offset")) in (torch.Size, type(None))
    )


def _pushes(make: Callable[[], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make())


STOP = ord(".")
STEPS: dict[int, Callable[[_Machine], None]] = {
    ord(code): step
    for code, step in {
        "N": _pushes(lambda: None), "\x88": _pushes(lambda: True), "\x89": _pushes(lambda: False), ")": _pushes(tuple),
        "]": _pushes(list), "}": _pushes(dict), "\x80": _Machine.protocol, "\x95": _Machine.frame, "K": _Machine.int1,
        "M": _Machine.int2, "J": _Machine.int4, "\x8a": _Machine.long1, "G": _Machine.float8,
        "\x8c": _Machine.short_text, "X": _Machine.text, "\x94": _Machine.memoize,
        "h": _Machine.get1, "j": _Machine.get4, "q": _Machine.put1, "r": _Machine.put4, "(": _Machine.mark,
        "t": _Machine.tuple_, "\x85": _Machine.tuple1, "\x86": _Machine.tuple2, "\x87": _Machine.tuple3,
        "a": _Machine.append, "e": _Machine.appends, "s": _Machine.set_item, "u": _Machine.set_items,
        "\x93": _Machine.stack_global, "c": _Machine.global_, "i": _Machine.instance, "\x81": _Machine.new,
        "R": _Machine.reduce, "b": _Machine.build, "Q": _Machine.persistent,
    }.items()
}  # fmt: skip
