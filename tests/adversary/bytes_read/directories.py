"""Hugging Face directories: safetensors and their headers, the index, config.json and hf_quant_config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from dcp_adapters import export_hf, import_hf
from dcp_adapters.delta.stored_states import StoredFiles
from dcp_adapters.digests.stored import source_digests
from dcp_adapters.hf.exporting.config import model_config
from dcp_adapters.hf.reading.stored_directory import StoredDirectory
from dcp_adapters.hf.reading.verify_directory import verify_directory
from dcp_adapters.stored.inspect import inspect_checkpoint
from qtensor import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Int4GroupScaling,
    MXFP4BlockScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    quantize,
)
from tests.adversary.bytes_read.changes import as_text, changed_bytes, changed_json
from tests.adversary.bytes_read.outcomes import TOUCHED, Case, facts
from tests.dcp_adapters.cases import values
from tests.dcp_adapters.hf.directories import meta_model, write

TENSOR = Float8CurrentScaling(granularity="tensor")
LAYOUTS: dict[str, dict[str, Any]] = {  # layout -> own name of a linear -> its recipe
    "compressed-tensors": {
        "q_proj": TENSOR,
        "o_proj": Float8CurrentScaling(),
        "in_proj": NVFP4BlockScaling(),
        "down_proj": MXFP8BlockScaling(scale_rounding="floor"),
        "mid_proj": Int4GroupScaling(),
        "w": MXFP4BlockScaling(),
    },
    "modelopt": {"q_proj": TENSOR, "o_proj": NVFP4BlockScaling(), "down_proj": NVFP4BlockScaling(blocks="square")},
    "fp8": {"q_proj": Float8BlockScaling(), "o_proj": Float8BlockScaling()},
    "mxfp4": {},
}
STATIC = ("q_proj",)
CONFIG = {"model_type": "llama", "hidden_size": 64, "dtype": "bfloat16", "tie_word_embeddings": False}


class Directories:
    """An export in each layout, in two files or in one, and a dense one."""

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / "directory"
        self.originals: dict[str, dict[str, bytes]] = {}
        self.states: dict[str, dict[str, Any]] = {}
        for number, layout in enumerate(LAYOUTS):
            self._export(layout, layout, number)
        self._dense("dense")
        self.values = {}
        for name in self.originals:
            self._write(self.originals[name])
            self.values[name] = self._all()
            assert verify_directory(self.path).ok
        file = next(name for name in self.originals["fp8"] if name.endswith(".safetensors"))
        (root / "outside").write_bytes(self.originals["fp8"][file])
        (root / "outside.safetensors").write_bytes(self.originals["fp8"][file])

    def _export(self, name: str, layout: str, seed: int) -> None:
        recipes = LAYOUTS[layout]
        state: dict[str, Any] = {"model.norm.weight": values((64,), seed), "lm_head.weight": values((19, 64), seed + 1)}
        for number, (own, recipe) in enumerate(recipes.items()):
            module = f"model.layers.0.self_attn.{own}"
            state[f"{module}.weight"] = quantize(values((32, 64), 10 * seed + number), recipe)
            if own in STATIC and layout != "fp8":
                state[f"{module}.input_scale"] = torch.tensor(0.25)
        config = CONFIG
        if name == "mxfp4":
            state["model.layers.0.mlp.experts.down_proj"] = quantize(values((3, 32, 64), seed), MXFP4BlockScaling())
            config = CONFIG | {"model_type": "gpt_oss"}
        out = self.root / name
        size = 4000 if layout == "compressed-tensors" else "1GB"
        export_hf(state, out, layout=layout, config=config, max_shard_size=size, progress=False)
        self._keep(name, state)

    def _dense(self, name: str) -> None:
        state: dict[str, Any] = {"model.norm.weight": values((64,), 1), "model.o_proj.weight": values((32, 64), 2)}
        write(self.root / name, state, CONFIG, files=2)
        self._keep(name, state)

    def _keep(self, name: str, state: dict[str, Any]) -> None:
        self.originals[name] = {path.name: path.read_bytes() for path in (self.root / name).iterdir() if path.is_file()}
        self.states[name] = state

    def scenario(self, rng: Random) -> str:
        """One mutant, read in one way."""
        name = rng.choice(list(self.originals))
        case = Case([name], (str(self.path),))
        files = dict(self.originals[name])
        self._mutant(rng, files, case)
        self._write(files)
        reader = rng.choice(list(READERS))
        return READERS[reader](self, case, name)

    def _write(self, files: dict[str, bytes]) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self.path.mkdir()
        for name, data in files.items():
            (self.path / name).write_bytes(data)

    def _all(self) -> dict[str, Any]:
        return facts(import_hf(self.path, progress=False))

    # -- mutants -------------------------------------------------------------------------------------------------------

    def _mutant(self, rng: Random, files: dict[str, bytes], case: Case) -> None:
        kinds: dict[str, Callable[[Random, dict[str, bytes], Case], None]] = {
            "bytes": _bytes,
            "a header": _header,
            "notes": _notes,
            "JSON": _json,
            "offsets": _offsets,
            "files": _files,
        }
        kind = rng.choices(list(kinds), (2, 4, 2, 5, 2, 1))[0]
        case.told.append(kind)
        kinds[kind](rng, files, case)


def _bytes(rng: Random, files: dict[str, bytes], case: Case) -> None:
    name = rng.choice(list(files))
    within = (0, 8 + int.from_bytes(files[name][:8], "little")) if name.endswith(".safetensors") else None
    case.told.append(name)
    files[name] = changed_bytes(rng, files[name], case.told, within=within if rng.random() < 0.7 else None)


def _header(rng: Random, files: dict[str, bytes], case: Case) -> None:
    name = rng.choice(_weights(files))
    header, data = split(files[name])
    case.told.append(name)
    files[name] = joined(as_text(changed_json(rng, header, case.told)), data)


def _notes(rng: Random, files: dict[str, bytes], case: Case) -> None:
    """JSON inside of the header's metadata: digests and recipes."""
    name = rng.choice(_weights(files))
    header, data = split(files[name])
    notes = header.get("__metadata__")
    if not notes:
        _header(rng, files, case)
        return
    key = rng.choice(list(notes))
    case.told.append(f"{name} {key}")
    try:
        notes[key] = as_text(changed_json(rng, json.loads(notes[key]), case.told))
    except ValueError:
        notes[key] += "x"
    files[name] = joined(json.dumps(header), data)
    case.forged = True  # a digest that is not there tells nothing


def _json(rng: Random, files: dict[str, bytes], case: Case) -> None:
    name = rng.choice([name for name in files if name.endswith(".json")])
    case.told.append(name)
    held = json.loads(files[name])
    part = held.get("quantization_config")
    if part and rng.random() < 0.8:
        changed = held | {"quantization_config": changed_json(rng, part, case.told)}
    else:
        changed = changed_json(rng, held, case.told)
    files[name] = as_text(changed).encode(errors="surrogatepass")


def _offsets(rng: Random, files: dict[str, bytes], case: Case) -> None:
    """Two tensors exchanged: their places, their names, or their shapes."""
    name = rng.choice(_weights(files))
    header, data = split(files[name])
    names = [key for key in header if key != "__metadata__"]
    if len(names) < 2:
        _bytes(rng, files, case)
        return
    one, other = rng.sample(names, 2)
    kind = rng.choice(("data_offsets", "shape", "dtype", "all"))
    case.told.append(f"{kind} of {one} and {other} exchanged")
    if kind == "all":
        header[one], header[other] = header[other], header[one]
    else:
        header[one][kind], header[other][kind] = header[other][kind], header[one][kind]
    files[name] = joined(json.dumps(header), data)


def _files(rng: Random, files: dict[str, bytes], case: Case) -> None:
    """A file left out, emptied, put under another name, or in place of another."""
    name, other = rng.choice(list(files)), rng.choice(list(files))
    kind = rng.choice(("left out", "empty", "renamed", "in place of", "a second index", "no object"))
    case.told.append(f"{name} {kind} {other}")
    if kind == "left out":
        del files[name]
    elif kind == "empty":
        files[name] = b""
    elif kind == "renamed":
        files[rng.choice(("model.safetensors", "x.safetensors", "config.json", "hf_quant_config.json"))] = files.pop(
            name
        )
    elif kind == "in place of":
        files[name] = files[other]
    elif kind == "a second index":
        files["model.safetensors.index.json"] = b'{"weight_map": {}}'
    else:
        files[rng.choice(("config.json", "hf_quant_config.json"))] = rng.choice((b"[]", b"null", b"1", b'"x"', b"{}"))


def _weights(files: dict[str, bytes]) -> list[str]:
    return [name for name in files if name.endswith(".safetensors")]


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what follows it."""
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def joined(header: str, data: bytes) -> bytes:
    """The inverse, with a header of any size."""
    text = header.encode(errors="surrogatepass")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


# -- readers -----------------------------------------------------------------------------------------------------------


def _imported(its: Directories, case: Case, name: str) -> str:
    """Whatever makes values others is refused, or found by verify, as far as digests can tell."""
    report = verify_directory(its.path)
    if report.ok and any(finding.severity == "warning" for finding in report.findings):
        case.forged = True
    return case.read("import_hf", its._all, its.values[name]) if report.ok else _told(its, case, name)


def _told(its: Directories, case: Case, name: str) -> str:
    """Verify found something; an import reads other values, or says why not."""
    case.forged = True
    case.read("import_hf", its._all, its.values[name])
    return "told"


def _into_model(its: Directories, case: Case, name: str) -> str:
    """An import into a model, which is as it was after an error."""
    state = its.states[name]
    case.forged = True  # files alone say nothing of digests to an import
    recipes = {key.removesuffix(".weight"): value.recipe for key, value in state.items() if hasattr(value, "recipe")}
    if name == "mxfp4":
        return _imported(its, case, name)
    model = meta_model(state, recipes, device="cpu")
    before = facts(model.state_dict())

    def load() -> Any:
        try:
            return facts(import_hf(its.path, model, progress=False))
        except BaseException as error:
            if facts(model.state_dict()) != before and TOUCHED not in str(error):
                raise case.found("import_hf", f"{error!r:.1500} and the model has changed without a word") from error
            raise

    return case.read("import_hf into a model", load, its.values[name])


def _verified(its: Directories, case: Case, name: str) -> str:
    """A report never raises."""
    report = verify_directory(its.path)
    json.dumps([str(finding) for finding in report.findings])
    return "told" if not report.ok else "equal"


def _digested(its: Directories, case: Case, name: str) -> str:
    case.forged = True
    return case.read("digests", lambda: source_digests(StoredDirectory(its.path)), None)


def _inspected(its: Directories, case: Case, name: str) -> str:
    case.forged = True

    def inspected() -> Any:
        found = inspect_checkpoint(StoredDirectory(its.path))
        return found.render() and json.dumps(found.to_json())

    return case.read("inspect", inspected, None)


def _as_files(its: Directories, case: Case, name: str) -> str:
    """What deltas see: tensors as they are, and what is said of the quantization."""
    case.forged = True

    def read() -> Any:
        opened = StoredFiles(its.path)
        return {key: opened.parts(key) for key in opened.entries}, [opened.read_blob(blob) for blob in opened.blobs]

    return case.read("StoredFiles", read, None)


def _described(its: Directories, case: Case, name: str) -> str:
    """As the config= of an export."""
    case.forged = True
    return case.read("config=", lambda: model_config(its.path, {}), None)


READERS: dict[str, Callable[[Directories, Case, str], str]] = {
    "imported": _imported,
    "into a model": _into_model,
    "verified": _verified,
    "digested": _digested,
    "inspected": _inspected,
    "as files": _as_files,
    "described": _described,
}
