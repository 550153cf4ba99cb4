"""The work of a benchmark of models: their prompts, and how answers are sampled."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from peagle.bench.case import Case, Setup
from peagle.bench.load import Exchange
from peagle.bench.pair import Pair
from peagle.bench.prompts import Prompt
from peagle.bench.target import SharedTarget, of_setup
from peagle.config import EngineConfig, SamplingParams
from peagle.llm import LLM

SEED = 0
"""The seed of the first request, where none is given; the next ones count up."""


@dataclass(frozen=True)
class PromptWorkload:
    """The same models, prompts and lengths of outputs for every case."""

    pair: Pair
    sets: Mapping[str, tuple[Prompt, ...]]
    """The prompts of each data set, by its name."""
    sampling: SamplingParams
    """The settings of every request; temperature and K are its case's, stop texts its prompt's."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How the engines compute; their sizes follow from the cases."""

    def requests(self, case: Case, tokenizer: Any) -> list[Exchange]:
        """All prompts of the case's data set."""
        return [
            self._request(prompt, self.params(case, index, prompt), tokenizer)
            for index, prompt in enumerate(self.sets[case.data])
        ]

    def params(self, case: Case, index: int, prompt: Prompt) -> SamplingParams:
        """How the answer to a prompt is sampled: with its own seed, which no method changes.

        A prompt that says where its answer ends may also end with the text.
        """
        return sampled(self.sampling, case, index, prompt).model_copy(
            update={"num_speculative_tokens": case.k}
        )

    def _request(self, prompt: Prompt, params: SamplingParams, tokenizer: Any) -> Exchange:
        def then(answer: str) -> Exchange | None:
            follows = prompt.after(answer)
            return None if follows is None else self._request(follows, params, tokenizer)

        longest = len(prompt.with_all_turns().token_ids(tokenizer)) if prompt.later else 0
        return Exchange(prompt.token_ids(tokenizer), params, then, 1 + len(prompt.later), longest)

    def place(self, case: Case, index: int) -> str:
        """The prompt's file and line."""
        return self.sets[case.data][index].place

    def load(self, setups: Iterable[Setup]) -> None:
        """Load the target, and the drafters of all methods that run."""
        for setup in setups:
            speculation = self.pair.speculation(setup.method, setup.k)
            if speculation is not None and speculation.has_network:
                self._target.network(speculation)
        _ = self._target

    def open(self, setup: Setup, concurrency: int, shared: bool = False) -> LLM:
        """The engine, over weights of the target that all share."""
        config = of_setup(self.engine, setup, concurrency)
        speculation = self.pair.speculation(setup.method, setup.k)
        return self._target.llm(speculation, config, self._longest if shared else None)

    @cached_property
    def _target(self) -> SharedTarget:
        return SharedTarget(self.pair.target, self.engine)

    @cached_property
    def _longest(self) -> int:
        """Tokens of the longest request, its answers included."""
        cases = [Case("none", 0, 1, data=name) for name in self.sets]
        tokenizer = self._target.tokenizer
        return max(one.most_tokens for case in cases for one in self.requests(case, tokenizer))


def sampled(sampling: SamplingParams, case: Case, index: int, prompt: Prompt) -> SamplingParams:
    """The sampling of one request of a case."""
    seed = SEED if sampling.seed is None else sampling.seed
    return sampling.model_copy(
        update={
            "temperature": case.temperature,
            "seed": seed + index,
            "stop": prompt.stop,
            "ignore_eos": sampling.ignore_eos and not prompt.stop,
        }
    )
