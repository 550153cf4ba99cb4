"""The page of results: required and measured figures, the machine, and every run."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from peers import Peer

from peagle.bench.load import Run
from peagle.bench.pair import NAMES
from peagle.bench.report import ratio_text, verdict_sentence
from peagle.bench.verdict import compare, doubts, judge


@dataclass(frozen=True)
class Figure:
    """One line of the table of figures."""

    name: str
    asked: str
    measured: str


def render(
    facts: Mapping[str, Any], figures: Sequence[Figure], runs: Sequence[Run], peers: Sequence[Peer]
) -> str:
    """The page as Markdown."""
    versions = facts["versions"] | {peer.name.split()[0]: peer.version for peer in peers}
    asked = _table(("figure", "asked, at least", "measured"), map(astuple, figures))
    measured = _table(
        ("engine", "K", "tokens/s", "speed-up", "AL", "identical to none"),
        _runs(runs, peers, runs[0]),
    )
    return f"""# Speculation on a CPU, {facts["date"][:10]}

{facts["cpu"]}, {facts["cores"]} cores, {facts["threads"]} threads; Python {facts["python"]}, \
{", ".join(f"{name} {number}" for name, number in versions.items())}.

{facts["dtype"]}, greedy, end of text ignored, one request at a time; the first \
{facts["prompts"]} prompts of {facts["prompt_file"]}, {facts["max_tokens"]} new tokens each; \
medians of {facts["rounds"]} rounds in turns, speed-ups with 95 % intervals. \
Target {facts["target"]}, drafters {" and ".join(facts["drafters"].values())}.

{" ".join([verdict_sentence(judge(runs)), *(f"Doubtful: {doubt}." for doubt in doubts(runs))])}

{asked}
{measured}"""


def _runs(runs: Sequence[Run], peers: Sequence[Peer], none: Run) -> Iterator[tuple[str, ...]]:
    for run in runs:
        same = sum(map(tuple.__eq__, run.outputs, none.outputs))
        length = f"{run.measures.acceptance_length:.2f}"
        otps, ratio = f"{run.measures.otps:.1f}", ratio_text(compare(run, none))
        k = str(run.case.k or "-")
        yield f"peagle, {NAMES[run.case.method]}", k, otps, ratio, length, str(same)
    for peer in peers:
        otps, ratio = f"{peer.otps:.1f}", f"{peer.otps / none.measures.otps:.2f}x"
        yield peer.name, str(peer.k or "-"), otps, ratio, "-", str(peer.identical_prompts)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
