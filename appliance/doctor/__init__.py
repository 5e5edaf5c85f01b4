"""Checks of a host and an installation: one file per group, each check a function of a Host that gives Findings.

Nobody opens NVML or CUDA here: /proc, /sys, systemctl and the journal are read, so that the doctor works where the
driver does not, and never holds a GPU that somebody wants to reset.
"""
