"""From a model's directory to one that engines load, in one command: `python -m layerwise CONFIG.yaml`.

    yaml_text.py    YAML as plain values, without its traps
    keys.py         what may be written under a key, and what is wrong with what was
    config.py       the config: frozen dataclasses, and what must hold between their keys
    parsing.py      plain values to the config, or one error with all that is wrong
    reference.py    the config described: a commented example, a table
    data.py         a file to batches of token ids, the same for any number of ranks
    model.py        a directory to a model on the meta device, sharded, filled
    export_check.py can the result be written? Answered by planning the export
    checks.py       does all of it fit together? Answered before any weight is read
    record.py       which outputs a run has begun and finished
    outputs.py      a calibration's result to directories, checkpoints and reports
    main.py         arguments, process group, order of steps, exit status

The first five are pure: text in, records or text out.
"""
