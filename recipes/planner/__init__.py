"""Plan the bytes that a recipe takes, by stage, process, GPU and host, before it runs."""
