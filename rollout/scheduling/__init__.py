"""Continuous batching: requests in, steps, samples out."""
