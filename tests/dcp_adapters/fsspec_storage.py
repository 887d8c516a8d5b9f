"""DCP's storage behind fsspec: public from torch 2.15 on, where the old name warns."""

try:
    from torch.distributed.checkpoint import FsspecReader, FsspecWriter  # type: ignore[attr-defined,unused-ignore]
except ImportError:
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

__all__ = ["FsspecReader", "FsspecWriter"]
