"""The command line, `python -m dcp_adapters`: a file a command, on checkpoints opened by `stored`.

cli.py                  arguments, exit status
inspect_checkpoint.py   what it holds
diff.py                 what tells two apart
convert_checkpoint.py   recipe to recipe or dense, streaming
stored.py               a checkpoint as the tensors it means, read one at a time
recipe_names.py, tables.py, progress.py   what terminals and users see
"""
