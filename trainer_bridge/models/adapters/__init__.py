"""Low-rank adapters, in the model and in PEFT's files."""
