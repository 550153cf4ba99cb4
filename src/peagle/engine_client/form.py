"""What an output must keep to, as plain data: a request carries it to wherever the engine is."""

from dataclasses import dataclass

from peagle.token_rules import ThoughtSpan


@dataclass(frozen=True, eq=False)
class Form:
    """One request's form, of which the engine makes its constraint.

    grammar: the source, `StructuredOutputs` as JSON. allowed: the only tokens that may come; None:
    all. endings: sequences of tokens whose last may not come after the others. thoughts: where they
    are, and most of their tokens.
    """

    grammar: str | None = None
    allowed: tuple[int, ...] | None = None
    endings: tuple[tuple[int, ...], ...] = ()
    thoughts: tuple[ThoughtSpan, int] | None = None

    @property
    def has_rules(self) -> bool:
        """Whether single tokens are ruled out."""
        return self.allowed is not None or bool(self.endings)
