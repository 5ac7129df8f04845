"""Stands for SGLang 0.5.16 on the CPU: two processes, its hooks, and as much of its engine as our
rollout calls. What it answers is made of the weights, so that other weights answer otherwise.
"""
