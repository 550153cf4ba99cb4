"""A tiny target that writes what it is told to, and a drafter that is right four times in five.

Only logits and drafts are made up; masks, sampling, acceptance, readers and HTTP are the real ones.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import tiny
import torch
from families import FAMILIES, encode, tokenizer
from torch import Tensor

from peagle import LLM
from peagle.config import EngineConfig
from peagle.drafters.methods import drafter_for
from peagle.drafters.model import DraftModel
from peagle.drafters.proposer import Drafter
from peagle.engine.engine import Engine
from peagle.engine.host.proposals import HostProposerRows
from peagle.engine.host.rows import RequestRows
from peagle.engine.host.sampler import choose
from peagle.engine.logits_processor import LogitsProcessor
from peagle.ops.draft import Draft

K = 7


@dataclass
class Script:
    """What the target writes after its prompt; then it ends its answer."""

    tokens: Sequence[int] = ()
    end: int = 0
    start: int = 0
    """The prompt's length."""

    def at(self, position: int) -> int:
        """The token at a position of the whole sequence."""
        place = position - self.start
        return self.tokens[place] if 0 <= place < len(self.tokens) else self.end

    def choose(
        self,
        logits: Tensor,
        work: Sequence[RequestRows],
        drafts: Tensor,
        processor: LogitsProcessor,
        depths: None,
    ) -> Tensor:
        """In place of the sampler's: the same with the script's tokens as the likeliest."""
        places = [len(item.request.tokens) + i for item in work for i in range(item.drafts + 1)]
        self.start = work[0].request.prompt_length
        wanted = torch.full_like(logits, -50.0)
        wanted[torch.arange(len(places)), torch.tensor([self.at(place) for place in places])] = 50.0
        return choose(wanted, work, drafts, processor)


class ScriptedDrafter(Drafter):
    """Drafts the script's tokens, each fifth of them wrong."""

    def __init__(self, model: DraftModel, script: Script) -> None:
        super().__init__(model)
        self._real, self._script = drafter_for(model), script

    def propose(self, rows: HostProposerRows) -> Draft:
        """Drafts as the real one makes, so that its cache is filled, with other tokens."""
        draft = self._real.propose(rows)
        firsts = [span.start + span.count + 1 for span in rows.known.spans]
        places = [range(first, first + rows.drafts) for first in firsts]
        wanted = [[self._script.at(p) if p % 5 else 0 for p in own] for own in places]
        return Draft(torch.tensor(wanted, dtype=draft.tokens.dtype))


def scripted_llm(
    name: str, directory: Path, listed: Sequence[str] | None = None
) -> tuple[LLM, Script]:
    """A tiny engine over a family's tokenizer, and what decides its words.

    listed: the end tokens of the target's configuration; None: the family's.
    """
    own = tokenizer(name)
    size = len(own)
    ends = [own.convert_tokens_to_ids(end) for end in listed or FAMILIES[name].ends]
    target = tiny.load_target(tiny.save_target(directory, vocab_size=size, eos_token_id=ends[0]))
    config = tiny.drafter_config(True, vocab_size=size, draft_vocab=size)
    script = Script(end=ends[-1])
    drafter = ScriptedDrafter(tiny.random_drafter(config), script)
    config = EngineConfig(dtype="float32", max_num_seqs=4, draft_length="fixed")
    engine = Engine(target, drafter, K, config, ends)
    return LLM.over(engine, own), script


@contextmanager
def writing(script: Script, name: str, text: str) -> Iterator[None]:
    """Let the target write a text."""
    script.tokens = encode(name, text)
    with mock.patch("peagle.engine.host.batch.choose", script.choose):
        yield
