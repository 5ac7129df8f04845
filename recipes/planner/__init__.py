"""Reckons what a recipe takes, in bytes, by stage, process, GPU and host, before it is run."""
