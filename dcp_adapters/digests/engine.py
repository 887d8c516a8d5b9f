"""The tensors inside an engine under the names of the files it loaded: joined linears cut apart, turned weights back.

    l.self_attn.qkv_proj.weight      [q + k + v, K]          ->   l.self_attn.q_proj.weight [q, K], k_proj, v_proj
    l.mlp.gate_up_proj.weight_scale  [gate + up, K // 32]    ->   l.mlp.gate_proj.weight_scale, up_proj
    l.self_attn.qkv_proj.input_scale []                      ->   the same for each of the three linears
    l.self_attn.qkv_proj.weight_scale [3]                    ->   one for each

A function of names and shapes: which linears are joined is in hf/files/engine_names.py, how many rows each has is
given. What an engine did beyond that (another order of bytes for its kernels, say) is not undone here.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from dcp_adapters.hf.files.engine_names import JOINED

BLOCKS = (1, 128)  # rows of a weight behind one row of its scales


def unfuse(
    tensors: Mapping[str, Tensor], rows: Mapping[str, int], *, turned: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return views of an engine's tensors as an export has them; `digest(.., config=..)` takes them.

    Args:
        tensors: by the engine's names.
        rows: module -> output features N of each linear of the model, before it was joined.
        turned: names of tensors that the engine holds transposed, [K, N].

    Raises:
        ValueError: a joined tensor is cut neither by rows nor by linears; `rows` lacks a linear.
    """
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        straight = tensor.transpose(-1, -2) if name in turned else tensor
        module, _, own = name.rpartition(".")
        parent, dot, joined = module.rpartition(".")
        members = [f"{parent}{dot}{member}" for member in JOINED.get(joined, ())]
        # The model itself may have a linear of that name, which the engine has joined with nothing.
        if not members or module in rows:
            found[name] = straight
            continue
        lacking = [member for member in members if member not in rows]
        if lacking:
            raise ValueError(f"{name}: it joins linears of which rows= lacks {', '.join(lacking)}; give their N")
        pieces = _cut(straight, [rows[member] for member in members])
        if pieces is None:
            raise ValueError(
                f"{name}: {tuple(tensor.shape)} is cut neither by the rows {[rows[member] for member in members]} of "
                f"{', '.join(members)} nor by their number; name it in turned= if the engine holds it transposed"
            )
        found |= {f"{member}.{own}": piece for member, piece in zip(members, pieces, strict=True)}
    return found


def _cut(tensor: Tensor, rows: Sequence[int]) -> list[Tensor] | None:
    """Return the piece of each linear; None if the shape does not tell."""
    # One scale for the joined linear holds for each that was joined.
    if tensor.numel() == 1:
        return [tensor] * len(rows)
    for block in BLOCKS:
        sizes = [-(-own // block) for own in rows]
        if tensor.shape[0] == sum(sizes):
            return list(tensor.split(sizes))
    if tuple(tensor.shape) == (len(rows),):
        return list(tensor.unbind())
    return None
