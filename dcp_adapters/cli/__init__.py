"""The command line, `python -m dcp_adapters`: a file a command, on checkpoints opened by `stored`.

cli.py                  arguments, exit status
inspect_checkpoint.py   what it holds
report/                 a page with pictures about it
diff.py                 what tells two apart
convert_checkpoint.py   recipe to recipe or dense, streaming
stored.py               a checkpoint as the tensors it means, read one at a time
errors.py               how far values are from those that are right
recipe_names.py, tables.py, progress.py   what terminals and users see
"""
