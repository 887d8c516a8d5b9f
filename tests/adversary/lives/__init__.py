"""Random lives of a model, in step with a reference that shares no code with the library.

plans.py       the life of a seed: layers, optimizer, defaults of torch, steps; and how a failing one is shortened
models.py      the layers, and values
numerics.py    the formats in numpy
twin.py        the reference: weights, masters, plain optimizers
life.py        both side by side, and what is compared after each step
training.py, writes.py, ...    the steps
"""

from __future__ import annotations

from tests.adversary.attack import Attack, Found
from tests.adversary.lives import checkpoints, outgoing, training, writes
from tests.adversary.lives.life import Failure, Plan, live
from tests.adversary.lives.plans import planned, shortened

TABLE = training.STEPS | writes.STEPS | checkpoints.STEPS | outgoing.STEPS


def scenario(seed: int) -> str:
    """One life in one process."""
    plan = planned(seed)
    try:
        live(plan, TABLE)
    except Exception as error:
        raise _found(plan, error) from error
    return "masters" if plan.masters else "plain"


def _found(plan: Plan, error: BaseException) -> Found:
    kind = _kind(error)

    def fails(smaller: Plan) -> bool:
        try:
            live(smaller, TABLE)
        except Exception as other:
            return _kind(other) == kind
        return False

    short = shortened(plan, fails)
    try:
        live(short, TABLE)
    except Exception as last:
        error = last
    lines = [
        f"{error}",
        f"optimizer {short.optimizer}, masters={short.masters}, defaults {short.defaults}, grouped {short.grouped}",
    ]
    lines += [f"    {layer}" for layer in short.layers] + [f"    {step.name}({step.seed})" for step in short.steps]
    return Found("\n".join(lines))


def _kind(error: BaseException) -> tuple[str, str]:
    inner = error.error if isinstance(error, Failure) else error
    step = error.step.name if isinstance(error, Failure) else ""
    return step, type(inner).__name__


ATTACK = Attack("lives", scenario)
