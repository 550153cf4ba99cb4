"""Invariant 4: a drafter gives the same drafts here and in vLLM, count for count.

Drafters are trained only partly: one that accepts nothing, or everything, would hide a wrong mask,
position or vocabulary. vLLM runs in an environment of its own (`make test-vllm`).
"""

import dataclasses
import json
import os
import random
import subprocess
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tiny
from plain_drafter import plain_drafter

from peagle.bench.prompts import load_prompts
from peagle.config import SamplingParams
from peagle.drafters.kind import KIND_OF_METHOD, KINDS
from peagle.drafters.methods import drafter_for, load_network
from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.models.tokenizer import load_tokenizer
from peagle.models.weights import WHOLE, read_tensors, save_tensors
from peagle.pair import bundled
from peagle.speculative_config import SpeculativeConfig
from peagle.train import initial
from peagle.train.prepare import prepare
from peagle.train.recipe import Recipe

pytestmark = pytest.mark.vllm
HERE = Path(__file__).parent
PYTHON = Path(os.environ.get("PEAGLE_VLLM_PYTHON", HERE.parents[1] / ".venv-vllm/bin/python"))
AT_ONCE = 2
"""Trainings, and processes of vLLM."""
PROMPTS, MAX_TOKENS = 6, 48
ENGINE = {"max_model_len": 256, "max_num_seqs": 3, "max_num_batched_tokens": 512}
"""Requests join while others decode. No prompt is cut into chunks: behind each chunk but the last
the drafter of vLLM 0.32 reads the prompt's last token in place of its next one."""
SIZES = {"head_dim": 32, "layer_std": 0.12}
"""vLLM has no attention on a CPU for smaller heads."""
ROPE = {
    "qwen3": {"rope_type": "yarn"},
    "llama": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
FULL, REDUCED = tiny.VOCAB, 64


@dataclass(frozen=True)
class Case:
    """A drafter to train for a tiny target, and the K that it runs at."""

    target: str
    method: str
    qk_norm: bool
    draft_vocab: int
    layers: int
    k: int
    norms: tuple[str, ...] = ()
    """Optional norms of the drafter."""
    window: int | None = None
    """The window of each draft layer."""

    @property
    def name(self) -> str:
        style = "qwen3" if self.qk_norm else "llama"
        seen = "" if self.window is None else f"-w{self.window}"
        return f"{self.method}-{style}-v{self.draft_vocab}-k{self.k}{seen}-for-{self.target}"


CASES = [
    Case("qwen3", "peagle", qk_norm=True, draft_vocab=FULL, layers=2, k=3),
    Case("qwen3", "peagle", qk_norm=False, draft_vocab=REDUCED, layers=4, k=5),
    Case("llama", "peagle", qk_norm=False, draft_vocab=FULL, layers=2, k=7),
    Case("llama", "peagle", True, REDUCED, 1, 7, ("norm_before_fc", "norm_before_residual")),
    Case("qwen3", "eagle3", qk_norm=True, draft_vocab=REDUCED, layers=1, k=5),
    Case("llama", "eagle3", qk_norm=False, draft_vocab=FULL, layers=1, k=3),
    Case("qwen3", "eagle3", False, FULL, 1, 7, ("fc_norm", "norm_output")),
    Case("qwen3", "peagle", qk_norm=True, draft_vocab=FULL, layers=2, k=5, window=8),
    Case("qwen3", "eagle3", qk_norm=True, draft_vocab=FULL, layers=1, k=5, window=8),
    Case("llama", "peagle", qk_norm=False, draft_vocab=REDUCED, layers=2, k=5, window=8),
    Case("qwen3", "dflash", qk_norm=True, draft_vocab=FULL, layers=2, k=7),
    Case("qwen3", "dflash", qk_norm=True, draft_vocab=FULL, layers=1, k=4, window=8),
]
BUNDLED = {"peagle": 7, "eagle3": 5}
"""K of the bundled pair's drafters."""
TRIALS = [*(case.name for case in CASES), *(f"bundled-{method}" for method in BUNDLED)]


@dataclass(frozen=True)
class Subject:
    """A target and prompts for it."""

    target: Path
    prompts: list[list[int]]

    @property
    def batches(self) -> list[list[list[int]]]:
        """One prompt alone, then the others together."""
        return [self.prompts[:1], self.prompts[1:]]


@dataclass(frozen=True)
class Trial:
    """What both engines run."""

    subject: Subject
    speculation: dict[str, Any]
    """The configuration that both are given."""

    @classmethod
    def of(cls, subject: Subject, drafter: Path, method: str, k: int) -> "Trial":
        """vLLM calls P-EAGLE eagle3 too."""
        kind = KIND_OF_METHOD[method]
        asked = {"method": "dflash"}
        if kind in KINDS:
            asked = {"method": "eagle3", "parallel_drafting": kind.parallel_drafting}
        return cls(subject, {**asked, "model": str(drafter), "num_speculative_tokens": k})


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trial]:
    root = tmp_path_factory.mktemp("trials")
    subjects = {family: subject(root / family, family) for family in ROPE}
    chosen, places = [subjects[case.target] for case in CASES], [root / c.name for c in CASES]
    with ProcessPoolExecutor(AT_ONCE, get_context("spawn")) as pool:
        list(pool.map(train, CASES, chosen, places))
    made = {
        case.name: Trial.of(target, place, case.method, case.k)
        for case, target, place in zip(CASES, chosen, places, strict=True)
    }
    pair = bundled_subject()
    for method, k in BUNDLED.items():
        made[f"bundled-{method}"] = Trial.of(pair, plain_drafter(method, root), method, k)
    return made


@pytest.fixture(scope="module")
def theirs(
    trials: dict[str, Trial], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What vLLM makes of every trial, in a process for each share of them."""

    def made(share: int) -> dict[str, dict[str, Any]]:
        names, place = TRIALS[share::AT_ONCE], tmp_path_factory.mktemp("vllm")
        job, result, log = (place / name for name in ("job.json", "result.json", "log.txt"))
        job.write_text(json.dumps([vllm_job(trials[name]) for name in names]))
        with log.open("w") as lines:
            command = [PYTHON, HERE / "engine_side.py", job, result]
            done = subprocess.run(command, stdout=lines, stderr=subprocess.STDOUT)
        assert done.returncode == 0, f"vLLM failed:\n{log.read_text()[-5000:]}"
        return dict(zip(names, json.loads(result.read_text()), strict=True))

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {
            name: done for share in pool.map(made, range(AT_ONCE)) for name, done in share.items()
        }


@pytest.fixture(scope="module", autouse=True)
def _vllm_is_there() -> None:
    assert PYTHON.exists(), f"{PYTHON} is missing; run these tests by `make test-vllm`"


@pytest.mark.parametrize("name", TRIALS)
def test_counts_equal_vllms(
    name: str, trials: dict[str, Trial], theirs: dict[str, dict[str, Any]]
) -> None:
    trial, expected = trials[name], theirs[name]
    ours = run(trial)
    done = [request.speculation for request in ours]
    cycles, accepted = (sum(getattr(d, part) for d in done) for part in ("cycles", "accepted"))
    per_position = [sum(p) for p in zip(*(d.accepted_per_position for d in done), strict=True)]
    acceptance_length = 1 + accepted / cycles
    print(f"{name}: AL {acceptance_length:.2f}, {cycles} cycles, accepted {per_position}")

    assert tiny.outputs(ours) == expected["outputs"]
    assert [d.accepted_per_cycle for d in done] == expected["accepted_per_cycle"]
    assert per_position == expected["accepted_per_position"]
    assert cycles == expected["cycles"]
    assert accepted == expected["accepted"]
    assert sum(d.drafted for d in done) == expected["drafted"]
    assert 1.5 < acceptance_length < len(per_position), "this drafter would hide a mistake"
    assert min(per_position) > 0, "this drafter would hide a mistake in its last drafts"


def subject(directory: Path, family: str) -> Subject:
    """A random target; its prompts are those whose greedy answers repeat themselves least.

    The answers lie beside it as training data.
    """
    rope = {"rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    tiny.save_target(directory, family, rope_parameters={**rope, **ROPE[family]}, **SIZES)
    engine = Engine(tiny.load_target(directory), None, 0, tiny.engine_config())
    draw = random.Random(3)
    candidates = [
        [draw.randrange(1, tiny.MASK) for _ in range(draw.randrange(4, 48))] for _ in range(48)
    ]
    answered = tiny.run(engine, candidates, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    usable = [request for request in answered if tiny.MASK not in request.tokens]
    varied = sorted(usable, key=lambda request: -len(set(request.output)))[:PROMPTS]
    pairs = [(request.tokens[: request.prompt_length], request.output) for request in varied]
    held_out = pairs[0]
    lines = (
        json.dumps({"prompt_token_ids": prompt, "token_ids": answer})
        for prompt, answer in [*pairs, held_out]
    )
    (directory / "answers.jsonl").write_text("\n".join(lines))
    return Subject(directory, [prompt for prompt, _ in pairs])


def bundled_subject() -> Subject:
    tokenizer = load_tokenizer(bundled("target"))
    return Subject(
        bundled("target"), [p.token_ids(tokenizer) for p in load_prompts("bundled", PROMPTS)]
    )


def train(case: Case, subject: Subject, output: Path) -> None:
    """Train a drafter for a few seconds on the target's own greedy text."""
    recipe = Recipe(
        target=str(subject.target),
        data=(str(subject.target / "answers.jsonl"),),
        output=str(output),
        method=case.method,
        mask_token_id=None if case.method == "eagle3" else tiny.MASK,
        taps=tiny.TAPS,
        qk_norm=None if case.method == "dflash" else case.qk_norm,
        anchors=16 if case.method == "dflash" else 512,
        draft_vocab_size=case.draft_vocab,
        num_hidden_layers=case.layers,
        num_speculative_tokens=case.k,
        row_length=96,
        rows_per_step=PROMPTS,
        rows_per_pass=PROMPTS,
        steps=60,
        warmup_steps=5,
        evaluate_every=60,
        optimizer="muon",
        learning_rate=3e-2,
        validation_documents=1,
        device="cpu",
    )
    plain = initial.drafter_config

    def of_case(*args: Any) -> Any:
        config = dataclasses.replace(plain(*args), **dict.fromkeys(case.norms, True))
        heads = dataclasses.replace(config.layer.attention, window=case.window)
        layers = (dataclasses.replace(config.layer, mixer=heads),) * case.layers
        shape = dataclasses.replace(config.transformer, layers=layers)
        return dataclasses.replace(config, transformer=shape)

    with mock.patch.object(initial, "drafter_config", of_case):
        prepare(recipe).run(lambda report: None)
    if case.method == "dflash":
        tie_key_norms(output)


def tie_key_norms(head: Path) -> None:
    """Give all layers the first one's norm of keys: vLLM takes it for all of them on a CPU."""
    tensors = read_tensors(head)
    norms = sorted(name for name in tensors if name.endswith("k_norm.weight"))
    save_tensors(head / WHOLE, tensors | {name: tensors[norms[0]].clone() for name in norms})


def vllm_job(trial: Trial) -> dict[str, Any]:
    """What `engine_side.py` is to run."""
    return {
        "target": str(trial.subject.target),
        "speculative_config": trial.speculation,
        "engine": ENGINE,
        "max_tokens": MAX_TOKENS,
        "batches": trial.subject.batches,
    }


def run(trial: Trial) -> list[Request]:
    """Our engine on the same batches, greedy, in float32."""
    target = tiny.load_target(trial.subject.target)
    asked = SpeculativeConfig(**trial.speculation)
    drafter = drafter_for(load_network(asked, trial.subject.target, target))
    config = tiny.engine_config(**ENGINE, kv_cache_memory=1 << 26, enable_prefix_caching=False)
    engine = Engine(target, drafter, asked.num_speculative_tokens, config)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    return [
        request for batch in trial.subject.batches for request in tiny.run(engine, batch, params)
    ]
