"""How tensors made of parts travel through FSDP2: all-gather hooks, agreement on scales, unsharding one module.

This package knows parts, not formats. It is the lowest of the packages and imports only torch.
"""

from fsdp_hooks.scale_sync import sync_scales
from fsdp_hooks.unshard import unsharded

__all__ = ["sync_scales", "unsharded"]
