"""Optimizer states in another form than the target's: what is missing then has a counterpart in the checkpoint.

    master_weight     fp32                     master_remainder    16 bits, beside the weight's own bytes
    exp_avg_sq        fp32, bf16               exp_avg_sq_root     MXFP8; square_avg alike

No planner can bridge masters by itself: a remainder needs the bytes that its weight will have. So the optimizer gives
the target the entries that the checkpoint has, and converts what was read into them.
"""

from collections.abc import Collection, Mapping

from dcp_adapters.records.entry import Entry
from dcp_adapters.records.masters import Masters, is_remainder
from qtensor.states.kinds import MARK, MASTER, REMAINDER, ROOT, ROOTS

OTHERS = {MASTER: REMAINDER, REMAINDER: MASTER, MARK: MASTER} | {
    one: other for root in ROOTS for one, other in ((root, root.removesuffix(ROOT)), (root.removesuffix(ROOT), root))
}
COUNTERS = frozenset({"states_seed", "states_step"})  # options of a group, of optimizers with compressed states
WAY = (
    "read it inside `with optimizer.expecting_states(masters=.., moments=..)` of MasterWeightOptimizer, given what the "
    "optimizer that saved it has"
)


def counterpart(name: str, stored: Collection[str]) -> str | None:
    """Return the entry of another form that a checkpoint has in the place of a tensor; None if there is none."""
    state, dot, last = name.rpartition(".")
    other = f"{state}{dot}{OTHERS[last]}" if last in OTHERS else None
    return other if other is not None and (other in stored or f"{other}.payload" in stored) else None


def missing_option(name: str) -> str:
    """Return what is said of an entry of the target, no tensor, that the checkpoint has not."""
    why = f"; it was saved with states of another form: {WAY}" if name.rpartition(".")[2] in COUNTERS else ""
    return f"{name}: missing in the checkpoint{why}"


def parted_remainders(wanted: Mapping[str, Entry], converted: Collection[str]) -> list[str]:
    """Say which remainders would be loaded beside weights whose bytes become others."""
    if not converted or not any(map(is_remainder, wanted)):
        return []
    beside = Masters.among(wanted, converted).beside
    return [
        f"{master}: it says of a master what the bytes of {name} do not, and these would be converted; load both under "
        "the checkpoint's recipe"
        for name in converted
        for master in beside.get(name, [])
        if is_remainder(master)
    ]
