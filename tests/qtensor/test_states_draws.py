"""Random bits are those of the hash that is written down, of an element's place in the whole, and fair."""

from __future__ import annotations

import numpy as np
import torch

from qtensor.states import draws
from qtensor.states.draws import bits, key_of, row_keys

ROWS, COLUMNS = 512, 512


def mixed(x: np.ndarray) -> np.ndarray:
    """The hash lowbias32 as its author gives it."""
    x = x.astype(np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def drawn(step: int = 0, *, rows: int = ROWS) -> np.ndarray:
    """uint32 [rows, COLUMNS]."""
    keys = row_keys(key_of(3, "weight", step), torch.arange(rows))
    return bits(keys, torch.arange(COLUMNS, dtype=torch.int32)).numpy().view(np.uint32)


def test_bits_are_those_of_the_formula() -> None:
    key = key_of(3, "weight", 5)
    rows = np.array([0, 1, 2**31 - 1, 2**31, 5 * 2**31 + 17])
    low, high = np.array(key, np.int32).view(np.uint32)
    first = mixed(mixed((rows % 2**31).astype(np.uint32) ^ low) + ((rows // 2**31).astype(np.uint32) ^ high))
    columns = np.arange(100, 300, dtype=np.uint32)
    want = mixed(first[:, None] ^ (columns * np.uint32(0x9E3779B9)))
    keys = row_keys(key, torch.from_numpy(rows))
    assert keys.shape == (5, 1)
    assert (bits(keys, torch.arange(100, 300, dtype=torch.int32)).numpy().view(np.uint32) == want).all()


def test_the_hash_is_a_permutation_with_known_values() -> None:
    some = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    assert draws.mix(some).unique().numel() == some.numel()
    assert draws.mix(torch.zeros(1, dtype=torch.int32)).item() == 0
    assert (draws.mix(some).numpy().view(np.uint32) == mixed(some.numpy().view(np.uint32))).all()


def test_each_bit_is_set_half_of_the_time() -> None:
    x = drawn()
    bound = 6 * 0.5 / x.size**0.5
    for bit in range(32):
        assert abs(((x >> np.uint32(bit)) & np.uint32(1)).mean() - 0.5) < bound, bit


def test_neighbours_know_nothing_of_each_other() -> None:
    """Correlations of uniform numbers have a standard error of 1 / sqrt(number)."""
    x, later = (each / 2.0**32 - 0.5 for each in (drawn(), drawn(1)))
    salted = drawn_with_salt() / 2.0**32 - 0.5
    pairs = {"columns": (x[:, 1:], x[:, :-1]), "rows": (x[1:], x[:-1]), "steps": (x, later), "roundings": (x, salted)}
    for name, (a, b) in pairs.items():
        assert abs((a * b).mean() * 12) < 6 / a.size**0.5, name
    for name, (a, b) in pairs.items():  # nor of the last bits
        low = [((each + 0.5) * 2.0**32).astype(np.uint32) & np.uint32(0xFF) for each in (a, b)]
        low = [each / 256 - 0.5 for each in low]
        assert abs((low[0] * low[1]).mean() * 12) < 6 / a.size**0.5, name


def drawn_with_salt() -> np.ndarray:
    from qtensor.states.remainders import APART, draws_of

    keys = row_keys(key_of(3, "weight", 0), torch.arange(ROWS))
    first = torch.zeros(1, dtype=torch.int32)
    found = draws_of(torch.zeros(ROWS, COLUMNS // 16, 16), keys, first, drawn=True, salt=APART)
    return found.reshape(ROWS, COLUMNS).numpy().view(np.uint32)


def test_seeds_weights_steps_and_purposes_have_streams_of_their_own() -> None:
    keys = {key_of(*each) for each in [(1, "a", 0), (2, "a", 0), (1, "b", 0), (1, "a", 1), (1, "a", 0, "moment")]}
    assert len(keys) == 5
    assert key_of(1, "a", 0) == key_of(1, "a", 0)
    for word in key_of(1, "a", 0):
        assert -(2**31) <= word < 2**31


def test_rows_and_columns_are_those_of_the_whole() -> None:
    whole = drawn()
    keys = row_keys(key_of(3, "weight", 0), torch.arange(100, 200))
    piece = bits(keys, torch.arange(64, 96, dtype=torch.int32)).numpy().view(np.uint32)
    assert (piece == whole[100:200, 64:96]).all()


def test_positions_of_some_rows() -> None:
    keys, first = torch.arange(6, dtype=torch.int32).view(6, 1), torch.zeros(1, dtype=torch.int32)
    at = draws.Positions(keys, first)
    assert at.drawn
    assert at.of(slice(2, 4)).keys.flatten().tolist() == [2, 3]
    undrawn = draws.Positions(first, first)
    assert not undrawn.drawn
    assert undrawn.of(slice(2, 4)) is undrawn
