"""Answers whose text follows a JSON schema: which tokens may come next, by xgrammar."""

import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.model.decoder import ModelConfig


class Guide:
    """Where one answer is in its grammar.

    Args:
        matcher: The grammar, before the first token.
        words: Number of words of a mask.
    """

    def __init__(self, matcher: Any, words: int) -> None:
        import xgrammar

        self._matcher, self._taken = matcher, 0
        self._mask = xgrammar.allocate_token_bitmask(1, 32 * words)

    def mask(self, answer: Sequence[int]) -> NDArray[np.int32]:
        """Return which tokens may follow an answer.

        Args:
            answer: Its tokens; those of earlier calls are its beginning.

        Returns:
            A bit for each token of the vocabulary, int32 [words], valid until the next call.
        """
        for token in answer[self._taken :]:
            self._matcher.accept_token(token)
        self._taken = len(answer)
        self._matcher.fill_next_token_bitmask(self._mask, 0)
        mask: NDArray[np.int32] = self._mask.numpy()[0]
        return mask


class Guides:
    """The grammars of one model's answers. Any thread may compile.

    Args:
        path: Directory of the model and its tokenizer.
        model: The model.
    """

    def __init__(self, path: Path, model: ModelConfig) -> None:
        self._path, self._model = path, model
        self._compiled: dict[str, Any] = {}
        self._lock = threading.Lock()

    def compile(self, schema: str) -> None:
        """Compile a schema, unless it is compiled.

        Raises:
            ValueError: xgrammar is missing, the model has no tokenizer, or the schema is refused.
        """
        with self._lock:
            if schema in self._compiled:
                return
            try:
                self._compiled[schema] = self._compiler.compile_json_schema(schema)
            except ImportError as error:
                raise ValueError("json_schema: pip install 'memsaver[schema]'") from error
            except Exception as error:  # of the tokenizer's files, or what xgrammar refuses
                why = " ".join(str(error).split()).rpartition(": ")[2]
                raise ValueError(f"json_schema: xgrammar refuses it: {why}") from error

    def begin(self, schema: str) -> Guide:
        """Return the guide of a new answer, whose schema is compiled."""
        import xgrammar

        matcher = xgrammar.GrammarMatcher(self._compiled[schema])
        return Guide(matcher, -(-self._model.vocab_size // 32))

    @cached_property
    def _compiler(self) -> Any:
        import xgrammar
        from transformers import AutoTokenizer

        tokenizer, size = AutoTokenizer.from_pretrained(self._path), self._model.vocab_size
        ends = sorted(self._model.stop_token_ids)
        of = xgrammar.TokenizerInfo.from_huggingface
        return xgrammar.GrammarCompiler(of(tokenizer, vocab_size=size, stop_token_ids=ends))
