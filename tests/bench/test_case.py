from peagle.bench.case import Case, Grid, Setup


def test_a_grid_is_every_combination_with_none_first_and_without_a_k():
    assert Grid([1, 4]).cases(["peagle", "none"], {"peagle": [3, 5]}) == [
        Case("none", 0, 1),
        Case("peagle", 3, 1),
        Case("peagle", 5, 1),
        Case("none", 0, 4),
        Case("peagle", 3, 4),
        Case("peagle", 5, 4),
    ]


def test_prompts_temperatures_and_draft_lengths_are_part_of_it():
    grid = Grid([1], ["a", "b"], [0.0, 0.7], ["fixed", "auto"])
    cases = grid.cases(["none", "eagle3"], {"eagle3": [3]})
    assert len(cases) == len(set(cases)) == 2 * 2 * 3
    assert [(case.label, case.load.words) for case in cases[3:6]] == [
        ("no speculation", "1 in flight, a, temperature 0.7"),
        ("EAGLE-3, K = 3", "1 in flight, a, temperature 0.7"),
        ("EAGLE-3, K ≤ 3", "1 in flight, a, temperature 0.7"),
    ]


def test_beside_other_engines_each_case_names_its_own():
    none, drafted = Case("none", 0, 1, engine="vLLM"), Case("peagle", 7, 1, engine="peagle")
    assert (none.label, drafted.label) == ("vLLM: no speculation", "peagle: P-EAGLE, K = 7")
    assert (none.is_peer, drafted.is_peer, Case("none", 0, 1).is_peer) == (True, False, False)


def test_servers_run_under_every_load():
    names = ["ours", "theirs"]
    cases = Grid([1, 8]).servers(names, [])
    assert [(case.method, case.load.shown) for case in cases] == [
        ("ours", "1"),
        ("theirs", "1"),
        ("ours", "8"),
        ("theirs", "8"),
    ]
    assert all(case.is_server and case.label == case.method for case in cases)
    rated = Grid([1, 8]).servers(names, [2.5])
    assert [case.load.shown for case in rated] == ["2.5/s", "2.5/s"]
    assert rated[0].load.words == "2.5/s requests, bundled"


def test_cases_that_differ_in_their_load_only_share_an_engine():
    one, other = Grid([1, 8]).cases(["peagle"], {"peagle": [7]})
    assert one.setup == other.setup == Setup("peagle", 7, "fixed")
    assert one.load != other.load
