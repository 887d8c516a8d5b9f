"""export_hf: quantized weights into a directory that inference engines load, the stored bytes as they are.

    config    rank 0 reads the model's description, all get it
    plan      every rank opens the source and plans; the plans must be one
    write     each file is written whole by one rank: shards are gathered to the rank that owns the file, a layer at a
              time; then all such ranks write at the same time. No rank ever holds more than a file and two layers
    publish   rank 0 checks that all files are there, then the directory gets its name

Until then everything lies in a hidden directory beside it, which an error removes. An error on one rank is raised on
all of them.
"""

import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcp_adapters.hf.exporting.config import ModelConfig, model_config, shard_size
from dcp_adapters.hf.exporting.groups import groups_of
from dcp_adapters.hf.exporting.making import own_groups
from dcp_adapters.hf.exporting.plan import ExportPlan
from dcp_adapters.hf.exporting.prepare import Asked, prepared, requantizes
from dcp_adapters.hf.exporting.writing import begun_directory, publish_directory, write_files
from dcp_adapters.hf.layouts.registry import layout_named
from dcp_adapters.hf.models.adapters import check_adapters
from dcp_adapters.plain.durable import refuse_taken, remove_on_error
from dcp_adapters.plain.logged_work import log_work
from dcp_adapters.plain.progress_bar import progress_bar
from dcp_adapters.records.recipe_names import dtype_name
from dcp_adapters.records.source import Source
from fsdp_hooks.ranks.across_ranks import chosen_ranks, is_first, on_first
from fsdp_hooks.ranks.waiting import waited_for
from qtensor.spec.registry import APPEARANCE_DTYPES

LOG = logging.getLogger(__name__)


def export_hf(  # noqa: PLR0913 - options of one operation
    state_dict_or_checkpoint: Any,
    out_dir: str | os.PathLike[str],
    *,
    layout: str = "compressed-tensors",
    config: Any = None,
    rest: Any = None,
    prefix: str | None = None,
    fused_scales: str = "raise",
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    verify_checksums: bool = True,
    progress: bool = True,
    adapters: str = "raise",
    group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> Path:
    """Write quantized weights as safetensors with the JSON that inference engines read.

    All ranks call it alike (or those of `group`, or one by itself with `no_dist`: a rank that waits 10 s for others
    logs which); `out_dir` must be on storage that they share. The payload and the block scales are the very bytes of
    the source. Names are those of the plain model: what torch.compile, activation checkpointing, FSDP1, DDP and peft
    put into them is left out. Scales `<module>.input_scale` and `<attention>.k_scale`, `.v_scale` (fp32 []; the latter
    also [heads]) beside the weights are exported with them; a linear without an input_scale has dynamic inputs (NVFP4:
    unquantized ones).

    Args:
        state_dict_or_checkpoint: a module or state dict (plain, FSDP2, TP, HSDP; nested or flat), what
            `layerwise.calibrate` returns, or the path of a DCP checkpoint, for which neither a model nor ranks are
            needed. Live weights with storage="high_precision" are written as the quantized ones that forwards use.
        out_dir: a directory that does not exist, or is empty; it appears when it is complete.
        layout: "compressed-tensors", "modelopt", "fp8" (Float8 in blocks of 128 x 128 alone, as DeepSeek's files), or
            "mxfp4", in which gpt-oss has its experts.
        config: the model's directory (its tokenizer and the like are copied), its config.json, a dict or a config
            object; by default that of a transformers model. Without any, config.json holds the quantization alone.
        rest: where to take tensors that the first does not have, such as the embeddings beside a calibration's result:
            a module, a state dict, a checkpoint, or a directory of dense safetensors.
        prefix: what the names of the weights begin with in a nested state dict; it is cut off. By default the keys
            under which everything quantized is.
        fused_scales: "raise", linears that engines fuse (q, k, v; gate, up) must share their NVFP4 global scale;
            "requantize", those with a smaller one are rounded again under the largest.
        dtype: of the parameters that are not quantized, and in config.json; None: as they are. fp32 shards whose
            forwards compute in bf16 are exported with torch.bfloat16. Buffers, and what transformers keeps in fp32,
            stay as they are. What is a buffer a module says; for anything else, `config` if transformers knows its
            architecture; else what is fp32 beside others in fewer bits stays, and a warning tells of it.
        max_shard_size: bytes of a file, as a number or as "5GB"; a weight with its scales is never split.
        verify_checksums: compare what is read of checkpoints with their checksums, if they have some.
        progress: a bar on rank 0, if it has a terminal.
        adapters: of peft, that are not merged: "raise", they are refused, since they would be lost; "base", the model
            below them is exported.
        group: the ranks that take part, which must hold all shards; None: all.
        no_dist: this process alone takes part, with whole weights or a checkpoint, as in `dcp.save`.

    Returns:
        The path of the directory.

    Raises:
        FileExistsError: `out_dir` exists.
        FileNotFoundError: the source, the config or the directory above `out_dir` does not exist.
        ValueError: what the layout cannot hold, see the message; adapters that are not merged; names that may be those
            of a wrapped model; shards on ranks that do not take part; shards that did not agree on a scale which the
            file has once; ranks with different tensors, values or arguments; tensors that the config's directory has
            and the source does not; NaN in a weight; a dtype that is none of bf16, fp16 and fp32.
        TypeError: a source or config of another kind.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> quantize_(model, MXFP8BlockScaling())
        >>> out = export_hf(model, "exported", config={"model_type": "mine"}, progress=False)
        >>> sorted(file.name for file in out.iterdir())
        ['config.json', 'model.safetensors']
        ```
    """
    ranks = chosen_ranks("export_hf", group, no_dist=no_dist)
    check_adapters("export_hf", adapters)
    requantize = requantizes("export_hf", fused_scales)
    chosen, limit = layout_named(layout), shard_size(max_shard_size)
    if dtype is not None and dtype not in APPEARANCE_DTYPES:
        raise ValueError(f"export_hf: dtype={dtype} is not one of torch.bfloat16, torch.float16, torch.float32")
    with waited_for(ranks, "export_hf"):
        # Rank 0 alone reads it: a config is a few files, and thousands of ranks would ask the file system for them at
        # once.
        described = on_first(ranks, lambda: _description(out_dir, config, (state_dict_or_checkpoint, prefix), dtype))
    asked = Asked(
        caller="export_hf",
        given=state_dict_or_checkpoint,
        layout=chosen,
        described=described,
        rest=rest,
        prefix=prefix,
        requantize=requantize,
        dtype=dtype,
        max_shard_size=limit,
        check=verify_checksums,
        adapters=adapters,
        group=ranks,
    )
    source, plan = prepared(asked)
    return _publish_files(Path(out_dir), source, asked, plan, show=progress)


def _publish_files(final: Path, source: Source, asked: Asked, plan: ExportPlan, *, show: bool) -> Path:
    """Write the files into a hidden directory, which then gets its name, and return that."""
    group = asked.group
    begun = Path(on_first(group, lambda: str(begun_directory(final, asked.described, plan))))
    # A plan has the names of the files, and FSDP modules know those in memory.
    group_of = own_groups(source, groups_of(asked.given, asked.prefix))
    first = is_first(group)
    told = log_work(LOG, "export_hf to %s", final, nbytes=plan.nbytes)
    # Rank 0 made the hidden directory, so rank 0 alone removes it.
    with told, remove_on_error(begun) if first else nullcontext():
        with progress_bar("exporting", plan.nbytes, enabled=show and first) as advance:
            write_files(source, plan, begun, group_of, advance, group)
        on_first(group, lambda: publish_directory(begun, final, plan))
    return final


def _description(
    out_dir: str | os.PathLike[str], config: Any, source: tuple[Any, str | None], dtype: torch.dtype | None
) -> ModelConfig:
    """Return the model's description; an `out_dir` that is taken is refused first."""
    refuse_taken(Path(out_dir))
    found = model_config(config, *source)
    return found if dtype is None else found.of_dtype(dtype_name(dtype))
