"""export_gguf: quantized weights as one GGUF file, the stored bytes as they are.

    like      rank 0 reads an existing file of the same model, all get what it tells
    plan      every rank opens the source and plans, as for export_hf; then the tensors of the file
    write     shards are gathered to rank 0, a layer at a time, which writes them
    publish   the file gets its name

Until it is published, the file has a hidden name beside its own, and an error removes it. An error on one rank is
raised on all.
"""

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dcp_adapters.gguf.library import import_gguf
from dcp_adapters.gguf.like import OF_CONFIG, OF_FILE, Like, open_like, read_like
from dcp_adapters.gguf.plan import GGUF, GGUFTensor, make_tensors, tensors_of
from dcp_adapters.hf.exporting.config import ModelConfig
from dcp_adapters.hf.exporting.groups import groups_of
from dcp_adapters.hf.exporting.making import Job, in_groups, made_tensors
from dcp_adapters.hf.exporting.outputs import Output
from dcp_adapters.hf.exporting.prepare import Asked, prepared
from dcp_adapters.hf.models.adapters import check_adapters
from dcp_adapters.plain.durable import give_file_name, hidden_name, sync
from dcp_adapters.plain.logged_work import log_work
from dcp_adapters.plain.progress_bar import Advance, progress_bar
from dcp_adapters.records.source import Keep, Source
from fsdp_hooks.ranks.across_ranks import Ranks, chosen_ranks, global_ranks, is_first, on_all, on_first
from fsdp_hooks.ranks.waiting import waited_for

LOG = logging.getLogger(__name__)
FILE_TYPES = {"MXFP4": "MOSTLY_MXFP4_MOE", "NVFP4": "MOSTLY_NVFP4"}


def export_gguf(  # noqa: PLR0913 - options of one operation
    state_dict_or_checkpoint: Any,
    out_file: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str],
    rest: Any = None,
    prefix: str | None = None,
    verify_checksums: bool = True,
    progress: bool = True,
    adapters: str = "raise",
    group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Path:
    """Write MXFP4 and NVFP4 weights as a GGUF file, which llama.cpp runs.

    All ranks call it alike; rank 0 writes. Codes and block scales are the very bytes of the source, in ggml's order;
    NVFP4's global scale and a calibrated `input_scale` are tensors beside the weight. Dense tensors keep their dtype,
    vectors become fp32.

    Args:
        state_dict_or_checkpoint: as for export_hf, with the names that transformers gives the tensors.
        out_file: a name that is free; the file appears when it is complete.
        like: a GGUF file of the same model, in whatever type its weights are. All metadata is taken from it: sizes,
            tokenizer, chat template. Every tensor that it has must be in the source or in `rest`.
        rest: a source of the tensors that the first one lacks, as for export_hf.
        prefix: as for export_hf.
        verify_checksums: compare what is read of checkpoints with their checksums, if they have some.
        progress: a bar on rank 0, if it has a terminal.
        adapters: as for export_hf.
        group: as for export_hf.
        no_dist: as for export_hf.

    Returns:
        The path of the file.

    Raises:
        FileExistsError: `out_file` exists.
        FileNotFoundError: the source, `like` or the directory of `out_file` does not exist.
        ValueError: a format or shape that the file cannot hold, an architecture or a name that is not known, tensors
            that `like` has and the source does not; `like` is no GGUF file; and what export_hf raises it for.
        TypeError: a source of another kind.
        ImportError: the package gguf is not installed.

    Example:
        ```python
        >>> export_gguf("step-1000", "model.gguf", like="model-bf16.gguf", prefix="model")
        ```
    """
    ranks = chosen_ranks("export_gguf", group, no_dist=no_dist)
    check_adapters("export_gguf", adapters)
    readers: list[Any] = []
    with waited_for(ranks, "export_gguf"):
        told = on_first(ranks, lambda: _read(Path(out_file), like, readers))
    asked = Asked(
        caller="export_gguf",
        given=state_dict_or_checkpoint,
        layout=GGUF,
        # There is no config.json; whether the head is tied to the embedding shows in the tensors of `like`.
        described=ModelConfig({"tie_word_embeddings": told.tied}),
        rest=rest,
        prefix=prefix,
        max_shard_size=sys.maxsize,
        check=verify_checksums,
        adapters=adapters,
        group=ranks,
    )
    source, plan = prepared(asked)
    # `max_shard_size` was without limit: everything is in one file. Its tensors are in the order of layers, which is
    # the same for every source.
    (file,) = plan.files
    groups = in_groups(file.outputs, groups_of(None))
    made = tensors_of([output for group in groups for output in group], told)
    jobs = [Job(group, Keep(global_ranks(ranks)[0], torch.device("cpu"))) for group in groups]
    final = Path(out_file)
    begun = hidden_name(final)
    first = is_first(ranks)
    # Filled inside of a step of rank 0, whose result would be sent to all ranks; a writer cannot be.
    writers: list[Any] = []
    told_of = log_work(LOG, "export_gguf to %s", final, nbytes=plan.nbytes)
    with told_of, _remove_on_error(begun, writers) if first else nullcontext():
        on_first(ranks, lambda: writers.append(_begin_file(begun, readers[0], told, made)))
        with progress_bar("exporting", plan.nbytes, enabled=progress and first) as advance:
            _write_tensors(source, jobs, made, partial(_write_output, writers, told), advance, ranks)
        on_first(ranks, lambda: _publish(writers[0], begun, final))
    return final


def _read(final: Path, like: str | os.PathLike[str], readers: list[Any]) -> Like:
    """Return what the file `like` tells, and add its reader to `readers`."""
    # First, before the file is read: an export must not find out at its end that the name is taken.
    _refuse_taken(final)
    if not final.absolute().parent.is_dir():
        raise FileNotFoundError(f"{final.absolute().parent}: no such directory; create it first")
    readers.append(open_like(like))
    return read_like(like, readers[0])


def _refuse_taken(final: Path) -> None:
    if final.exists() or final.is_symlink():
        raise FileExistsError(f"{final} exists already; choose another name, nothing is overwritten")


@contextmanager
def _remove_on_error(begun: Path, writers: Sequence[Any]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for writer in writers:
            with suppress(OSError):
                writer.close()
        with suppress(OSError):
            begun.unlink(missing_ok=True)
        raise


def _begin_file(begun: Path, reader: Any, like: Like, made: Sequence[tuple[Output, tuple[GGUFTensor, ...]]]) -> Any:
    """Begin a file: all metadata, and the tensors that are made from the config. Return its `gguf.GGUFWriter`."""
    gguf = import_gguf()
    writer = gguf.GGUFWriter(begun, like.architecture)
    for field in reader.fields.values():
        if not field.name.startswith(OF_FILE):
            kind = field.types[0]
            inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    tensors = [tensor for _, found in made for tensor in found]
    # A file has one type by name; a mix of both has that of most of its tensors.
    most = Counter(tensor.kind for tensor in tensors if tensor.kind in FILE_TYPES).most_common(1)[0][0]
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[most]])
    kept = [tensor for tensor in reader.tensors if tensor.name in OF_CONFIG]
    # Infos, and later data, in one order: a file's data has no names.
    for old in kept:
        writer.add_tensor_info(old.name, like.shapes[old.name], None, old.n_bytes, old.tensor_type)
    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.kind]
        writer.add_tensor_info(tensor.name, tensor.shape, None, tensor.nbytes, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for old in kept:
        writer.write_tensor_data(old.data)
    return writer


def _write_tensors(  # noqa: PLR0913, PLR0917
    source: Source,
    jobs: Sequence[Job],
    made: Sequence[tuple[Output, tuple[GGUFTensor, ...]]],
    write: Callable[[Output, tuple[GGUFTensor, ...], Mapping[str, Tensor]], None],
    advance: Advance,
    group: Ranks,
) -> None:
    """Gather all tensors to rank 0, which writes them in order; an error there is raised when all is gathered."""
    # An output is complete with the last of its parts.
    ends = {output.written[-1].name: (output, found) for output, found in made}
    failed: list[Exception] = []
    parts: dict[str, Tensor] = {}
    for written, tensor in made_tensors(source, jobs, failed):
        if tensor is not None:
            parts[written.part] = tensor
        end = ends.get(written.name)
        if end is not None:
            if parts and not failed:
                try:
                    write(*end, parts)
                # Not raised here: the other ranks would wait in the next gather. All raise it at the end.
                except Exception as error:  # noqa: BLE001
                    failed.append(error)
            parts = {}
        advance(written.nbytes)
    on_all(group, partial(_raise_first, failed))


def _write_output(
    writers: Sequence[Any], like: Like, output: Output, made: Sequence[GGUFTensor], parts: Mapping[str, Tensor]
) -> None:
    """Write the tensors of an output; rank 0 alone has a writer, and calls it."""
    for tensor in make_tensors(output, made, parts, like):
        writers[0].write_tensor_data(_as_array(tensor))


def _as_array(tensor: Tensor) -> Any:
    """Return a tensor's memory as an array of numpy."""
    # numpy has no bf16, and the writer takes the bytes of whatever it gets.
    tensor = tensor.contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _raise_first(failed: Sequence[Exception]) -> None:
    if failed:
        raise failed[0]


def _publish(writer: Any, begun: Path, final: Path) -> None:
    """Give the file its name; durable when it returns."""
    writer.close()
    sync(begun)
    give_file_name(begun, final)
