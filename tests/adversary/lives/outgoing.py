"""Steps in which weights leave a life: exports, streams, deltas, digests. All of them say the same bytes."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from dcp_adapters import (
    HeldVersion,
    QuantizedLoadPlanner,
    QuantizedSavePlanner,
    WeightStream,
    apply_deltas,
    delta_from_bytes,
    delta_to_bytes,
    digest,
    export_hf,
    import_hf,
    patched_copy,
    write_delta,
)
from tests.adversary.attack import Found
from tests.adversary.lives.checkpoints import check_stored, fresh
from tests.adversary.lives.life import Life, different, local, stored
from tests.adversary.lives.twin import raw

CONFIG = {"model_type": "tiny", "hidden_size": 64, "tie_word_embeddings": False}
LAYOUTS = ("compressed-tensors", "modelopt", "fp8")


def export(life: Life, random: Random) -> Any:
    """Written for engines, streamed to them, and imported again, alone and into a model."""
    layout = random.choice(LAYOUTS)
    life.saves += 1
    out = life.path / f"export-{life.saves}"
    try:
        with life.under():
            export_hf(life.net, out, layout=layout, config=CONFIG, progress=False)
    except ValueError as refused:
        return f"refused: {refused}"
    if any(weight.gathered for weight in life.weights.values()):
        return None  # a stream has them as they are gathered, an export as they are stored
    with life.under():
        streamed = collected(
            WeightStream(life.net, layout=layout, config=CONFIG, bucket_bytes=random.choice((1, 4096, 2**20)), to="all")
        )
    same_tensors(streamed, files_of(out), "stream", "export")
    with life.under():
        alone = import_hf(out, progress=False)
    other, _ = fresh(life, random, life.layers)
    with life.under():
        import_hf(out, other, progress=False)
        if digest(other) != digest(out, like=other):
            raise Found("the digests of an export and of the model that imported it differ")
    for name, weight in life.weights.items():
        if not weight.quantized or (layout == "compressed-tensors" and "global_scale" in weight.parts):
            continue  # stored as reciprocals, which can round
        for where, found in (("alone", alone.get(name)), ("model", life.whole(dict(other.named_parameters())[name]))):
            if found is None and where == "alone":
                continue  # of experts each has a name of its own
            held = {part: raw(tensor) for part, tensor in found.parts().items() if part != "amax_history"}
            wanted = {part: value for part, value in weight.stored().items() if part != "amax_history"}
            if held != wanted:
                raise Found(f"{name} imported ({where}) from {layout}: {different(held, wanted)}")
    return None


def collected(stream: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for bucket in stream:
        found |= bucket
    return found


def files_of(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same_tensors(found: Any, wanted: Any, own: str, other: str) -> None:
    if found.keys() != wanted.keys():
        raise Found(f"{own} and {other}: {sorted(found.keys() ^ wanted.keys())}")
    for name, tensor in found.items():
        if (tensor.dtype, tensor.shape) != (wanted[name].dtype, wanted[name].shape) or raw(tensor) != raw(wanted[name]):
            raise Found(f"{name} differs in {own} and {other}")


def stream(life: Life, random: Random) -> Any:
    """A delta of a stream leads a receiver to the next version."""
    layout = random.choice(LAYOUTS)
    try:
        with life.under():
            made = WeightStream(life.net, layout=layout, config=CONFIG, keep_last=True, to="all", bucket_bytes=2048)
            held = {name: tensor.clone() for name, tensor in collected(made).items()}
    except ValueError as refused:
        return f"refused: {refused}"
    change(life, random)
    try:
        with life.under():
            delta = made.since(1)
            again = collected(WeightStream(life.net, layout=layout, config=CONFIG, to="all"))
    except ValueError as refused:
        return f"refused: {refused}"
    with life.under():
        apply_deltas(held, [delta])
    same_tensors(held, again, "a receiver of deltas", "a stream")
    weights = life.weights.values()
    if any(weight.gathered for weight in weights) or (
        layout == "compressed-tensors" and any("global_scale" in (weight.parts or {}) for weight in weights)
    ):
        return None  # a stream has other bytes than the model: those that are gathered, and reciprocals
    with life.under():
        if digest(held, config=made.json["config.json"], like=life.net) != digest(life.net):
            raise Found(f"what a receiver of {layout} holds after a delta, and the model, have different digests")
    return None


def change(life: Life, random: Random) -> None:
    """Some weights are written, or none."""
    for _ in range(random.randint(0, 2)):
        life.change(life, random)
    life.agree()
    life.compare()


def delta(life: Life, random: Random) -> None:
    """Deltas between checkpoints, and between what is live."""
    life.saves += 1
    first, second = life.path / f"from-{life.saves}", life.path / f"to-{life.saves}"
    with life.under():
        dcp.save({"model": life.net.state_dict()}, checkpoint_id=first, planner=QuantizedSavePlanner())
        held = HeldVersion({"model": life.net.state_dict()}, 0)
    other, _ = fresh(life, random, life.layers)
    with life.under():
        dcp.load({"model": other.state_dict()}, checkpoint_id=first, planner=QuantizedLoadPlanner())
    change(life, random)
    with life.under():
        made = held.since({"model": life.net.state_dict()}, 1)
        dcp.save({"model": life.net.state_dict()}, checkpoint_id=second, planner=QuantizedSavePlanner())
        sent = life.everywhere(None if made is None else delta_to_bytes(made))
        apply_deltas({"model": other.state_dict()}, [delta_from_bytes(sent)])
    own, life.net = life.net, other
    try:
        _same_weights(life)
    finally:
        life.net = own
    with life.under():
        value = digest(life.net)
        if digest(other) != value:
            raise Found("the digests of a model and of one that deltas have brought to it differ")
    if life.first:
        file, out = life.path / f"delta-{life.saves}", life.path / f"patched-{life.saves}"
        with life.under():
            write_delta(first, second, file)
            patched_copy(first, [file], out)
            if digest(out, prefix="model.") != value:
                raise Found("the digests of a model and of the checkpoint that deltas lead to differ")
        check_stored(life, out)


def _same_weights(life: Life) -> None:
    for name, param in life.named().items():
        wanted = life.piece(param, life.weights[name])
        found = stored(local(param))
        if found != wanted:
            raise Found(f"{name} after deltas: {different(found, wanted)}")


def digests(life: Life, random: Random) -> None:
    """A model, its state dict and its checkpoint have one digest, which changes with the bytes."""
    life.saves += 1
    path = life.path / f"digest-{life.saves}"
    with life.under():
        dcp.save({"model": life.net.state_dict()}, checkpoint_id=path, planner=QuantizedSavePlanner(digest=True))
        told = {digest(life.net), digest(life.net.state_dict())}
        told.add(digest(path, prefix="model."))
    if len(told) != 1:
        raise Found(f"digests of one state: {told}")
    before = {name: weight.stored() for name, weight in life.weights.items()}
    change(life, random)
    same = all(
        {part: value for part, value in weight.stored().items() if part != "amax_history"}
        == {part: value for part, value in before[name].items() if part != "amax_history"}
        for name, weight in life.weights.items()
    )
    with life.under():
        if (digest(life.net) in told) != same:
            raise Found("a digest that does not follow the bytes")


STEPS = {"export": export, "stream": stream, "delta": delta, "digests": digests}
