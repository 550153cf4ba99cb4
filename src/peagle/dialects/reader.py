"""Reader: token ids -> the events of one answer, as they arrive."""

from collections.abc import Iterable, Iterator, Sequence

from peagle.detokenizer import Detokenizer
from peagle.dialects.events import CallBegin, CallEvent, Content, Event, Message, joined
from peagle.dialects.markers import Markers, SpelledMarkers
from peagle.dialects.parser import Parser, Section
from peagle.stop_strings import StopStrings


class Reader:
    """Reads one answer; never shows half a character or half a stop string.

    Markers are found by their ids, so that a user's or a model's text that looks like one stays
    text. Stop strings are looked for in the content. A stream and a whole answer are the same fold
    of the same events, however the tokens come.

    parser, detokenizer: both at the end of the prompt.
    stops: what looks for stop strings; None where there are none.
    min_tokens: tokens before which no stop string counts.
    most_calls: those after it are left out; None is no limit.
    each: whether to read token by token, so that `sections` is exact where sections are told by
    text alone. With stop strings it always does, since the first to be whole counts.
    """

    def __init__(
        self,
        parser: Parser,
        markers: Markers,
        detokenizer: Detokenizer,
        stops: StopStrings | None = None,
        min_tokens: int = 0,
        most_calls: int | None = None,
        each: bool = False,
    ) -> None:
        self._parser, self._markers, self._detokenizer = parser, markers, detokenizer
        self._spelled = SpelledMarkers(markers.spelled)
        self._stops, self._least = stops, min_tokens
        self._each = each or stops is not None
        self._most_calls = most_calls
        self._count = 0
        """Tokens read so far."""
        self._calls = 0
        self._surplus = False
        """Whether the newest call is one too many."""
        self._events: list[Event] = []
        self._told = 0
        """How many events `fresh` has returned."""
        self.sections: list[Section] = []
        """The section that each token belongs to."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the content."""
        return None if self._stops is None else self._stops.found

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the content."""
        return self.stop_string is not None

    @property
    def events(self) -> tuple[Event, ...]:
        """All events so far, neighbours of a kind in one."""
        return tuple(joined(self._events))

    @property
    def message(self) -> Message:
        """What the events say."""
        message = Message()
        for event in self.events:
            message.add(event)
        return message

    @property
    def cut(self) -> bool:
        """Whether a call has begun and is not complete."""
        return not all(call.complete for call in self.message.calls)

    def extend(self, tokens: Sequence[int]) -> int | None:
        """Read tokens; return how many of them complete a stop string, else None.

        The content then ends at that string.
        """
        if not self._each:
            self._read(tokens)
            return None
        for count, token in enumerate(tokens, start=1):
            self._read([token])
            if self.stopped:
                return count
        return None

    def finish(self, ended: bool) -> None:
        """Read the answer's end: what was held back is said.

        ended: whether the model ended the answer, rather than a limit or a stop string.
        """
        if not self.stopped:
            self._flush()
            self._say(self._parser.finish(ended))
        if self._stops is not None and not self.stopped:
            self._add(Content(self._stops.release()))

    def fresh(self) -> tuple[Event, ...]:
        """The events since the last call."""
        new = self._events[self._told :]
        self._told += len(new)
        return tuple(joined(new) if len(new) > 1 else new)

    def skip(self, tokens: int) -> None:
        """Count tokens that are not read: an end of text belongs to what it ends."""
        self.sections += [self._parser.section] * tokens

    def _read(self, tokens: Sequence[int]) -> None:
        """Read tokens; what follows a stop string says nothing."""
        if self._markers.ids.keys().isdisjoint(tokens):
            self._read_text(tokens)
            return
        start = 0
        for place, token in enumerate(tokens):
            if token in self._markers.ids:
                self._read_text(tokens[start:place])
                self._read_marker(token)
                start = place + 1
        self._read_text(tokens[start:])

    def _read_text(self, tokens: Sequence[int]) -> None:
        """Read tokens without markers among them."""
        if tokens:
            self._count += len(tokens)
            self._say(self._text(self._detokenizer.feed(tokens)))
            self.sections += [self._parser.section] * len(tokens)

    def _read_marker(self, token: int) -> None:
        self._count += 1
        self._flush()
        # bytes before a marker become no character with those behind it
        self._detokenizer.skip(token)
        self._say(self._parser.marker(self._markers.ids[token]))
        self.sections.append("marker")

    def _flush(self) -> None:
        """Say the text that was held back, since it ends here."""
        self._say(self._text(self._detokenizer.flush()))
        self._say(self._parser.text(self._spelled.release()))

    def _text(self, text: str) -> Iterator[Event]:
        """The events of text, which may spell markers."""
        for part, name in self._spelled.feed(text):
            yield from self._parser.text(part)
            if name is not None:
                yield from self._parser.marker(name)

    def _say(self, events: Iterable[Event]) -> None:
        for event in events:
            if self._stops is None:
                self._add(event)
            elif self._stops.found is not None:
                continue  # to the end, which leaves the parser in order
            elif isinstance(event, Content):
                # the newest token completes the text, so that it decides whether a string counts
                counts = self._count > self._least
                self._add(Content(self._stops.feed(event.text, counts)))
            else:
                # a stop string does not reach across thoughts or calls
                self._add(Content(self._stops.release()))
                self._add(event)

    def _add(self, event: Event) -> None:
        if isinstance(event, Content):
            if event.text:
                self._events.append(event)
            return
        if isinstance(event, CallBegin):
            # what is too much is read all the same: the parser has to know where it ends
            self._surplus = self._calls == self._most_calls
            self._calls += not self._surplus
        if not (isinstance(event, CallEvent) and self._surplus):
            self._events.append(event)
