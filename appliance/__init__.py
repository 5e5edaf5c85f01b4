"""Host control plane and the `appliance` command. Never imports CUDA."""

from engine import __version__

__all__ = ["__version__"]
