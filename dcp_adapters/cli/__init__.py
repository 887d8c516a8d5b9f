"""The command line, `python -m dcp_adapters`.

main.py         lists the commands, runs one, tells its errors
arguments.py    arguments that several commands have
printing.py     exit status, results, warnings
report/         the command `report`: a page with pictures
deltas/         the commands `delta` and `apply`

inspect, verify, check, digest, diff, convert, export: each file is the command of its name. A command has
ABOUT and EXAMPLES, which `--help` shows, `add_arguments`, and `run`, which returns the exit status; it is imported when
it is run. Most commands leave the work to other folders; diff and digest do it themselves.
"""
