"""Constraints made of what a request carries."""

from unittest import mock

import pytest
from chat_templates import byte_tokenizer

from peagle.config import StructuredOutputs
from peagle.engine_client.constraints import Constraints
from peagle.engine_client.form import Form
from peagle.errors import InputError
from peagle.grammar import written
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
    assert isinstance(constraints.make(Form(grammar(regex="a"))), GrammarConstraint)
    assert isinstance(constraints.make(Form(allowed=(5,))), TokenRules)
    assert isinstance(constraints.make(Form(grammar(regex="a"), endings=((5,),))), TokenRules)


def test_one_that_was_compiled_ahead_is_not_compiled_again(constraints: Constraints):
    """Nor is its place in the grammar shared."""
    form, compile_one = Form(grammar(regex="ab")), GrammarCompiler._matcher
    [token] = byte_tokenizer(None).encode("a", add_special_tokens=False)
    with mock.patch.object(
        GrammarCompiler, "_matcher", autospec=True, side_effect=compile_one
    ) as compiled:
        made = [constraints.make(form) for _ in range(3)]
        first = made[0].allowed(()).clone()
        made[0].advance([token])
    assert compiled.call_count == 1
    assert made[1].allowed(()).equal(first)
    assert not made[0].allowed(()).equal(first)


def test_an_impossible_one_is_refused(constraints: Constraints):
    with pytest.raises(InputError, match="structured outputs"):
        constraints.make(Form(grammar(regex="[")))
    with pytest.raises(InputError, match="names its end of text"):
        Constraints(byte_tokenizer(None), 8, ()).make(Form(grammar(regex="a")))
