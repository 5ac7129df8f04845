"""Environments: conversations of several turns with tools and replies, in worker processes.

Importing this package imports no torch, so that these processes start fast.
"""

from recipes.environments.environments import (
    EnvironmentFault,
    EnvironmentKind,
    EnvironmentProcess,
    Environments,
)
from recipes.environments.guess_game import Guess
from recipes.environments.python_tool import Python

__all__ = [
    "EnvironmentFault",
    "EnvironmentKind",
    "EnvironmentProcess",
    "Environments",
    "Guess",
    "Python",
]
