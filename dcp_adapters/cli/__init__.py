"""The command line, `python -m dcp_adapters`: a file a command.

main.py      arguments, exit status; help_texts.py: what `--help` says
diff.py      what tells two apart
convert.py   recipe to recipe or dense, streaming
report/      a page with pictures
"""
