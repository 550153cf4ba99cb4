"""From forms to constraints: what an engine compiles, and keeps."""

import threading
from collections.abc import Sequence
from typing import Any

from peagle.engine.constraint import Constraint
from peagle.engine_client.form import Form
from peagle.grammar import read
from peagle.grammar_compiler import GrammarCompiler
from peagle.token_rules import ThoughtBudget, TokenRules


class Constraints:
    """Makes the constraints of one engine's requests; safe to call from several threads."""

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._ends = tokenizer, vocab_size, end_tokens
        self._making = threading.Lock()
        self._compiler: GrammarCompiler | None = None

    def make(self, form: Form) -> Constraint:
        """The constraint of one sequence. Raises `InputError` for an impossible form.

        What grammars need of the tokenizer takes seconds for a large one, once.
        """
        bound: Constraint | None = None
        if form.grammar is not None:
            bound = self._grammars().compile(read(form.grammar))
        if form.has_rules:
            bound = TokenRules(form.allowed, form.endings, self._vocab_size, bound)
        if form.thoughts is not None:
            bound = ThoughtBudget(*form.thoughts, self._vocab_size, bound)
        assert bound is not None, "a form binds"
        return bound

    def _grammars(self) -> GrammarCompiler:
        with self._making:
            if self._compiler is None:
                self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size, self._ends)
            return self._compiler
