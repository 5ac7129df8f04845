"""Kernels of a training step, each with a torch reference that has the same contract."""
