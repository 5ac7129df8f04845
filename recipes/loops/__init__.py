"""The loops of GRPO and PPO, and the stages of a step; loops of your own can use their modules."""
