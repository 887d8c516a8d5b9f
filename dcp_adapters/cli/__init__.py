"""The command line, `python -m dcp_adapters`.

main.py                all commands: arguments, exit status; help_texts.py: what `--help` says
diff.py                what two checkpoints hold that is not the same
convert_checkpoint.py  a stored checkpoint into another format: recipe to recipe or dense, one tensor at a time;
                       conversion_outcome.py: which tensors were rounded, and by how much
report/                a page with pictures

The work of inspect and verify is done in stored/ (verify of a Hugging Face directory in hf/), that of export in hf/.
"""
