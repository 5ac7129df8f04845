"""An agent by hand: a loop over OpenAI's API with one tool; `task.agent=plain_agent.py:solve`."""

import json
from typing import Any

import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def solve(row: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Answer a sum such as "What is 2 + 3?"; the reward is 1 if the answer names the result."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": row["prompt"]}]
    for _ in range(4):
        tools: Any = [ADD]
        answer = client.chat.completions.create(model=model, messages=messages, tools=tools)
        said = answer.choices[0].message
        messages.append(said)
        for call in said.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": add(call)})
        if not said.tool_calls:
            break
    return float(row["answer"] in (said.content or ""))


def add(call: Any) -> str:
    """Return the sum, or what is wrong with the call."""
    try:
        given = json.loads(call.function.arguments)
        return str(given["a"] + given["b"])
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"
