"""The tags of a trainer's memory."""

PARAMS = "params"
OPTIM = "optim"
TRAINER_TAGS = (PARAMS, OPTIM)
