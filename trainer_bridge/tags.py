"""The tags of a trainer's memory."""

PARAMS = "params"
OPTIM = "optim"
CRITIC = "critic"
CRITIC_OPTIM = "critic_optim"
REFERENCE = "reference"
TRAINER_TAGS = (PARAMS, OPTIM, CRITIC, CRITIC_OPTIM, REFERENCE)
TRAINED = (PARAMS, OPTIM, CRITIC, CRITIC_OPTIM)
"""What learning needs."""
MODELS = (PARAMS, REFERENCE, CRITIC)
"""Each scores alone: the policy, the policy as it was, the critic."""

ADAPTERS = "adapters"  # of LoRA; offloaded and reloaded with `params`, which then never changes
