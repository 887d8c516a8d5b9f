"""The inner optimizer's state of a weight, in fp32 for its step, and as it is kept between steps.

    kept                                        for a step
    exp_avg        MXFP8 or bf16                exp_avg     fp32, of the shard, as [rows, K]
    exp_avg_sq     bf16                         exp_avg_sq
    exp_avg_sq_root    MXFP8 of the root        exp_avg_sq
    step, ..       as it is                     the same tensor

A root has a name of its own, so that no reader takes it for the square. What an optimizer subtracts from a mean of
squares (CENTERED) needs that mean as it is: rounded, it may become the smaller of both, and have no root.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fsdp_hooks.torch_private import dtensor_like, local_of
from qtensor.optim.compressed.masters import as_rows, as_sharded
from qtensor.optim.compressed.places import Places
from qtensor.optim.compressed.storage import Storage
from qtensor.spec.registry import specs_of
from qtensor.states import lattice
from qtensor.states.draws import Positions
from qtensor.states.kinds import CENTERED, OF_MASTERS, ROOT, SQUARED
from qtensor.states.moments import RECIPE, decode_moment, encode_moment
from qtensor.states.remainders import draws_of
from qtensor.tensor.quantized_tensor import QuantizedTensor

BF16_BITS = 7
Home = Callable[[Tensor, Tensor], Tensor]  # a tensor of a shard and its parameter -> the tensor where states are kept


def is_moment(name: str, value: object, param: Tensor) -> bool:
    """Return whether an entry of a state is a moment of a parameter."""
    return _plain(name) in SQUARED and isinstance(value, Tensor) and value.shape == param.shape


def expand(state: Mapping[str, Any], param: Tensor) -> dict[str, Any]:
    """Return a state for a step; moments are new, fp32 and in the shape of the shard, others the kept tensors."""
    found = {}
    for name, value in state.items():
        own = local_of(value) if isinstance(value, Tensor) else value
        if not is_moment(name, value, param):
            found[name] = own
        elif not own.numel():
            found[_plain(name)] = torch.empty(own.shape, dtype=torch.float32, device=own.device)
        elif isinstance(own, QuantizedTensor) and own.recipe == RECIPE:
            rows = {spec.name: as_rows(getattr(own, spec.name)) for spec in specs_of(own.recipe)}
            found[_plain(name)] = decode_moment(rows, root=name.endswith(ROOT)).view(own.shape)
        else:
            # roots in another recipe, or dense: a checkpoint that was converted on disk
            values = own.dequantize(torch.float32) if isinstance(own, QuantizedTensor) else own.to(torch.float32)
            found[_plain(name)] = values * values if name.endswith(ROOT) else values
    return found


def compress(
    state: Mapping[str, Any], param: Tensor, how: str, at: Positions, kept: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return a state as it is kept.

    Args:
        state: what `expand` returned, stepped.
        param: whose state it is.
        how: what moments are kept in.
        at: where the rows of the shard are.
        kept: the state as it was kept, whose tensors are written; None: all are new.
    """
    kept = kept or {}
    found: dict[str, Any] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.shape != local_of(param).shape or not value.ndim:
            found[name] = value
        elif how == "fp32" or name not in SQUARED or CENTERED.get(name) in state:
            found[name] = _written(kept.get(name), value, param)
        elif how == "bfloat16":
            rounded = as_rows(value)
            if value.numel():
                bits = draws_of(rounded, *at.of(slice(None)), drawn=at.drawn, salt=salt_of(name))
                rounded = lattice.by_mantissa(rounded, BF16_BITS, bits)
            rounded = rounded.to(torch.bfloat16)
            found[name] = _written(kept.get(name), rounded.view(value.shape), param)
        else:
            own = name + ROOT if SQUARED[name] else name
            found[own] = _written(kept.get(own), _encoded(value, salted(at, name), root=SQUARED[name]), param)
    return found


def converted_states(
    saved: Mapping[Tensor, Mapping[str, Any]], storage: Storage, home: Home | None = None
) -> tuple[dict[Tensor, dict[str, Any]], dict[Tensor, dict[str, Any]]]:
    """Return the moments of saved states, kept as a storage says, and their other entries; masters are left out.

    With `home` all entries but numbers are brought there, one parameter after the other, and are among the moments.

    Args:
        saved: parameter -> its state, with moments in whatever they were kept.
        storage: what they are to be kept in.
        home: where that is; None: on the parameters' devices.
    """
    moments: dict[Tensor, dict[str, Any]] = {}
    others: dict[Tensor, dict[str, Any]] = {}
    for param, values in saved.items():
        own = {name: value for name, value in values.items() if name not in OF_MASTERS}
        moments[param] = converted(own, param, storage.moment_of(param), home=home)
        others[param] = {name: one for name, one in own.items() if not is_moment(name, one, param)}
        if home is not None:
            apart = {name: one for name, one in others[param].items() if isinstance(one, Tensor) and one.ndim}
            # as the inner optimizer would load them
            moments[param] |= {
                name: home(_placed(name, one, param).to(torch.float32), param) for name, one in apart.items()
            }
            others[param] = {name: one for name, one in others[param].items() if name not in apart}
    return moments, others


def converted(
    own: Mapping[str, Any], param: Tensor, how: str, *, keep: bool = False, home: Home | None = None
) -> dict[str, Any]:
    """Return the moments of a state in the form asked for: copies of what has it (with `keep` itself), others rounded.

    They are rounded to the nearest, and placed as the parameter is; with `home`, they are there, else on its device.
    """
    found: dict[str, Any] = {}
    for name, given in own.items():
        if not is_moment(name, given, param):
            continue
        here = "fp32" if CENTERED.get(_plain(name)) in own else how
        value = _placed(name, given, param)
        if keep and is_kept_so(name, value, here):
            found[name] = value
        elif is_kept_so(name, value, here):
            found[name] = home(value, param) if home is not None else on_device(value, param, copy=True)
        else:
            # its rows are counted there
            state = expand({name: on_device(value, param)}, param)
            made = compress(state, param, here, Places().nearest(param))
            found |= made if home is None else {name: home(one, param) for name, one in made.items()}
    return found


def on_device(value: Tensor, param: Tensor, *, copy: bool = False) -> Tensor:
    """Return a tensor of a parameter's shard on its device, itself if it is there and no copy is asked for.

    The CPU goes on while it is copied from pinned memory.
    """
    local, device = local_of(value), local_of(param).device
    if local.device == device and not copy:
        return value
    moved: Tensor
    if isinstance(local, QuantizedTensor):
        parts = {name: part.to(device, non_blocking=True, copy=True) for name, part in local.parts().items()}
        moved = QuantizedTensor.from_parts(parts, local.recipe, local.dtype)
    else:
        moved = local.detach().to(device, non_blocking=True, copy=True)
    return dtensor_like(moved, value) if isinstance(value, DTensor) else moved


def _placed(name: str, value: Tensor, param: Tensor) -> Tensor:
    """Return a moment sharded as the parameter is, on whatever device."""
    if type(local_of(value)) not in (Tensor, torch.nn.Parameter) and not isinstance(local_of(value), QuantizedTensor):
        raise ValueError(
            f"MasterWeightOptimizer.load_state_dict: {name!r} of a parameter of shape {tuple(param.shape)} is a "
            f"{type(local_of(value)).__name__}, whose values are not known here; load it as a plain tensor"
        )
    if isinstance(value, DTensor) != isinstance(param, DTensor):
        kinds = ["sharded" if isinstance(each, DTensor) else "no DTensor" for each in (value, param)]
        raise ValueError(
            f"MasterWeightOptimizer.load_state_dict: {name!r} of a parameter of shape {tuple(param.shape)} is "
            f"{kinds[0]}, the parameter is {kinds[1]}; torch.distributed.checkpoint.state_dict."
            "set_optimizer_state_dict distributes it"
        )
    if isinstance(value, DTensor) and isinstance(param, DTensor):
        if (value.device_mesh, value.placements) == (param.device_mesh, param.placements):
            return value
        here = on_device(value, param)
        assert isinstance(here, DTensor)
        return here.redistribute(param.device_mesh, param.placements)
    return value


def is_kept_so(name: str, value: Tensor, how: str) -> bool:
    """Return whether a moment is kept in the form that is asked for."""
    own = local_of(value)
    if how == "float8":
        return (
            isinstance(own, QuantizedTensor) and own.recipe == RECIPE and name.endswith(ROOT) == SQUARED[_plain(name)]
        )
    # a dense root is of a checkpoint that was converted on disk
    if name.endswith(ROOT) or isinstance(own, QuantizedTensor):
        return False
    return own.dtype == (torch.bfloat16 if how == "bfloat16" else torch.float32)


def _plain(name: str) -> str:
    return name.removesuffix(ROOT)


def _encoded(value: Tensor, at: Positions, *, root: bool) -> QuantizedTensor:
    if value.numel():
        rows = encode_moment(as_rows(value), at, root=root)
    else:
        rows = {spec.name: value.new_empty(spec.shape(value.shape), dtype=spec.dtype) for spec in specs_of(RECIPE)}
    parts = {spec.name: rows[spec.name].view(spec.shape(value.shape)) for spec in specs_of(RECIPE)}
    return QuantizedTensor.from_parts(parts, RECIPE, torch.float32)


def _written(kept: Any, value: Tensor, param: Tensor) -> Tensor:
    """Return the kept tensor with this value of the shard in it, or a new one that is sharded as the parameter."""
    own = local_of(kept) if isinstance(kept, Tensor) else None
    if own is value:
        return kept  # type: ignore[no-any-return]
    if own is not None and own.dtype == value.dtype and type(own) is type(value) and own.shape == value.shape:
        if isinstance(own, QuantizedTensor) and isinstance(value, QuantizedTensor):
            for name, part in value.parts().items():
                own.parts()[name].copy_(part)
        else:
            own.copy_(value)
        return kept  # type: ignore[no-any-return]
    return as_sharded(value, param)


def salted(at: Positions, name: str) -> Positions:
    """Return the positions that the draws of a moment in 8 bits are counted by."""
    return Positions(at.keys ^ salt_of(name), at.first) if at.drawn else at


def salt_of(name: str) -> int:
    """Return what tells the draws of moments from each other and from a master's."""
    return 0x5851F42D + 0x14057B7E * list(SQUARED).index(name) & 0x7FFFFFFF
