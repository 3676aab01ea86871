"""Sections of the GPU check: each measures one thing and returns rows.

Knows the device side of the engine; never a server, a checkpoint or the network.
"""
