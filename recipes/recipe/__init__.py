"""Defines what a recipe says: frozen sections, each with its own rules.

A section checks what it can see by itself, `Recipe` what takes two of them,
`recipes.setup.preparation` what takes the disk or the machine.
"""

from recipes.recipe.loops import (
    GPUS,
    SAVED,
    TAGS,
    CheckpointSection,
    ClusterSection,
    CycleSection,
    EvalSection,
    GrpoSection,
    PpoSection,
    TaskSection,
)
from recipes.recipe.recipe import Recipe, switching
from recipes.recipe.rules import FieldError
from recipes.recipe.sides import (
    EngineSection,
    LoraSection,
    ModelSection,
    SamplingSection,
    TrainerSection,
)

__all__ = [
    "GPUS",
    "SAVED",
    "TAGS",
    "CheckpointSection",
    "ClusterSection",
    "CycleSection",
    "EngineSection",
    "EvalSection",
    "FieldError",
    "GrpoSection",
    "LoraSection",
    "ModelSection",
    "PpoSection",
    "Recipe",
    "SamplingSection",
    "TaskSection",
    "TrainerSection",
    "switching",
]
