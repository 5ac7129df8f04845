"""Keys that a recipe has, but does not look at, as `ppo.gamma` under GRPO.

In a file they do no harm: one recipe serves with and without PPO, adapters or a checkpoint. Whoever
types one for this run expects an effect.
"""

from __future__ import annotations

from recipes.recipe.recipe import Recipe


def idle_keys(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Key, or section -> with what it has no effect, and what would make it count."""
    other = "ppo" if recipe.algorithm == "grpo" else "grpo"
    idle = {other: (f"algorithm={recipe.algorithm}", f"set algorithm={other}")}
    if recipe.lora.rank == 0:
        idle |= dict.fromkeys(
            ("lora.alpha", "lora.target_modules"), ("lora.rank=0", "set lora.rank=16")
        )
    if recipe.model.path is not None:
        beside = (f"model.path={recipe.model.path}", "set model.path=null")
        idle |= dict.fromkeys(("model.shape", "model.config"), beside)
    if recipe.task.name == "toy":
        idle |= dict.fromkeys(
            ("task.num_terms", "task.num_digits"), ("task.name=toy", "set task.name=chain_sum")
        )
    return idle
