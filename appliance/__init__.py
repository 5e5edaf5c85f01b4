"""Host control plane and the `appliance` command. Never imports CUDA."""

__version__ = "0.1.0"
