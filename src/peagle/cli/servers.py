"""The flags of `peagle bench --url`: servers in place of models."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from peagle.cli.groups import Flags, Positive, Several
from peagle.cli.measurement import Benchmark
from peagle.config import SamplingParams
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.bench.case import Grid
    from peagle.bench.prompts import Prompt


class Servers(Flags):
    """The flags as given."""

    url: list[str] = []
    """Measure a running server of OpenAI's API, URL or NAME=URL; repeatable. Default: none: an
    engine in this process"""
    request_rate: Several[Positive] = ()
    """With --url: requests a second at random times, one or several: 2,8. Default: --concurrency
    requests in flight"""

    def model_post_init(self, _: Any) -> None:
        if self.request_rate and not self.url:
            raise InputError("--request-rate needs --url")

    def benchmark(
        self,
        model: str | None,
        sets: "Mapping[str, tuple[Prompt, ...]]",
        grid: "Grid",
        sampling: SamplingParams,
        rounds: int,
    ) -> Benchmark:
        """What is measured. Raises `InputError` for a server that does not answer."""
        from peagle.bench.environment import machine, work
        from peagle.bench.server_case import find_servers, run_servers
        from peagle.bench.workload import sampled

        if tuple(grid.draft_lengths) != ("fixed",):
            raise InputError("a server chooses its own draft length; leave out --draft-length")
        named = self._named()
        servers = find_servers(list(named.items()), model)
        cases = grid.servers(list(named), self.request_rate)
        asked = {
            case: [(one, sampled(sampling, case, n, one)) for n, one in enumerate(sets[case.data])]
            for case in cases
        }
        facts = [{"name": s.name, "model": s.model, "version": s.version} for s in servers]
        return Benchmark(
            cases,
            rounds,
            partial(run_servers, servers, cases, asked.__getitem__),
            machine() | {"servers": facts} | work(sets, sampling),
            sum(len(sets[case.data]) for case in cases),
            comparable=all(temperature == 0.0 for temperature in grid.temperatures),
        )

    def _named(self) -> dict[str, str]:
        """URLs by the names of their servers: those given, else the URL's host and port."""
        named: dict[str, str] = {}
        for given in self.url:
            name, found, url = given.partition("=")
            if not found or "/" in name:
                name, url = given.partition("://")[2].rstrip("/").removesuffix("/v1"), given
            if name in named:
                raise InputError(f"--url {given}: two servers are called {name}; give NAME=URL")
            named[name or given] = url
        return named
