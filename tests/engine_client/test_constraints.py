"""Constraints made of what a request carries."""

from unittest import mock

import pytest
from chat_templates import byte_tokenizer

from peagle.config import StructuredOutputs
from peagle.engine_client.constraints import Constraints
from peagle.engine_client.form import Form, written
from peagle.errors import InputError
from peagle.grammar_compiler import GrammarCompiler, GrammarConstraint
from peagle.token_rules import TokenRules

END = 0


@pytest.fixture
def constraints() -> Constraints:
    tokenizer = byte_tokenizer(None)
    return Constraints(tokenizer, len(tokenizer), (END,))


def grammar(**values) -> str:
    return written(StructuredOutputs(**values))


def test_a_form_without_rules_has_only_its_grammar(constraints: Constraints):
    assert isinstance(constraints.take(Form(grammar(regex="a"))), GrammarConstraint)
    assert isinstance(constraints.take(Form(allowed=(5,))), TokenRules)
    assert isinstance(constraints.take(Form(grammar(regex="a"), endings=((5,),))), TokenRules)


def test_one_that_was_compiled_ahead_is_taken_once(constraints: Constraints):
    """And not compiled again, nor its place in the grammar shared."""
    form = Form(grammar(regex="ab"))
    with mock.patch.object(GrammarCompiler, "compile", autospec=True, side_effect=[1, 2]) as made:
        constraints.compile(form)
        assert (constraints.take(form), made.call_count) == (1, 1)
        assert (constraints.take(form), made.call_count) == (2, 2)


def test_an_impossible_one_is_refused(constraints: Constraints):
    with pytest.raises(InputError, match="structured outputs"):
        constraints.compile(Form(grammar(regex="[")))
    with pytest.raises(InputError, match="names its end of text"):
        Constraints(byte_tokenizer(None), 8, ()).build()
