"""A server in front of an engine, in the form of OpenAI's API; needs the extra `serve`."""

from rollout.server.app import KEEP_ALIVE, ServerOptions, make_app
from rollout.server.text import AnswerMessage, AnswerText, ChatFormat

__all__ = ["KEEP_ALIVE", "AnswerMessage", "AnswerText", "ChatFormat", "ServerOptions", "make_app"]
