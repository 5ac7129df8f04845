"""Weights and moments in files: the first weights, checkpoints and exports."""
