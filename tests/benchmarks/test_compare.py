"""The comparison without a GPU: its orchestration and its report."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peagle.bench.shapes import SHAPES, shape_of
from peagle.errors import InputError
from peagle.models.families import read_values
from peers.config_json import config_json
from peers.processes import choices, routing_of, target_in
from peers.processes import run as run_command
from peers.trials import Match, Trial, Work, at_once, bench_flags, peer_job, schedule, trials
from records.store import read

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
PEAGLE, EAGLE3 = Match("qwen3-8b", "peagle", 7, 3.94), Match("qwen3-8b", "eagle3", 3, 2.6)
NONE = Match("tiny", "none", 0, 1.0)
TINY_RUN = ["--concurrency", "1", "--prompt-tokens", "4", "--max-tokens", "4"]
TINY_RUN += ["--dtype", "float32"]
FAKE = """#!{python}
import json, pathlib, sys, time
if sys.argv[1] == "-c":
    sys.exit(0)  # asked whether it finds vLLM
assert sys.argv[1:3] == ["-m", "peers.vllm_side"]
job = json.load(open(sys.argv[3]))
runs = [dict(concurrency=c, rounds=[1.0, 2.0, 3.0]) for c in job["concurrencies"]]
about = dict(versions=dict(vllm="0.0"), start_seconds=3.5, resolved=dict(runner="V2"))
found = dict(environment=about, runs=runs)
if job["gate"]:
    gate = pathlib.Path(job["gate"])
    (gate / "ready").touch()
    while not (gate / "open").exists():
        time.sleep(0.01)
{then}
json.dump(found, open(sys.argv[4], "w"))
"""
pytestmark = pytest.mark.usefixtures("forked")


def fake_vllm(directory: Path, then: str = "") -> str:
    """An interpreter that answers in vLLM's place."""
    path = directory / "python"
    path.write_text(FAKE.format(python=sys.executable, then=then))
    path.chmod(0o755)
    return str(path)


def compare(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / "compare.py"), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)


class TestMatches:
    def test_names(self):
        assert Match.parse("qwen3-8b:peagle") == PEAGLE
        assert Match.parse("tiny:eagle3:5:2.5") == Match("tiny", "eagle3", 5, 2.5)
        for wrong in ("qwen3-8b", "qwen3-8b:tree", "tiny:peagle:7", "tiny:peagle:x:y", "none:none"):
            with pytest.raises(InputError):
                Match.parse(wrong)

    def test_vllm_runs_again_where_its_drafter_leaves_the_graphs(self):
        """P-EAGLE's 2K rows per request exceed 512 at 37 requests and K = 7."""
        levels = (1, 36, 37, 64)
        first = Trial("vllm", PEAGLE, levels)
        assert trials("vllm", PEAGLE, levels) == [first, Trial("vllm", PEAGLE, (37, 64), 896)]
        assert trials("vllm", EAGLE3, levels) == [Trial("vllm", EAGLE3, levels)]
        assert trials("vllm", NONE, (1, 1024)) == [Trial("vllm", NONE, (1, 1024))]

    def test_vllm_runs_with_each_backend_of_experts(self):
        mixture = Match("gpt-oss-20b", "peagle", 7, 3.94)
        found = trials("vllm", mixture, (1, 64), [None, "marlin"])
        settings = [(one.moe_backend, one.captured) for one in found]
        assert settings == [(None, None), (None, 896), ("marlin", None), ("marlin", 896)]
        assert len(trials("vllm", PEAGLE, (1,), [None, "marlin"])) == 1
        assert len(trials("peagle", mixture, (1,), [None, "marlin"])) == 1

    def test_vllm_s_processes_that_start_at_once_are_one_a_match(self):
        planned = [*schedule([PEAGLE, NONE], (1, 64), ["peagle", "vllm"])]
        found = at_once(planned, (1, 64))
        assert found == [Trial("vllm", PEAGLE, (1, 64), 896), Trial("vllm", NONE, (1, 64))]

    def test_ours_runs_again_where_fewer_drafts_may_be_faster(self):
        first = Trial("peagle", PEAGLE, (1, 8, 64))
        again = Trial("peagle", PEAGLE, (8, 64), draft_length="auto")
        assert trials("peagle", PEAGLE, (1, 8, 64)) == [first, again]
        assert trials("peagle", PEAGLE, (1,)) == [Trial("peagle", PEAGLE, (1,))]
        assert trials("peagle", NONE, (64,)) == [Trial("peagle", NONE, (64,))]

    def test_sides_take_turns_to_begin(self):
        order = [each.side for each in schedule([NONE, EAGLE3, NONE], (1,), ["peagle", "vllm"])]
        assert order == ["peagle", "vllm", "vllm", "peagle", "peagle", "vllm"]
        assert [each.side for each in schedule([NONE] * 2, (1,), ["vllm"])] == ["vllm"] * 2

    def test_our_command(self):
        flags = " ".join(bench_flags(Trial("peagle", PEAGLE, (1, 8)), Work(), "r.json"))
        assert flags == (
            "bench --shape qwen3-8b --random-weights --synthetic-acceptance 3.94 --methods peagle "
            "--k 7 --draft-length fixed --concurrency 1,8 --prompt-tokens 256 --max-tokens 512 "
            "--rounds 3 --dtype bfloat16 --json r.json"
        )
        read = bench_flags(Trial("peagle", PEAGLE, (1,)), Work(), "r.json", Path("target"))
        assert read[-2:] == ["--checkpoint", "target"]
        assert "--k" not in bench_flags(Trial("peagle", NONE, (1,)), Work(), "r.json")

    def test_vllm_s_job_is_the_same_work(self):
        job = peer_job(Trial("vllm", PEAGLE, (1, 128), 896), Work())
        assert (job.captured, job.max_model_len) == (896, 4096)
        assert (job.max_num_seqs, job.rounds, job.warm_up_tokens) == (128, 3, 16)
        assert (job.prompt_tokens, job.max_tokens, job.k) == (256, 512, 7)
        assert 1 + sum(job.acceptance_rates) == pytest.approx(3.94)
        prefill = peer_job(Trial("vllm", NONE, (1,)), Work(prompt_tokens=8192, max_tokens=1))
        assert prefill.max_model_len == 8192 + prefill.warm_up_tokens

    @pytest.mark.parametrize("name", SHAPES)
    def test_vllm_s_target_has_the_shape(self, name: str):
        shape = shape_of(name)
        values = config_json(shape.target, "bfloat16", shape.weights.quantization)
        assert read_values(values, "written")[1] == shape.target


class TestProcesses:
    def test_a_hanging_one_is_ended_with_its_children(self, tmp_path: Path):
        mark = tmp_path / "mark"
        hang = (
            "import os, time; print('begun', flush=True)\n"
            f"if not os.fork(): time.sleep(4); open({str(mark)!r}, 'w')\n"
            "time.sleep(600)"
        )
        ended = run_command([sys.executable, "-c", hang], os.environ, 3.0)
        assert ended.failure == "not done after 3 s\nbegun"
        time.sleep(2.0)
        assert not mark.exists()

    def test_what_vllm_says_that_it_chose(self):
        log = (
            "(Main pid=7) INFO 11-26 04:16:37 [mxfp4.py:352] Using 'TRITON' Mxfp4 MoE backend.\n"
            "INFO 11-26 04:16:37 [__init__.py:760] Selected SomeKernel for Fp8LinearMethod\n"
            "INFO 11-26 04:16:38 [loader.py:12] Loading weights took 3 seconds\n"
            "Using none of vLLM's loggers\n"
            "INFO 11-26 04:16:39 [mxfp4.py:352] Using 'TRITON' Mxfp4 MoE backend.\n"
            "INFO 11-26 04:16:40 [backends.py:9] Using cache directory: /home/me/.cache/vllm\n"
            "INFO 11-26 04:16:41 [cuda.py:3] Using fp8 data type to store kv cache.\n"
        )
        chosen = ["Using 'TRITON' Mxfp4 MoE backend.", "Selected SomeKernel for Fp8LinearMethod"]
        chosen += ["Using fp8 data type to store kv cache."]
        assert choices(log) == chosen

    def test_failures_say_why(self):
        ended = run_command([sys.executable, "-c", "print('oh'); exit(3)"], os.environ, 30)
        assert (ended.failure, ended.log) == ("exit status 3\noh", "oh\n")
        assert "cannot be started" in run_command(["no such program"], os.environ, 30).failure
        assert run_command([sys.executable, "-c", ""], os.environ, 30).failure is None


class TestCompare:
    def test_both_sides_are_one_result_with_a_report(self, tmp_path: Path):
        out = tmp_path / "out"
        page = str(out / "report" / "report.md")
        vllm = fake_vllm(tmp_path, f"assert 'vLLM: ' not in open({page!r}).read()  # there so far")
        given = ["--matches", "tiny:peagle:2:1.5", "--vllm-python", vllm, "--out", out]
        done = compare(*given, "--engine-args", '{"seed": 3}', *TINY_RUN)
        assert done.returncode == 0, done.stderr
        found = read(out / "result.json")
        assert [(each.side, each.failure) for each in found.processes] == [
            ("peagle", None),
            ("vllm", None),
        ]
        assert (found.processes[1].start_seconds, found.processes[1].resolved["runner"]) == (
            3.5,
            "V2",
        )
        ours, theirs = found.runs
        assert (ours.side, theirs.side, theirs.rounds) == ("peagle", "vllm", (1.0, 2.0, 3.0))
        assert 1.0 < ours.acceptance_length <= 3.0  # in two cycles; random weights give 1
        assert (ours.given_acceptance, theirs.given_acceptance) == (1.5, 1.5)
        assert found.versions["vllm"] == {"vllm": "0.0"}
        assert found.setting["vllm"] == {"seed": 3}
        assert found.command.startswith("python ")
        assert "vLLM: P-EAGLE, AL 1.5" in done.stdout
        assert "SYNTHETIC" in done.stdout
        assert "| vLLM: P-EAGLE, AL 1.5, K = 2 | 2.0 · 1.00x |" in Path(page).read_text()

    def test_vllm_s_processes_start_at_once_and_take_turns(self, tmp_path: Path):
        log = tmp_path / "log"
        work = f"log = open({str(log)!r}, 'a'); print(job['method'], file=log, flush=True); "
        work += "time.sleep(0.3); print('done', file=log)"
        given = ["--matches", "tiny:none,tiny:eagle3:2:1.5", "--together", *TINY_RUN]
        given += ["--vllm-python", fake_vllm(tmp_path, work), "--out", tmp_path / "out"]
        done = compare(*given)
        assert done.returncode == 0, done.stderr
        assert log.read_text().split() == ["none", "done", "eagle3", "done"]
        found = read(tmp_path / "out" / "result.json")
        sides = [(one.side, one.method, one.failure) for one in found.processes]
        assert sides == [
            *(("vllm", "none", None), ("vllm", "eagle3", None)),
            *(("peagle", "none", None), ("peagle", "eagle3", None)),
        ]
        assert found.setting["vLLM's processes"] == "started at once"

    def test_one_that_does_not_start_is_not_waited_for(self, tmp_path: Path):
        broken = fake_vllm(tmp_path)
        text = Path(broken).read_text().replace('if job["gate"]:', "sys.exit('oh')\nif 1:")
        Path(broken).write_text(text)
        given = ["--matches", "tiny:none", "--together", "--only", "vllm", *TINY_RUN]
        done = compare(*given, "--vllm-python", broken, "--out", tmp_path / "out")
        assert done.returncode == 1
        [only] = read(tmp_path / "out" / "result.json").processes
        assert only.failure == "exit status 1\noh"

    def test_one_that_is_late_is_ended_before_another_measures(self, tmp_path: Path):
        late = fake_vllm(tmp_path)
        slow = "if job['method'] == 'none': time.sleep(60)\nif job[\"gate\"]:"
        Path(late).write_text(Path(late).read_text().replace('if job["gate"]:', slow))
        given = ["--matches", "tiny:none,tiny:eagle3:2:1.5", "--together", "--only", "vllm"]
        done = compare(*given, "--timeout", 4, *TINY_RUN, "--vllm-python", late, "--out", tmp_path)
        assert done.returncode == 0, done.stderr
        first, second = read(tmp_path / "result.json").processes
        assert (first.failure, second.failure) == ("not ready after 4 s", None)

    def test_both_sides_read_one_checkpoint(self, tmp_path: Path):
        look = "assert json.load(open(job['checkpoint'] + '/config.json'))['hidden_size'] == 64; "
        look += "print('INFO 01-02 03:04:05 [mxfp4.py:3] Using \\'MARLIN\\' Mxfp4 MoE backend.')"
        given = ["--matches", "tiny:none", "--vllm-python", fake_vllm(tmp_path, look)]
        given += ["--checkpoints", tmp_path / "targets", "--routing", "half"]
        done = compare(*given, "--out", tmp_path / "out", *TINY_RUN)
        assert done.returncode == 0, done.stderr
        found = read(tmp_path / "out" / "result.json")
        assert [one.failure for one in found.processes] == [None] * 2
        assert (found.setting["checkpoint"], found.setting["routing"]) == (True, "half")
        assert found.processes[1].chosen == ("Using 'MARLIN' Mxfp4 MoE backend.",)
        [pair] = (tmp_path / "targets").iterdir()
        assert (pair.name, [file.name for file in pair.iterdir()]) == ("tiny-half", ["target"])
        again = target_in(tmp_path / "targets", "tiny", Work(routing="half"), timeout=0.0)
        assert again == pair / "target"  # it is there
        assert [routing_of(name, Work()) for name in ("tiny", "gpt-oss-20b")] == [None, "half"]

    @pytest.mark.parametrize("how", [["gpt-oss-20b:none"], ["qwen3-8b:none", "--routing", "half"]])
    def test_dummy_weights_are_not_compared_with_others(self, how: list[str], tmp_path: Path):
        done = compare("--out", tmp_path, "--matches", *how)
        assert done.returncode == 1
        assert "unlike vLLM's dummy ones, so both sides have to read them" in done.stderr
        assert not [*tmp_path.iterdir()]

    def test_a_target_that_cannot_be_written(self, tmp_path: Path):
        with pytest.raises(InputError, match="the target of tiny was not written: not done after"):
            target_in(tmp_path, "tiny", Work(), timeout=0.1)
        assert not [*tmp_path.iterdir()]

    @pytest.mark.parametrize(
        ("then", "seconds", "failure"),
        [
            ("sys.exit('out of memory')", 60, "exit status 1\nout of memory"),
            ("time.sleep(60)", 2, "not done after 2 s"),
        ],
    )
    def test_a_peer_that_ends_badly_stops_nothing(
        self, then: str, seconds: int, failure: str, tmp_path: Path
    ):
        how = ["--only", "vllm", "--timeout", seconds, "--vllm-python", fake_vllm(tmp_path, then)]
        given = ["--matches", "tiny:none,tiny:eagle3", "--out", tmp_path]
        done = compare(*given, *TINY_RUN, *how)
        assert done.returncode == 1  # nothing was measured
        found = read(tmp_path / "result.json")
        assert [each.failure for each in found.processes] == [failure] * 2
        assert not found.runs
        assert done.stdout.count(f"1 in flight, tiny failed: {failure}\n") == 2
        assert [file.name for file in tmp_path.glob("*.*")] == ["result.json"]

    def test_without_vllm_ours_runs_alone(self, tmp_path: Path):
        given = ["--matches", "tiny:none", "--out", tmp_path, *TINY_RUN]
        done = compare(*given, "--vllm-python", tmp_path / "nothing")
        assert done.returncode == 0, done.stderr
        assert "finds no vLLM: it is left out" in done.stderr
        [only] = read(tmp_path / "result.json").processes
        assert (only.side, only.failure) == ("peagle", None)

    def test_a_real_size_needs_a_gpu(self, tmp_path: Path):
        out = tmp_path / "out"
        done = compare("--out", out, "--matches", "tiny:none,qwen3-8b:peagle")
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert line.startswith("compare.py: shape qwen3-8b needs a GPU, and torch sees none")
        assert not out.exists()

    def test_earlier_results_are_kept(self, tmp_path: Path):
        (tmp_path / "result.json").write_text("kept")
        given = ["--matches", "tiny:none", "--out", tmp_path, "--only", "peagle", *TINY_RUN]
        done = compare(*given)
        assert done.returncode == 1
        assert "result.json exists; give another name, or --force" in done.stderr
        assert (tmp_path / "result.json").read_text() == "kept"
        assert compare(*given, "--force").returncode == 0

    def test_an_unknown_shape_is_refused(self, tmp_path: Path):
        done = compare("--out", tmp_path, "--matches", "huge:none")
        assert done.returncode == 1
        assert done.stderr.startswith("compare.py: shape huge is not known")
