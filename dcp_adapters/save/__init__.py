"""Saving: each rank's plan, the coordinator's part, and the order in which files are written.

The life of a save, in the order in which files here and in steps/ are entered:

    state dict    every rank        planner.py        flattened; leaves separated, parts get items      write_items.py
                                                      refused: names, and tensors without bytes         refusals.py
                                                      a step is made for each option that is on         steps/
    plan          every rank        coordinator.py    a record beside the items: recipes, scales
                                                      each step adds what it tells; the last of them may
                                                      send a token in place of all of it                plan_cache.py
    manifest      the coordinator   coordinator.py    ranks must agree; the manifest is made of all of them
    files planned the coordinator   global_plan.py    who writes which chunk; the manifest is an entry
                                                      so is the table of checksums                     checksum_table.py
                                                      room is made beside an older checkpoint           overwrite.py
    files         every rank        data_files.py     items are resolved, step by step, and written     archives.py
    published     the coordinator   atomic_writer.py  last checks, then `.metadata`, by one rename

planner.py         QuantizedSavePlanner
steps/             the options that a save may have, a step each; one that is off is not in the list
write_items.py     the leaves of a state dict, and where each part's chunk lies
global_plan.py     the coordinator's plan
pieces.py          do pieces that are placed by hand make up their tensors?
refusals.py        names that are taken, bytes if a writer keeps none
save_log.py        log lines, while the logger is on
atomic_writer.py   AtomicFileSystemWriter, whose commit is one rename
data_files.py      the files that it writes
archives.py        what torch.save writes of a tensor, without torch.save
staging/           copies in host memory, of which asynchronous saves write
"""
