"""An agent of openai-agents (pip install openai-agents); `task.agent=openai_agent.py:solve`."""

from typing import Any

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def solve(row: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Answer a sum such as "What is 2 + 3?"; the reward is 1 if the answer names the result."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    agent = Agent[Any](
        name="adder",
        instructions="Use your tool.",
        tools=[add],
        model=OpenAIChatCompletionsModel(model, client),
    )
    result = await Runner.run(agent, row["prompt"], max_turns=4)
    return float(row["answer"] in result.final_output)
