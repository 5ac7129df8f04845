"""What a recipe takes, in bytes: by stage, process, GPU and host, before anything is run."""
