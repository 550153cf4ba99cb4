"""An engine in this process."""

from collections.abc import Sequence

from peagle.config import SamplingParams
from peagle.engine.engine import Engine, EngineStats
from peagle.engine.request import RequestOutput
from peagle.engine_client.client import EngineClient
from peagle.engine_client.constraints import Constraints
from peagle.engine_client.form import Form


class LocalEngine(EngineClient):
    """`core` and the constraints of its requests."""

    in_process = True

    def __init__(self, core: Engine, constraints: Constraints) -> None:
        super().__init__(core.facts)
        self.core, self.constraints = core, constraints

    @property
    def busy(self) -> bool:
        return self.core.busy

    @property
    def stats(self) -> EngineStats:
        return self.core.stats

    def build_grammars(self) -> None:
        self.constraints.build()

    def compile(self, form: Form) -> None:
        self.constraints.compile(form)

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, form: Form | None
    ) -> None:
        constraint = None if form is None else self.constraints.take(form)
        self.core.add(request_id, prompt, params, constraint)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        self.core.abort(request_id, reason)

    def step(self) -> list[RequestOutput]:
        return self.core.step()

    def wake(self) -> None:
        """Nothing: its steps wait for nobody."""

    def close(self) -> None:
        """Nothing: it ends with its last reference."""
