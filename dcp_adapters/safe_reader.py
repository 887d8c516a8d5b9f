"""Reading checkpoints of unknown origin."""

from torch.distributed.checkpoint import FileSystemReader

__all__ = ["SafeFileSystemReader"]


class SafeFileSystemReader(FileSystemReader):
    """A FileSystemReader."""
