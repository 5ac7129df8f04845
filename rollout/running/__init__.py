"""The computation of a step: forward passes, CUDA graphs and sampling."""
