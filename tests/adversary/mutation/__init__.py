"""What the ordinary tests do not see: small changes of the product, each of which some test should notice.

    python -m tests.adversary.mutation --seed 7 --count 300 --results mutants.jsonl
    python -m tests.adversary.mutation --survivors --results mutants.jsonl

    mutants.py    the changes that a module can have, as text in its source
    relevant.py   which test files are asked, the cheapest first
    running.py    a warm process that forks for each mutant and runs pytest in a copy of the tree

A mutant is killed by the first test that fails, by an error while tests are collected, or by taking too long, where
the same tests pass without it. One that survives is equivalent, or a test is missing: somebody has to look at it.
Results are lines of JSON; what is in the file already is not run again, so a run can be stopped at any time.
"""
