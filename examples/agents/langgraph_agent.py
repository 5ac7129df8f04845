"""An agent of LangGraph (pip install langgraph langchain-openai).

`task.agent=langgraph_agent.py:solve` trains it.
"""

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def solve(row: dict[str, Any], base_url: str, api_key: str, model: str) -> float:
    """Answer a sum such as "What is 2 + 3?"; the reward is 1 if the answer names the result."""
    chat = ChatOpenAI(model=model, base_url=base_url, api_key=lambda: api_key).bind_tools([add])
    graph: Any = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    state = graph.compile().invoke({"messages": [("user", row["prompt"])]})
    return float(row["answer"] in state["messages"][-1].content)
