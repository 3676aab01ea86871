"""Triton kernels for NVIDIA GPUs, one family per file, loaded only when a tensor lies on one.

Knows nothing of graphs: every launch has a shape that the host knows without asking the device.
"""
