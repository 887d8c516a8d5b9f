"""Reading checkpoints from anywhere: nothing in them is executed, nothing leads out of their directory.

reader.py            SafeFileSystemReader, a StorageReader for dcp.load and for all commands
plain_pickle.py      the few pickle operations that DCP writes, interpreted
metadata_names.py    the records they may build
metadata_checks.py   what must hold of the records before anyone uses them
places.py            what must hold of the files that they name, and of what is in them
tensor_archive.py    what a stored tensor is, told without loading it
order.py             in which order a load reads
direct_read.py       plain bytes from a file straight into a tensor
"""
