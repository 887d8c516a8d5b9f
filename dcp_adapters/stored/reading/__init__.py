"""Reading checkpoints from anywhere: nothing in them is executed, nothing leads out of their directory.

reader.py            SafeFileSystemReader, a StorageReader for dcp.load and for the commands
plain_pickle.py      interprets the few pickle operations that DCP writes
metadata_names.py    the records and values they may build
metadata_checks.py   checks of the records before anyone uses them
places.py            checks of the files that they name, and of what is in these
tensor_archive.py    what a stored tensor is, found without loading it; of archives alike, once
read_ahead.py        what a load reads is asked for before
order.py             the order in which a load reads
direct_read.py       plain bytes from a file straight into a tensor
base.py              the full checkpoint that a delta was made against
rebuilding.py        chunks that are stored as what changed since it
"""
