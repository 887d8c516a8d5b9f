"""What `--help` says of each command: a summary, what it does, and examples."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HelpText:
    """The help of one command; %(prog)s in the examples is the program and the command."""

    summary: str
    about: str
    examples: str


MAIN = HelpText(
    summary="",
    about="""\
Look at, check, digest, compare, convert, patch and export PyTorch distributed checkpoints with quantized tensors in
them. A CHECKPOINT is a directory with a .metadata file, as torch.distributed.checkpoint.save writes it; all commands
but export also take a Hugging Face directory of safetensors, dense or quantized.
One process suffices, whatever number of ranks wrote it; no model is needed, and no GPU.""",
    examples="""\
examples:
  %(prog)s inspect runs/step-1000                    what is in it?
  %(prog)s report runs/step-1000 --against dense     a page to look at: how well are the weights kept?
  %(prog)s verify runs/step-1000                     is it whole and undamaged?
  %(prog)s digest runs/step-1000 exported            are these the same weights?
  %(prog)s diff runs/step-1000 runs/step-2000        what changed, and by how much?
  %(prog)s convert runs/step-1000 out --to nvfp4     the same weights in another format
  %(prog)s export runs/step-1000 out --config model  a directory that inference engines load
  %(prog)s delta exported-1 exported-2 1-to-2.delta  what changed, byte for byte, in a small file
  %(prog)s apply exported-1 1-to-2.delta out         exported-2 again

exit status: 0 fine; 1 something was found (an error, a difference); 2 the command could not do its work""",
)
HELP = {
    "inspect": HelpText(
        summary="list tensors, formats and sizes",
        about="""\
List the tensors of a checkpoint with their formats and sizes, and the totals for each format.
Reads the description only, no tensor data, so it is quick for checkpoints of any size.""",
        examples="""\
examples:
  %(prog)s runs/step-1000
  %(prog)s runs/step-1000 --match 'model.layers.0.*'
  %(prog)s runs/step-1000 --json | jq .total.bytes_per_parameter""",
    ),
    "report": HelpText(
        summary="write a page with pictures",
        about="""\
Write one HTML page about a checkpoint: sizes, quantization error by layer, histograms of scales, outlier channels,
saturated elements and NaN, and what each tensor costs to write. The page loads nothing, and docs/report.md says how to
read it. --against names the checkpoint whose values are right; tensors are matched by name, whatever number of ranks
wrote either, and without it there is no error to show. All data are read, one tensor at a time.""",
        examples="""\
examples:
  %(prog)s runs/step-1000 --against dense            writes step-1000-report.html
  %(prog)s runs/step-1000 --match 'model.*'          without optimizer states
  %(prog)s runs/step-1000 -o page.html
  %(prog)s runs/step-1000 --against dense --json | jq '.tensors[] | [.snr_db, .name]'""",
    ),
    "verify": HelpText(
        summary="check that nothing is missing or damaged",
        about="""\
Read all of a checkpoint and check it: files missing or cut short, checksums and digests where it has some, the manifest
against what is stored. Of a Hugging Face directory: NaN, and the digests in the files of an export.
--deep reads the quantized tensors once more and finds what no checksum can: masters that do not requantize to the
weights beside them, an amax history that cannot have led to its scale, and (as warnings: calibration leaves such, too)
scales that their values do not ask for. Exit status 1 if there is any error; warnings alone leave it 0.""",
        examples="""\
examples:
  %(prog)s runs/step-1000
  %(prog)s runs/step-1000 --deep                     are weights, scales and optimizer of one step?
  %(prog)s runs/step-1000 --own-scales               trained alone, never calibrated or imported
  %(prog)s runs/step-1000 && rm -r runs/step-0500""",
    ),
    "digest": HelpText(
        summary="one value for all weights",
        about="""\
Print one value, 32 hex digits, for all weights of a checkpoint or a Hugging Face directory. It depends on the names,
bytes, dtypes and shapes of the tensors alone: not on the number of ranks that wrote them, nor on the kind of directory.
A live model has the same value in Python: dcp_adapters.digest(model). With B, tell the first tensor that differs, with
exit status 1. Of a checkpoint, the subtree that holds the quantized weights counts; --prefix says another one. Where
it was saved with QuantizedSavePlanner(digest=True), tell whether the tensors are what was recorded, too.""",
        examples="""\
examples:
  %(prog)s runs/step-1000
  %(prog)s saved-by-8-ranks saved-by-2-ranks
  %(prog)s runs/step-1000 exported                   does the engine load what was trained?
  %(prog)s runs/step-1000 --json | jq .sides[0].tensors""",
    ),
    "diff": HelpText(
        summary="compare two checkpoints",
        about="""\
Compare two checkpoints tensor by tensor. Tensors are matched by name, whatever number of ranks wrote them; a quantized
one is compared with a dense one, or with one of another recipe, by its dequantized values. For each tensor that
differs: how many bytes, the largest absolute error, the relative error (Frobenius norm) and the signal-to-noise ratio
of B, with A as the reference. One tensor of each is in memory at a time. Exit status 1 if anything differs.""",
        examples="""\
examples:
  %(prog)s saved-by-8-ranks saved-by-2-ranks
  %(prog)s dense quantized                           how much did quantizing cost?""",
    ),
    "convert": HelpText(
        summary="write a copy in another format",
        about="""\
Write a copy of SRC with tensors in another format: from recipe to recipe, from quantized to dense, from dense to
quantized. Without --include all quantized tensors are converted; with it the tensors that match, dense ones too (2 dims
or more; dense tensors are quantized but never cast to another dtype). Everything else, optimizer state for example, is
copied byte for byte. From recipe to recipe values stay as they are where the new format can hold them, and are rounded
once more where it cannot: the tensors that were rounded are listed with their errors. One tensor is in memory at a
time, and is compared with its checksums, if SRC has some. DST must not exist, or be empty, and appears only when it is
complete.""",
        examples="""\
examples:
  %(prog)s step-1000 out --to bfloat16                      quantized weights to dense ones
  %(prog)s step-1000 out --to nvfp4 --exclude '*lm_head*'   another recipe
  %(prog)s dense out --to mxfp8 --include 'model.layers.*.weight' --exclude '*norm*'
  %(prog)s step-1000 out --to mxfp8 --option blocks=square --option scale_rounding=floor
  %(prog)s step-1000 out --to nvfp4 --json | jq '.tensors[] | [.relative, .name]'""",
    ),
    "export": HelpText(
        summary="write what inference engines load",
        about="""\
Write the weights of a checkpoint as a Hugging Face directory that inference engines load: safetensors with the very
bytes of the checkpoint, compared with its checksums if it has some, and the JSON that tells of them. OUT must not
exist, or be empty, and appears only when it is complete. One file is in memory at a time. With --layout gguf OUT is
one file, which llama.cpp runs; it needs pip install "qtensor[gguf]".""",
        examples="""\
examples:
  %(prog)s runs/step-1000 out --config model                 vLLM, SGLang, transformers
  %(prog)s runs/step-1000 out --config model --layout modelopt
  %(prog)s calibrated out --config model --rest model        the rest from the dense model
  %(prog)s runs/step-1000 out.gguf --layout gguf --like model-f16.gguf""",
    ),
    "delta": HelpText(
        summary="write what changed between two states",
        about="""\
Write what leads from OLD to NEW, byte for byte, as one compressed file. Both are checkpoints, or both are Hugging Face
directories, with the same names, recipes and shapes; other differences are named and refused. Entries of bytes that
changed are in the file whole. One tensor of each is in memory at a time. Needs zstd: pip install "qtensor[delta]".""",
        examples="""\
examples:
  %(prog)s exported-1 exported-2 1-to-2.delta
  %(prog)s runs/step-1000 runs/step-1010 step-1010.delta --json | jq .bytes""",
    ),
    "apply": HelpText(
        summary="write the state that deltas lead to",
        about="""\
Write BASE with the changes of one or more deltas as OUT. BASE must be the state that the first delta starts from, or
one that a later one does; every delta must start where the one before it leads to. Digests are compared before and
after, and nothing is written if anything is wrong. OUT must not exist, or be empty, and appears only when it is
complete; where OUT holds the result already, nothing is done. Needs zstd: pip install "qtensor[delta]".""",
        examples="""\
examples:
  %(prog)s exported-1 1-to-2.delta out
  %(prog)s exported-1 1-to-2.delta 2-to-3.delta out""",
    ),
}
