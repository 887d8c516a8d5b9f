"""import_hf: a Hugging Face directory into a model, quantized bytes as they are, each rank its slices.

    compare       every rank   the headers of the files with the names, shapes and recipes of the model; one error, the
                               same on all ranks, names all that does not fit, before anything is touched
    materialise   every rank   what the model has on the meta device gets memory; what has some keeps it
    load          every rank   dcp.load with HuggingFaceReader and QuantizedLoadPlanner: equal recipes keep their bytes,
                               dense tensors are quantized while they are read

Without a model the whole directory comes back as a state dict.
"""

import logging
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from dcp_adapters.hf.models.architectures import architecture_of
from dcp_adapters.hf.reading.materialise import Live, materialise
from dcp_adapters.hf.reading.passed_over import UNEXPECTED, PassedOver, unexpected_patterns
from dcp_adapters.hf.reading.reader import HuggingFaceReader
from dcp_adapters.load.compare import LoadTarget, differences, to_convert
from dcp_adapters.load.live_parts import not_writable
from dcp_adapters.load.planner import QuantizedLoadPlanner
from dcp_adapters.plain.words import few_of, in_lines
from dcp_adapters.records.entry import Entry
from dcp_adapters.records.expand import entry_of, leaves_of, plain_leaf
from dcp_adapters.records.rotations import advise_not_rotating, advise_rotating
from fsdp_hooks.ranks.across_ranks import ALONE, Alone, Ranks, check_spanned, chosen_ranks, is_first, on_all, rank_of
from fsdp_hooks.ranks.waiting import waited_for
from fsdp_hooks.wrappers import plain_state_dict
from qtensor.spec.selection import check_lists, matches, unmatched

IGNORED = ".rotary_emb.inv_freq"  # files of old versions have it; models compute it
CONVERT = 'import with on_mismatch="convert"'
ON_META = (
    "missing= names it, no file has it, and on the meta device it has no values to keep; build its module outside of "
    'torch.device("meta"), or give it memory and initialise it before the import'
)
# A name for users, who filter by it; it does not follow the module.
LOG = logging.getLogger("dcp_adapters.import_hf")


def import_hf(  # noqa: PLR0913 - options of one operation
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    *,
    on_mismatch: str = "raise",
    ignore: Iterable[str] = (),
    missing: Iterable[str] = (),
    device: torch.device | str | None = None,
    progress: bool = True,
    group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> dict[str, Tensor]:
    """Load a Hugging Face directory: dense, or quantized in a layout of this library.

    The layouts are those of compressed-tensors (llm-compressor), ModelOpt, "fp8" (DeepSeek-V3, Qwen3-FP8) and gpt-oss.

    With several ranks all of the default process group (or of `group`) call it, each with its shards of the same model,
    before or after `fully_shard` and `parallelize_module`; each reads the slices that its shards need. Payloads and
    scales of quantized weights keep their bytes. A dense tensor becomes, in a quantized parameter, this rank's piece of
    quantizing the full tensor, bit for bit.

    Args:
        path: a directory with model.safetensors, or model.safetensors.index.json and its files; config.json and
            hf_quant_config.json if it is quantized.
        model: its parameters and buffers are written in place; those on the meta device get memory first, unless
            anything does not fit. The names in its state dict are those in the directory, except that a weight
            [E, N, K] `experts.gate_up_proj` or `experts.down_proj` consists of `experts.<e>.gate_proj.weight`, ... A
            model of transformers may have other names in memory than in its files; transformers' own rules say which
            are which, also for a module inside such a model, or one that holds it. None: there is no model.
        on_mismatch: "raise", a parameter whose recipe is not the directory's is an error. "convert", it is requantized,
            or dequantized if it is dense.
        ignore: globs over names in the files: tensors that are passed over, whatever they are. One that matches nothing
            warns. What the model does without (transformers' `_keys_to_ignore_on_load_unexpected`, such as layers that
            predict several tokens) is passed over without being named.
        missing: globs over names of the model: tensors that the files may lack. They stay as they were initialised, so
            they must have memory; those that the files have are loaded. One that matches nothing raises.
        device: where parameters of the meta device get their memory; None: on the device of their mesh, or the CPU.
            Shards that FSDP offloads belong on "cpu".
        progress: a bar over the bytes that rank 0 reads, on a terminal.
        group: the ranks that hold the model; None: all.
        no_dist: this process alone has the model, whole, and no other rank takes part. Without a model it is so anyway.

    Returns:
        The model's state dict, under the names of the plain model if it or modules of it are wrapped (compiled,
        say), and without adapters; without a model the directory's, in whole tensors on `device` (CPU). There,
        quantized weights have the recipe that the directory records, or that of their scheme. Added are the scales of
        inputs, `<module>.input_scale`, and of the KV cache, `<attention>.k_scale` and `.v_scale`: fp32 [], by which a
        payload is multiplied (of the cache [heads], if each head has one). `export_hf` takes it all. What was passed
        over, and what the files lack, is logged on the first rank (logger "dcp_adapters.import_hf").

        A parameter with Float8DelayedScaling takes FP8 with one scale for the tensor: its history begins with the amax
        that gives the scale, so the next step continues with it (or with one next to it, if no amax gives it).

    Raises:
        FileNotFoundError: there are no safetensors, or some are missing.
        ValueError: on all ranks and before anything is written, one error with every name that only one side has,
            every other shape, recipe or scheme; a scheme that the library does not have; files that are damaged; a
            buffer on the meta device that no file has; so is a `missing` tensor there, or a pattern that matches none.
        TypeError: `ignore` or `missing` is a text, not a list.
        torch.distributed.checkpoint.api.CheckpointException: reading fails later; some tensors are loaded then.

    Example:
        ```python
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> quantize_(model, MXFP8BlockScaling())
        >>> export_hf(model, "exported", config={"model_type": "mine"}, progress=False)
        >>> tensors = import_hf("exported", progress=False)  # with a model: import_hf("exported", model)
        >>> tensors["0.weight"].recipe == MXFP8BlockScaling()
        True
        ```
    """
    if on_mismatch not in {"raise", "convert"}:
        raise ValueError(f'import_hf: on_mismatch={on_mismatch!r} is not one of "raise", "convert"')
    check_lists("import_hf", ignore=ignore, missing=missing)
    ignore, missing = tuple(ignore), tuple(missing)
    if model is None:
        if missing:
            raise ValueError("import_hf: missing= names tensors of a model, and there is none; leave it out")
        return _whole_state_dict(path, device or "cpu", ignore, show=progress)
    ranks = chosen_ranks("import_hf", group, no_dist=no_dist)
    live = Live.of(model)
    reader = _reader(path, model, live, ignore, missing, show=progress and is_first(ranks))
    names: list[str] = []
    with waited_for(ranks, "import_hf"):
        # What does not fit on one rank is raised on all of them, before anything is written.
        on_all(ranks, lambda: names.extend(_compare(reader, live, on_mismatch, ranks, missing)))
    loaded = {*names}
    if is_first(ranks):
        _tell(reader, [own[0] for own in live.names if loaded.isdisjoint(own)])
    # After the comparison on all ranks: until here an error leaves the model as it was.
    on_all(ranks, lambda: materialise(model, live, device))
    state = plain_state_dict(model, adapters=False)
    scales = sorted(reader.presented().scales)
    placed = reader.presented().placed
    # A plain model has no place for scales of inputs and of the KV cache; they are returned beside its state dict.
    extras = {name: torch.empty(placed[name].shape, dtype=torch.float32, device="cpu") for name in scales}
    _load({name: state[name] for name in names} | extras, reader, ranks)
    return {**state, **extras}


def check_import(path: str | os.PathLike[str], model: nn.Module, *, on_mismatch: str = "raise") -> None:
    """Raise as `import_hf` would if the directory does not fit the model; nothing is changed, and no weight is read.

    One exception: weights that the model ties and the files have twice are read and compared, on rank 0. It is no
    collective.
    """
    live = Live.of(model)
    _compare(_reader(path, model, live), live, on_mismatch, None)


def _reader(  # noqa: PLR0913 - options of one operation
    path: str | os.PathLike[str],
    model: nn.Module,
    live: Live,
    ignore: Sequence[str] = (),
    missing: Sequence[str] = (),
    *,
    show: bool = False,
) -> HuggingFaceReader:
    wanted = {name: entry_of(name, value) for name, value in live.state.items()}
    passed_over = PassedOver(ignore, unexpected_patterns(model))
    architecture = architecture_of(model)
    return HuggingFaceReader(
        path, wanted=wanted, show=show, passed_over=passed_over, architecture=architecture, may_lack=missing
    )


def _whole_state_dict(
    path: str | os.PathLike[str], device: torch.device | str, ignore: Sequence[str], *, show: bool
) -> dict[str, Tensor]:
    """Read the directory's state dict, in this process alone."""
    reader = HuggingFaceReader(path, show=show, passed_over=PassedOver(ignore))
    # Of the directory's own recipes, so that the load copies bytes and converts nothing.
    state = {
        name: entry.tensor(
            {part: torch.empty(shape, dtype=dtype, device=device) for part, (dtype, shape) in entry.parts().items()}
        )
        for name, entry in reader.presented().entries.items()
    }
    if rank_of(None) == 0:
        _tell(reader, [])
    _load(state, reader, ALONE)
    return state


def _tell(reader: HuggingFaceReader, kept: Sequence[str]) -> None:
    """Log what is passed over, and what the files do not fill."""
    for pattern in reader.passed_over.idle(reader.ignored):
        warnings.warn(f"import_hf: ignore pattern {pattern!r} matches no tensor of {reader.path}", stacklevel=3)
    told = {
        "passed over, as ignore= says": reader.ignored,
        f"passed over, as the model says ({UNEXPECTED})": reader.unexpected,
        "not in the files, and as they were initialised": kept,
    }
    for what, names in told.items():
        if names:
            LOG.warning("%s: %d tensors %s: %s", reader.path, len(names), what, few_of(names))


def _load(state: Mapping[str, Tensor], reader: HuggingFaceReader, ranks: Ranks) -> None:
    alone = isinstance(ranks, Alone) or not dist.is_initialized()
    group = None if isinstance(ranks, Alone) else ranks
    planner = QuantizedLoadPlanner(on_mismatch="convert", allow_partial_load=True)  # what is allowed is known by now
    with warnings.catch_warnings():  # DCP warns that it works in a single process, which is the intent
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(state), storage_reader=reader, planner=planner, process_group=group, no_dist=alone)


def _compare(
    reader: HuggingFaceReader, live: Live, on_mismatch: str, ranks: Ranks, missing: Sequence[str] = ()
) -> list[str]:
    """Compare, and return the names to load: one for each tensor of the model, except those that may be `missing`.

    Raises:
        ValueError: the directory does not fit the model.
    """
    for pattern in unmatched(missing, live.state):
        raise ValueError(f"import_hf: missing pattern {pattern!r} matches no tensor of the model")
    made = reader.presented()
    entries = {name: entry for name, entry in made.entries.items() if name not in made.scales}
    names, problems = _match_names(entries, live, reader, missing, first=is_first(ranks))
    problems += live.problems()
    # Ranks outside of the group would keep the values that they have.
    check_spanned(live.state.values(), ranks)
    metadata, flat = reader.read_metadata(), {name: plain_leaf(live.state[name]) for name in names}
    leaves = leaves_of(flat)
    target = LoadTarget.of(leaves, {name: (name,) for name in flat})
    # Names were compared above, in words for models, and recipes are compared below.
    problems += differences(target, metadata, made.manifest, partial=True, convert=True)
    problems += not_writable(leaves, [name for name in flat if not live.state[name].is_meta])
    if on_mismatch == "raise":
        for name, source in to_convert(target, metadata, made.manifest).items():
            own = target.entries[name].recipe
            if source.recipe is not None:
                what = "is dense" if own is None else f"is {own}"
                problems.append(
                    f"{name}: the directory holds {source.recipe}, the parameter {what}; build the model with the "
                    f"directory's recipe, or {CONVERT}"
                )
    if problems:
        raise ValueError(f"{reader.path} does not fit the model; nothing has been loaded:" + in_lines(sorted(problems)))
    return names


def _match_names(
    held: Mapping[str, Entry], live: Live, reader: HuggingFaceReader, missing: Sequence[str], *, first: bool
) -> tuple[list[str], list[str]]:
    """Return the name under which the directory has each tensor of the model, and what only one side has.

    first: whether this rank compares the values of tied tensors; all ranks hear what it finds.
    """
    names, problems = [], []
    for own in live.names:
        found = [name for name in own if name in held]
        if found:
            names.append(found[0])
        elif any(matches(name, missing) for name in own):
            if live.state[own[0]].is_meta:
                problems.append(f"{own[0]}: {ON_META}")
        else:
            tied = f" (nor {', '.join(own[1:])}, which it is tied to)" if len(own) > 1 else ""
            problems.append(f"{own[0]}: only the model has it{tied}{advise_not_rotating(own[0], held)}")
        # Only one of two tied tensors is loaded: with other values under the second name, the file's would be lost.
        if any(first and not reader.alike(found[0], other) for other in found[1:]):
            problems.append(
                f"{found[1]}: the model ties it to {found[0]}, and the directory has other values for it; untie them"
            )
    known = {name for own in live.names for name in own}
    problems += [
        f"{name}: only the directory has it; the model has no such tensor{advise_rotating(held[name], known)}"
        for name in held.keys() - known
        if not name.endswith(IGNORED)
    ]
    return names, problems
