"""Tasks of a run: problems, their split into training and evaluation, and their scores.

`task.name=package.module:function`, or `folder/file.py:function`, names a custom task:
`function(section)` gets the recipe's section of this set of problems and returns a `Task`; `split`
divides its problems.

Importing this package imports no torch, so worker processes with a custom task start fast.
"""

from recipes.tasks.problem import Problem, Score, Task, Tasks
from recipes.tasks.split import is_held_out, split
from recipes.tasks.task_sources import make_task, make_tasks

__all__ = ["Problem", "Score", "Task", "Tasks", "is_held_out", "make_task", "make_tasks", "split"]
