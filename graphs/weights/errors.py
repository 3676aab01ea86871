"""The error of a checkpoint that cannot be used.

Knows no format.
"""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint or its config cannot be used; the message names the file and the tensor."""
