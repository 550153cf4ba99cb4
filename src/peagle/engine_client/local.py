"""An engine in this process."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from peagle.config import SamplingParams
from peagle.engine.engine import Engine, EngineStats
from peagle.engine.request import RequestOutput
from peagle.engine_client.client import EngineClient
from peagle.engine_client.constraints import Constraints
from peagle.engine_client.form import Form
from peagle.engine_client.watchdog import Watchdog


class LocalEngine(EngineClient):
    """`core` and the constraints of its requests, whose grammars are for a tokenizer."""

    in_process = True

    def __init__(self, core: Engine, tokenizer: Any) -> None:
        super().__init__(core.facts)
        self.core = core
        self.constraints = Constraints(tokenizer, self.vocab_size, self.end_tokens)
        self._watchdog: Watchdog | None = None

    @property
    def stats(self) -> EngineStats:
        return self.core.stats

    @property
    def step_age(self) -> float:
        began = self.core.began
        return 0.0 if began is None else time.monotonic() - began

    def watch(self, give_up: Callable[[], object]) -> None:
        self._watchdog = Watchdog(self.core, give_up)
        self._watchdog.start()

    def compile(self, form: Form) -> None:
        self.constraints.make(form)

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, form: Form | None
    ) -> int:
        constraint = None if form is None else self.constraints.make(form)
        self.core.add(request_id, prompt, params, constraint)
        return 0

    def abort(self, request_id: str, reason: str = "abort") -> None:
        self.core.abort(request_id, reason)

    def step(self) -> list[RequestOutput]:
        return self.core.step()

    def wake(self) -> None:
        """Nothing: its steps wait for nobody."""

    def kill(self) -> None:
        """Nothing: nothing runs elsewhere."""

    def close(self) -> None:
        """Watch no more; the engine ends with its last reference."""
        if self._watchdog is not None:
            self._watchdog.stop()
