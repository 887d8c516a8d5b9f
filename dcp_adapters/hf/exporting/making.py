"""Tensors of the source -> the tensors that engines read, group by group: what files and streams have in common.

    gather the first group
    for each group:   begin to gather the next one -> wait for this one -> make its tensors, one after the other

So a gather runs while the tensors of the group before it are written or sent. An error on a rank that keeps tensors
does not stop the gathers, in which the other ranks wait for it: it is put on a list, and raised when all is gathered.
"""

from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcp_adapters.hf.exporting.outputs import Output, Written
from dcp_adapters.records.source import Keep, Source, TensorGroup
from dcp_adapters.stored.part_values import holds_nan
from fsdp_hooks.lazy_bits import resolve
from qtensor.spec.recipes import Recipe
from qtensor.spec.registry import adopt
from qtensor.tensor.quantized_tensor import QuantizedTensor, quantize

GroupOf = Callable[[str], Hashable]


@dataclass(frozen=True)
class Job:
    """Outputs whose sources are gathered together, and who keeps them."""

    outputs: tuple[Output, ...]
    keep: Keep

    @property
    def names(self) -> list[str]:
        """Return the names of the source's tensors."""
        return [name for output in self.outputs for name in (output.source, output.twin) if name is not None]


def own_groups(source: Source, group_of: GroupOf) -> GroupOf:
    """Return `group_of` for a source's names: it is asked by the name that a tensor has where it comes from."""
    return lambda name: group_of(source.own_name(name))


def in_groups(outputs: Iterable[Output], group_of: GroupOf) -> list[tuple[Output, ...]]:
    """Return the outputs of each group, groups in the order in which they first occur."""
    groups: dict[Hashable, list[Output]] = {}
    for output in outputs:
        groups.setdefault(group_of(output.source), []).append(output)
    return [tuple(group) for group in groups.values()]


def made_tensors(
    source: Source, jobs: Sequence[Job], failed: list[Exception]
) -> Generator[tuple[Written, Tensor | None], None, None]:
    """Yield all tensors of the jobs in order: each on the ranks that keep it, None elsewhere, and None after an error.

    A collective, if anything is sharded: all ranks walk through it alike, or leave it alike.

    Args:
        source: of the jobs' outputs.
        jobs: what to make, for whom.
        failed: gets the error, at most one; if there is one already, nothing is made.
    """
    ahead = source.begin(jobs[0].names, jobs[0].keep) if jobs else None
    here = None
    try:
        for number, job in enumerate(jobs):
            here, ahead = ahead, None
            # The next gather begins before this group is waited for, so it runs while this one is written.
            if number + 1 < len(jobs):
                ahead = source.begin(jobs[number + 1].names, jobs[number + 1].keep)
            assert here is not None
            for output in job.outputs:
                yield from _make_output(output, here, failed)
            here.close()
    finally:
        for group in (here, ahead):
            if group is not None:
                group.close()


def _make_output(
    output: Output, group: TensorGroup, failed: list[Exception]
) -> Iterator[tuple[Written, Tensor | None]]:
    # Also after an error: other ranks wait in the gathers of these tensors.
    parts, twin = (_parts(group, name, failed) for name in (output.source, output.twin))
    making: Iterator[Tensor] | None = None
    for written in output.written:
        tensor = None
        if parts is not None and not failed:
            try:
                # A generator, so that one tensor of the output at a time is in memory.
                making = made(output, parts, twin) if making is None else making
                tensor = next(making)
            except Exception as error:  # noqa: BLE001 - raised on all ranks when all is gathered
                failed.append(error)
        yield written, tensor


def _parts(group: TensorGroup, name: str | None, failed: list[Exception]) -> dict[str, Tensor] | None:
    """Return the parts of a tensor of the source on the ranks that keep it, None elsewhere."""
    if name is None:
        return None
    try:
        return group.parts(name)
    except Exception as error:  # noqa: BLE001 - raised on all ranks when all is gathered
        failed.append(error)
        return None


def made(output: Output, parts: Mapping[str, Tensor], twin: Mapping[str, Tensor] | None) -> Iterator[Tensor]:
    """Yield what one tensor of the source becomes, in the order of `output.written`."""
    _check_twin(output, parts, twin)
    if output.recipe is not None:
        parts = _in_recipe(output.recipe, parts, output.scale)
        if holds_nan(output.recipe, parts):
            raise ValueError(
                f"{output.source} holds NaN: what it was quantized from was not finite; an engine would run on it"
            )
    for written in output.written:
        tensor = _make_tensor(written, parts)
        if written.form.inverts and not bool(tensor.isfinite()):
            raise ValueError(
                f"{written.name}: the scale of {output.source} is 0 or next to it, and engines read its reciprocal, "
                "which would be infinite; quantize it again"
            )
        yield tensor


def _check_twin(output: Output, parts: Mapping[str, Tensor], twin: Mapping[str, Tensor] | None) -> None:
    """Refuse to leave out a tied tensor whose values differ."""
    # The file has the tensor once. A training that untied the two would lose one of them without a word.
    if twin is not None and not torch.equal(twin[""], parts[""]):
        raise ValueError(
            f"{output.twin} differs from {output.source}, though the config ties them (tie_word_embeddings); export "
            "with a config that has tie_word_embeddings=False"
        )


def _make_tensor(written: Written, parts: Mapping[str, Tensor]) -> Tensor:
    if written.value is not None:
        device = next(iter(parts.values())).device
        tensor = torch.tensor(written.value, dtype=written.dtype, device=device)
    else:
        tensor, piece = resolve(parts[written.part]), written.piece
        if not written.part:
            tensor = tensor.to(written.dtype)
        if piece is not None and tensor.ndim:
            tensor = piece.of(tensor)
        _check_rows(written, tensor)
    tensor = written.form.write(tensor).contiguous()
    assert (tensor.dtype, tuple(tensor.shape)) == (written.dtype, written.shape), written
    # A view would keep the whole gathered tensor in memory, and safetensors refuses tensors that share one.
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _check_rows(written: Written, tensor: Tensor) -> None:
    """Refuse rows that differ although the file has one row for them."""
    rows, piece = written.form.rows, written.piece
    if rows == 1:
        return
    # Memory has a scale for every row. Rows that were scaled apart cannot share one: their codes would decode
    # otherwise.
    spread = written.form.write(tensor).repeat_interleave(rows, dim=0)[: len(tensor)]
    differs = (spread != tensor).any(dim=-1)
    if bool(differs.any()):
        block = int(differs.float().argmax()) // rows
        why = (
            "they begin inside of a block of the weight of all experts: quantize each linear of an expert by itself, "
            "or convert the weight to scales of rows"
            if piece is not None and piece.rows[0] % rows
            else "shards that cut the block were written apart: call fsdp_hooks.sync_scales on the model first, or "
            "quantize the weight again"
        )
        last = min((block + 1) * rows, len(tensor)) - 1
        raise ValueError(f"{written.name}: rows {block * rows} to {last} are one block with different scales; {why}")


def _in_recipe(recipe: Recipe, parts: Mapping[str, Tensor], scale: float | None) -> Mapping[str, Tensor]:
    """Return the parts under the recipe, and under `scale` if one is given; dense values are quantized here."""
    if scale is None:
        return quantize(parts[""], recipe).parts() if "" in parts else parts
    # Decoded in fp32, so that nothing but the second rounding changes the values.
    dense = parts[""] if "" in parts else QuantizedTensor.from_parts(dict(parts), recipe, torch.float32)
    values = dense.dequantize(torch.float32) if isinstance(dense, QuantizedTensor) else dense.to(torch.float32)
    return adopt(values, recipe, torch.tensor(scale, dtype=torch.float32, device=values.device))
