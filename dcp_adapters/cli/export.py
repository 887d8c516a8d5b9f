"""The command `export`: hf/exporting/ writes directories, gguf/ writes the files of llama.cpp."""

import argparse

from dcp_adapters.cli.arguments import add_checksums, add_progress
from dcp_adapters.cli.printing import FINE, show, warn
from dcp_adapters.gguf.export import export_gguf
from dcp_adapters.gguf.plan import GGUF
from dcp_adapters.hf.exporting.export import export_hf
from dcp_adapters.hf.layouts.registry import LAYOUTS
from dcp_adapters.hf.models.adapters import ADAPTERS
from dcp_adapters.plain.tables import human_bytes

ABOUT = """\
Write the weights of a checkpoint as a Hugging Face directory that inference engines load: safetensors with the very
bytes of the checkpoint, compared with its checksums if it has some, and the JSON that tells of them. OUT must not
exist, or be empty, and appears only when it is complete. One file is in memory at a time. With --layout gguf OUT is
one file, which llama.cpp runs; it needs pip install "qtensor-fsdp[gguf]"."""
EXAMPLES = """\
examples:
  %(prog)s runs/step-1000 out --config model                 vLLM, SGLang, transformers
  %(prog)s runs/step-1000 out --config model --layout modelopt
  %(prog)s calibrated out --config model --rest model        the rest from the dense model
  %(prog)s runs/step-1000 out.gguf --layout gguf --like model-f16.gguf"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.add_argument("source", metavar="CHECKPOINT", help="the directory of the checkpoint")
    parser.add_argument("destination", metavar="OUT", help="the directory to write; must not exist, or be empty")
    layouts = sorted([*LAYOUTS, GGUF.name])
    parser.add_argument("--layout", choices=layouts, default="compressed-tensors", help="default: %(default)s")
    parser.add_argument("--like", metavar="FILE", help="for gguf: a GGUF file of the same model, in any type")
    parser.add_argument("--config", metavar="PATH", help="the model's directory, or its config.json; engines need it")
    parser.add_argument("--rest", metavar="PATH", help="where to take tensors from that the checkpoint does not have")
    parser.add_argument("--prefix", metavar="NAME.", help="what the names of the weights begin with, in the checkpoint")
    parser.add_argument(
        "--fused-scales",
        choices=["raise", "requantize"],
        help="where linears that engines fuse have different NVFP4 global scales: fail (the default), or round again",
    )
    parser.add_argument(
        "--adapters",
        choices=ADAPTERS,
        default="raise",
        help="where the checkpoint has adapters of peft: fail (the default), or take the model below them",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="of a file; default: 5GB")
    add_checksums(parser)
    add_progress(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write a Hugging Face directory, or a GGUF file."""
    if (arguments.layout == GGUF.name) != (arguments.like is not None):
        raise ValueError(f"--layout {GGUF.name} and --like go together: a GGUF file is made like another of the model")
    if arguments.like is not None:
        return _export_gguf(arguments)
    out = export_hf(
        arguments.source,
        arguments.destination,
        layout=arguments.layout,
        config=arguments.config,
        rest=arguments.rest,
        prefix=arguments.prefix,
        fused_scales=arguments.fused_scales or "raise",
        max_shard_size=arguments.max_shard_size or "5GB",
        verify_checksums=arguments.checksums,
        progress=arguments.progress,
        adapters=arguments.adapters,
    )
    files = sorted(out.glob("*.safetensors"))
    total = human_bytes(sum(file.stat().st_size for file in files))
    if arguments.config is None:
        warn("without --config, config.json tells of the quantization alone; engines need the model's")
    show(f"{out}: {total} in {len(files)} file{'s' if len(files) > 1 else ''}, layout {arguments.layout}")
    return FINE


def _export_gguf(arguments: argparse.Namespace) -> int:
    for option in ("config", "fused_scales", "max_shard_size"):
        if getattr(arguments, option) is not None:
            flag = "--" + option.replace("_", "-")
            raise ValueError(f"--layout {GGUF.name} takes no {flag}: it is one file, and --like describes the model")
    out = export_gguf(
        arguments.source,
        arguments.destination,
        like=arguments.like,
        rest=arguments.rest,
        prefix=arguments.prefix,
        verify_checksums=arguments.checksums,
        progress=arguments.progress,
        adapters=arguments.adapters,
    )
    show(f"{out}: {human_bytes(out.stat().st_size)}, layout {GGUF.name}")
    return FINE
