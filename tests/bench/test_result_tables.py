import dataclasses
import io
import math

from rich.console import Console

from peagle.bench.case import Case
from peagle.bench.measures import Measures, Percentiles
from peagle.bench.runs import Run
from peagle.bench.tables import full_table, run_line, summary_table, varying_text, verdict_sentence
from peagle.bench.verdict import Ranking, Ratio, speed_up

TIMES = Percentiles(10.0, 20.0, 30.0)


def run(method, k, concurrency, otps, same_text=True):
    found = Measures(otps, 2.5, (0.9, 0.6)[:k], TIMES, TIMES, TIMES, 128)
    return Run(Case(method, k, concurrency), found, ((1, 2),), same_text, rounds=(otps,))


RUNS = [
    run("none", 0, 1, 100.0),
    run("none", 0, 4, 300.0),
    run("peagle", 2, 1, 250.0),
    run("peagle", 2, 4, 450.0, same_text=False),
]


def printed(table, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_speed_is_compared_at_the_same_concurrency():
    assert [speed_up(run, RUNS).median for run in RUNS] == [1.0, 1.0, 2.5, 1.5]
    assert speed_up(RUNS[3], [RUNS[0], RUNS[3]]) is None


def test_tables_are_plain_text_within_80_columns():
    text = printed(full_table(RUNS))
    assert "\x1b" not in text
    assert "…" not in text
    row = next(line for line in text.splitlines() if "450.0" in line).split()
    assert row == ["P-EAGLE", "4", "2", "450.0", "1.50x", "2.50", "10.0", "10.0", "10.0", "no"]
    assert text.count("p50") == 3


def test_columns_say_what_differs_between_cases():
    def columns(**changes):
        other = dataclasses.replace(RUNS[3], case=dataclasses.replace(RUNS[3].case, **changes))
        table = full_table([RUNS[2], other])
        headers = [str(column.header) for column in table.columns]
        return headers[: headers.index("tokens/s")], list(table.columns[2].cells)

    assert columns(draft_length="auto") == (["method", "C", "K"], ["2", "≤2"])
    assert columns(data="HumanEval")[0] == ["method", "C", "K", "prompts"]
    assert columns(temperature=0.7)[0] == ["method", "C", "K", "T"]


def test_a_server_keeps_its_name_even_if_it_is_a_methods():
    server = dataclasses.replace(RUNS[2], case=Case("peagle", None, 1))
    assert "P-EAGLE" not in printed(full_table([server]))
    other = dataclasses.replace(server, case=Case("vllm", None, 1))
    sentence = verdict_sentence(Ranking(server, other, Ratio(2.0, 1.9, 2.1)))
    assert sentence.startswith("Fastest on this machine: peagle, 2.00 times as fast as vllm")


def test_what_a_server_does_not_tell_is_left_open():
    found = dataclasses.replace(RUNS[0].measures, acceptance_length=None)
    server = Run(Case("ours", None, 0, request_rate=2.0), found, (), rounds=(100.0,))
    table = full_table([server])
    assert [column.header for column in table.columns[:3]] == ["method", "C", "tokens/s"]
    row = next(line for line in printed(table).splitlines() if "100.0" in line).split()
    assert row == ["ours", "2/s", "100.0", "1.00x", "-", "10.0", "10.0", "10.0", "-"]
    assert run_line(server, 3) == "round 3, ours, 2/s requests, bundled: 100.0 tokens/s"


ROUNDS = [
    dataclasses.replace(RUNS[0], rounds=(100.0,) * 6),
    dataclasses.replace(RUNS[2], rounds=(240.0, 250.0, 250.0, 250.0, 260.0, 260.0)),
]


def test_the_summary_has_a_row_a_method_with_the_interval_of_its_speed_up():
    table = summary_table(ROUNDS)
    lines = printed(table, width=60).splitlines()
    assert max(map(len, lines)) <= 60
    rows = [line.split() for line in lines]
    assert ["none", "-", "100.0", "1.00x", "2.50", "yes"] in rows
    assert ["P-EAGLE", "2", "250.0", "2.50x", "(2.40-2.60)", "2.50", "yes"] in rows


def test_a_summary_of_few_rounds_has_no_interval():
    rows = [line.split() for line in printed(summary_table(RUNS[::2])).splitlines()]
    assert ["P-EAGLE", "2", "250.0", "2.50x", "2.50", "yes"] in rows
    unknown = [dataclasses.replace(RUNS[2], same_text=None)]
    assert printed(summary_table(unknown)).split()[-6:] == [
        "P-EAGLE",
        "2",
        "250.0",
        "-",
        "2.50",
        "-",
    ]


def test_the_sentence_names_the_fastest_only_where_it_is_clear():
    none, peagle = ROUNDS
    clear = Ranking(peagle, none, Ratio(2.5, 2.4, 2.6))
    assert verdict_sentence(clear) == (
        "Fastest on this machine: P-EAGLE at K = 2, 2.50 times as fast as no speculation "
        "(2.40-2.60)."
    )
    assert verdict_sentence(Ranking(peagle, none, Ratio(1.03, 0.98, 1.09))) == (
        "No clear winner on this machine: P-EAGLE at K = 2 may be 0.98 to 1.09 times as fast as no "
        "speculation."
    )
    assert verdict_sentence(Ranking(peagle, none, Ratio(2.5, 0.0, math.inf))) == (
        "No clear winner on this machine: P-EAGLE at K = 2 was 2.50 times as fast as no "
        "speculation, in too few rounds to say so."
    )
    assert verdict_sentence(Ranking(peagle, none, Ratio(0.99, 0.0, math.inf))) == (
        "No clear winner on this machine: P-EAGLE at K = 2 was as fast as no speculation, in too "
        "few rounds to say so."
    )


def test_of_a_reference_that_varies_the_others_cannot_be_the_same():
    runs = [dataclasses.replace(one, same_text=False) for one in RUNS]
    told = [line.split()[-1] for line in printed(full_table(runs)).splitlines() if ".5" in line]
    assert told == ["varies", "varies", "no", "no"]
    assert varying_text(runs).startswith("no speculation wrote different text in different rounds")
    assert varying_text(RUNS) == ""


def test_tokens_per_cycle_stand_beside_the_acceptance_length_where_they_differ():
    drafted, found = RUNS[2], RUNS[2].measures
    lines = [
        run_line(dataclasses.replace(drafted, measures=each), 1)
        for each in (
            dataclasses.replace(found, tokens_per_cycle=found.acceptance_length),
            dataclasses.replace(found, tokens_per_cycle=1.25),
        )
    ]
    assert [line.partition("AL ")[2] for line in lines] == ["2.50", "2.50 (1.25 a cycle)"]
