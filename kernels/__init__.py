"""The arithmetic: every op as a kernel with a numpy reference beside it. Nothing here knows about requests."""
