"""Benchmarks: each question is a file, and `python -m benchmarks` asks them and writes results/<date>-<machine>-cpu.*.

questions      those in the table QUESTIONS of `__main__`; files named after one, such as gather_rank.py, are its parts
by hand        backward.py, loss_curves.py, moment_codes.py, optimizer_states.py (with optimizer_contenders.py and
               optimizer_states_report.py) and soak.py run for long, and are started by themselves
for all        small_training, timing, report, machine, disk, live_storages, allocations, model_shapes,
               simulated_ranks
"""
