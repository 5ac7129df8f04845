"""Kernels of a training step, each with a torch reference of the same contract."""
