"""What tests do not look for: random scenarios, each from one number, judged by oracles that share no code with us.

    make adversary                         every attack, ten minutes in all
    make adversary BUDGET=1h SEED=7        longer, and from another number
    python -m tests.adversary lives --replay 123456     one scenario again, as it was

    python -m tests.adversary.mutation --count 300      the other way round: the product changed, do tests notice?

An attack (attack.py) is a package or module in this directory with an `ATTACK`. It makes a scenario from a seed, runs
it, and says in one word what came of it; what must not happen raises `Found`. The ordinary suite runs a few fixed seeds
of each. Whatever an attack finds becomes an ordinary test beside the code that was wrong.
"""
