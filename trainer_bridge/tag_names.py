"""Names of the tags of a trainer's memory."""

PARAMS = "params"
OPTIM = "optim"
CRITIC = "critic"
CRITIC_OPTIM = "critic_optim"
REFERENCE = "reference"
TRAINER_TAGS = (PARAMS, OPTIM, CRITIC, CRITIC_OPTIM, REFERENCE)
TRAINED = (PARAMS, OPTIM, CRITIC, CRITIC_OPTIM)
"""Tags that training needs."""
MODELS = (PARAMS, REFERENCE, CRITIC)
"""Tags of models that score, one at a time: the policy, the reference, the critic."""

ADAPTERS = "adapters"  # LoRA; offloaded and reloaded with `params`, which then never changes
ACTIVATIONS, GRADIENTS = "activations", "gradients"
"""Tags of `LayerGraphs`, which have memory from an update until another pass or an offload."""
