"""Stand-in for SGLang 0.5.16 on the CPU: its processes and hooks, and the parts that we call.

Answers are derived from the weights, so that different weights give different answers.
"""
