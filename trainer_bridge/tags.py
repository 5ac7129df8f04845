"""The tags of a trainer's memory."""

PARAMS = "params"
OPTIM = "optim"
TRAINER_TAGS = (PARAMS, OPTIM)

ADAPTERS = "adapters"  # of LoRA; parked and restored with `params`, which then never changes
