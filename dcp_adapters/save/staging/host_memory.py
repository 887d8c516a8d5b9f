"""Host memory for snapshots: a few slabs, each lent to one snapshot at a time.

    lease      a memoryview of a slab: a free one that is large enough, else a new one; at the limit, the next to return
    tensors    torch.frombuffer(lease, ...), as many as wanted; each has a storage of exactly its bytes
    return     the lease dies with the last storage made over it, and its finalizer gives the slab back

A storage made by `torch.frombuffer` holds the buffer's owner for as long as any alias of it lives (a view, a detached
tensor, the local tensor of a DTensor, in any thread), so no byte of a slab is lent twice at a time. The finalizer
runs in the thread that drops the last alias, perhaps inside a garbage collection that interrupts `lease` itself:
SimpleQueue.put is made for that, a lock is not.

Slabs are shared mappings, not private ones: after a fork (data loaders fork workers) a private mapping would be copied,
page by page, at the next snapshot, and the old pages kept by the child.
"""

import contextlib
import gc
import mmap
import queue
import weakref

import torch

PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


class Slab:
    """One mapping; given back to the system when this object dies."""

    def __init__(self, nbytes: int) -> None:
        try:
            self.memory = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise MemoryError(
                f"no {nbytes} bytes of host memory for a snapshot ({error}); run fewer ranks on the host, or save less "
                "at a time"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # touching memory for the first time is the cost of a snapshot; huge pages make fewer faults of it, and a
            # kernel may have none
            with contextlib.suppress(OSError):
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self.pinned = False

    def pin(self) -> None:
        """Page-lock the mapping, so that a device can copy into it by itself."""
        if self.pinned:
            return
        address = torch.frombuffer(self.memory, dtype=torch.uint8).data_ptr()
        status = int(torch.cuda.cudart().cudaHostRegister(address, self.nbytes, PORTABLE))
        if status:
            _forget_error()
            raise PageLockError(
                f"page-locking {self.nbytes} bytes of host memory for a snapshot failed with CUDA error {status}; "
                "use QuantizedStager(pin_memory=False), or raise the limit of locked memory"
            )
        self.pinned = True
        weakref.finalize(self, _unpin, address).atexit = False


class PageLockError(RuntimeError):
    """The system does not page-lock as much memory as was asked for."""


def _forget_error() -> None:
    """Make CUDA report the error of a failed call now: it keeps it, and the next launch would fail in its place."""
    with contextlib.suppress(RuntimeError, AssertionError):  # the latter of a torch without CUDA
        torch.zeros(1, dtype=torch.uint8, device="cuda")


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


class SnapshotMemory:
    """At most `limit` slabs.

    Args:
        limit: how many snapshots may exist at a time.
        patience: seconds to wait for a slab when all are lent.
    """

    def __init__(self, limit: int, patience: float) -> None:
        self.limit, self.patience = limit, patience
        self.closed = False
        self.lent = 0
        self.free: list[Slab] = []
        self.returned: queue.SimpleQueue[Slab] = queue.SimpleQueue()

    def lease(self, nbytes: int, *, pinned: bool) -> memoryview:
        """Return a writable buffer of at least `nbytes` bytes, aligned to a page.

        The buffer and all that is made over it are one snapshot. Not for several threads at once.

        Raises:
            TimeoutError: `limit` snapshots are still alive after `patience` seconds.
            MemoryError, PageLockError: the memory cannot be allocated, or cannot be page-locked. After the latter the
                memory is free, for a lease that is not pinned.
        """
        slab = self._take(nbytes)
        if pinned:
            try:
                slab.pin()
            # the stager goes on with the same memory, not page-locked
            except PageLockError:
                self.free.append(slab)
                raise
        lease = memoryview(slab.memory)
        self.lent += 1
        weakref.finalize(lease, self._give_back, slab).atexit = False
        return lease

    def close(self) -> None:
        """Free what is free; what is lent is freed when its snapshot dies."""
        self.closed = True
        self._collect()
        self.free.clear()

    def _give_back(self, slab: Slab) -> None:
        if not self.closed:
            self.returned.put(slab)

    def _collect(self) -> None:
        """Move the slabs that came back to the free ones."""
        while not self.returned.empty():
            self._accept(self.returned.get())

    def _accept(self, slab: Slab) -> None:
        self.lent -= 1
        self.free.append(slab)

    def _take(self, nbytes: int) -> Slab:
        """Return the smallest free slab that is large enough; else a new one, perhaps in place of a free one."""
        self._collect()
        if self.lent >= self.limit:
            self._wait()
        best = min((slab for slab in self.free if slab.nbytes >= nbytes), key=lambda slab: slab.nbytes, default=None)
        if best is not None:
            self.free.remove(best)
            return best
        if self.lent + len(self.free) >= self.limit:
            # all free ones are too small: the smallest goes, so that `limit` holds and most memory is kept
            self.free.remove(min(self.free, key=lambda slab: slab.nbytes))
        return Slab(nbytes)

    def _wait(self) -> None:
        # the traceback of a failed save may hold its snapshot in a reference cycle
        gc.collect()
        try:
            self._accept(self.returned.get(timeout=self.patience))
        except queue.Empty:
            raise TimeoutError(
                f"QuantizedStager: {self.lent} snapshots are still alive after {self.patience:g} s, and max_snapshots="
                f"{self.limit}. A snapshot lives until its upload has ended and nothing refers to it any more: save "
                "less often, raise max_snapshots (each takes the bytes of the state dict), and keep no staged state "
                "dict, no planner that has saved and no future of a failed save"
            ) from None
