"""Attack "bytes": mutants of every byte that the library reads, by structure and by chance.

    pool.py           a process of its own reads them, bounded in memory and time; what kills it is a finding, too
    outcomes.py       what a reader may do with a mutant: refuse it in clear words, or read what was written
    changes.py        changes of bytes and of JSON
    programs.py       changes of pickles and of the zip files around them

    checkpoints.py    .metadata, archives, the manifest, checksums and digests of DCP checkpoints
    delta_checkpoints.py   deltas to another checkpoint: marks, coded chunks, the base; a directory of saves
    checkpoint_readers.py  all that reads a checkpoint
    directories.py    safetensors, their index, config.json and hf_quant_config.json of Hugging Face directories
    deltas.py         patches and their chain
    progress.py       the files of a calibration, interrupted or finished
    streams.py        what comes over a socket or a process group

A scenario is one mutant and one way of reading it. Each ends in one of these words, behind what was read:

    refused    an error of a documented kind that names the file or tensor and says what to do
    equal      the values of the original: what was changed says nothing about them
    forged     other values, where the mutant's checksums were made to fit, or nothing is there that could tell
    told       a warning or a report says what is wrong, as it should
"""

from tests.adversary.attack import Attack
from tests.adversary.bytes_read.pool import POOL

ATTACK = Attack("bytes", POOL.scenario, POOL.held)
