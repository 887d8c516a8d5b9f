"""How tensors made of parts travel through FSDP2: all-gather hooks, agreement on scales, unsharding one module.

Knows parts, not formats. The lowest of the packages: it imports torch only.
"""

from fsdp_hooks.scale_sync import sync_scales
from fsdp_hooks.unshard import unsharded

__all__ = ["sync_scales", "unsharded"]
