"""Where the content of paused tags is kept."""
