"""A checkpoint's own head as a drafter: transformers' layer, and the few lines around it."""

import itertools
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_drafts import Recording
from torch import Tensor

from peagle.config import SamplingParams
from peagle.drafters.diagnosis import diagnose_mtp
from peagle.drafters.methods import load_network, proposer_for
from peagle.engine.engine import Engine
from peagle.engine.request import Request
from peagle.errors import InputError
from peagle.speculative_config import SpeculativeConfig

FAMILIES = ["qwen3_5", "qwen3_5_moe"]
PROMPTS = [[(19 * i + j * j) % tiny.MASK for j in range(2 + 11 * i)] for i in range(3)]
PROMPTS.append([*PROMPTS[2][:20], 1, 2, 3])  # a prefix in common


class Plain:
    """The head by the rules: nothing is cached, everything is computed again for every draft."""

    def __init__(self, directory: Path) -> None:
        stored = load_file(directory / "model.safetensors")
        self.peer = tiny.load_peer(directory)
        self.layer = tiny.peer_mtp_layer(self.peer)
        begin = "mtp.layers.0."
        own = {name: value for name, value in stored.items() if name.startswith(begin)}
        self.layer.load_state_dict({name.removeprefix(begin): v for name, v in own.items()})
        self.tensors = stored

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(dim=-1, keepdim=True)
        weight = 1 + self.tensors[f"mtp.{name}.weight"]
        return x / (mean + self.peer.config.rms_norm_eps).sqrt() * weight

    @torch.no_grad()
    def drafts(self, tokens: list[int], k: int) -> list[int]:
        """K drafts after x_0 ... x_n."""
        model, following = self.peer.model, tokens[1:]
        states = model(torch.tensor([tokens[:-1]])).last_hidden_state
        for _ in range(k):
            embedded = model.embed_tokens(torch.tensor([following]))
            both = (
                self.norm(embedded, "pre_fc_norm_embedding"),
                self.norm(states, "pre_fc_norm_hidden"),
            )
            x = torch.cat(both, dim=-1) @ self.tensors["mtp.fc.weight"].T
            positions = torch.arange(len(following))[None]
            x = self.layer(x, model.rotary_emb(x, positions.expand(3, 1, -1)), None)
            last = self.norm(x[:, -1:], "norm")
            following = [*following, int(self.peer.lm_head(last).argmax())]
            states = torch.cat((states, last), dim=1)
        return following[len(tokens) - 1 :]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("targets")
    saved = (tiny.save_target(root / family, family, layer_std=0.05) for family in FAMILIES)
    return dict(zip(FAMILIES, map(tiny.add_mtp, saved), strict=True))


def speculation(k: int) -> SpeculativeConfig:
    return SpeculativeConfig(method="mtp", num_speculative_tokens=k)


def drafter_of(directory: Path, target: Any) -> Any:
    load = partial(load_network, directory=directory, target=target)
    return proposer_for(speculation(4), load, tiny.CPU, tiny.VOCAB)[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("room", [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 1}])
def test_drafts_are_as_designed(directories, tmp_path: Path, family: str, room):
    """In batches, after rejections, behind chunked prompts and on a cached prefix."""
    directory = tiny.add_mtp(shutil.copytree(directories[family], tmp_path / "target"), 0.15)
    target, plain = tiny.load_target(directory), Plain(directory)
    drafter = Recording(drafter_of(directory, target))
    engine = Engine(target, drafter, 4, tiny.engine_config(block_size=4, **room))
    for i, (prompt, k) in enumerate(zip(PROMPTS, (None, 1, 2, 3), strict=True)):
        engine.add(str(i), prompt, SamplingParams(max_tokens=9, num_speculative_tokens=k))
    requests, checked = {}, 0
    while engine.busy:
        engine.step()
        requests |= {r.row: r for r in engine.scheduler.running}
        for row, known, drafts in drafter.proposals:
            assert drafts == plain.drafts(requests[row].tokens[:known], len(drafts))
            checked += len(drafts)
        drafter.proposals.clear()
    assert checked > 20


@dataclass(frozen=True)
class Case:
    """A way in which an engine runs."""

    k: int = 4
    resident: bool = False
    params: tuple[dict[str, Any], ...] = ({},)
    """Of the requests, in turn."""
    config: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    """K of each cycle, where load chooses it."""


CASES = {
    **{f"K = {k}": Case(k) for k in (1, 2, 3)},
    "one by one": Case(config={"max_num_seqs": 1, "block_size": 4}),
    "chunks": Case(config={"max_num_batched_tokens": 5}),
    "sampled": Case(params=({"temperature": 0.9}, {"temperature": 1.2, "top_k": 9}, {})),
    "hosted": Case(params=({"logprobs": 2}, {"logit_bias": {5: 1.0}}, {})),
    "some without drafts": Case(params=({"num_speculative_tokens": 0}, {})),
    "by load": Case(config={"draft_length": "auto"}, lengths=(4, 0, 0, 2, 0, 1)),
}


def run(target: Any, drafter: Any, case: Case) -> list[Request]:
    """Two rounds of the same requests: the second finds their prompts."""
    config = tiny.engine_config(**case.config)
    engine = tiny.engine(target, drafter, case.k if drafter else 0, case.resident, config)
    if drafter and case.lengths:
        engine.scheduler.pace.draft_length = tiny.GivenLengths(case.lengths)
    ways = itertools.cycle(case.params)
    params = [
        SamplingParams(max_tokens=16, seed=i, ignore_eos=True, **next(ways))
        for i in range(len(PROMPTS))
    ]
    return [request for _ in range(2) for request in tiny.run(engine, PROMPTS, params)]


def shown_the_same(directory: Path, case: Case) -> list[Request]:
    """Checks that text is what it is without drafts, of which some are accepted."""
    target = tiny.load_target(directory)
    drafted = run(target, drafter_of(directory, target), case)
    plain = run(target, None, Case(params=case.params))
    assert tiny.outputs(drafted) == tiny.outputs(plain)
    accepted = sum(request.speculation.accepted for request in drafted)
    assert accepted > 20, "nothing is shown where nothing is accepted"
    return drafted


@pytest.mark.sweep
@pytest.mark.parametrize("resident", [False, True], ids=["host", "resident"])
@pytest.mark.parametrize("name", CASES)
def test_text_is_the_same_as_without(directories, name: str, resident: bool):
    shown_the_same(directories["qwen3_5"], replace(CASES[name], resident=resident))


def test_text_of_experts_is_too_and_the_device_drafts_what_the_host_does(directories):
    case = Case(params=CASES["sampled"].params)
    host, device = (
        shown_the_same(directories["qwen3_5_moe"], replace(case, resident=resident))
        for resident in (False, True)
    )
    for one, other in zip(host, device, strict=True):
        assert one.speculation.accepted_per_cycle == other.speculation.accepted_per_cycle


def without(tensors: dict[str, Tensor], begin: str) -> None:
    for name in [name for name in tensors if name.startswith(begin)]:
        del tensors[name]


REFUSED: dict[str, tuple[dict[str, Any], Callable[[dict[str, Tensor]], object], str]] = {
    "no tensors": ({}, lambda t: without(t, "mtp."), r"its files hold no mtp\.\* tensors"),
    "one missing": ({}, lambda t: without(t, "mtp.fc"), "missing tensors: mtp.fc.weight"),
    "one more": (
        {},
        lambda t: t.update({"mtp.layers.1.mlp.down_proj.weight": t["mtp.fc.weight"].clone()}),
        "unexpected tensors: mtp.layers.1.mlp.down_proj.weight",
    ),
    "NaN": ({}, lambda t: t["mtp.norm.weight"].fill_(torch.nan), "mtp.norm.weight holds NaN"),
    "two layers": ({"mtp_num_hidden_layers": 2}, lambda t: t, "mtp_num_hidden_layers is 2; "),
    "no layers": ({"mtp_num_hidden_layers": 0}, lambda t: t, "mtp_num_hidden_layers is 0; "),
    "embeddings": (
        {"mtp_use_dedicated_embeddings": True},
        lambda t: t,
        "mtp_use_dedicated_embeddings is true: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_is_named_by_check_and_when_it_is_loaded(directories, tmp_path, name):
    values, change, message = REFUSED[name]
    directory = shutil.copytree(directories["qwen3_5"], tmp_path / "target")
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(InputError, match=message):
        drafter_of(directory, tiny.load_target(directory))
    [problem] = diagnose_mtp(directory).problems
    assert re.search(message, problem)


def test_another_family_has_no_head(target):
    with pytest.raises(
        InputError, match="Qwen3ForCausalLM has no head of its own that peagle runs"
    ):
        drafter_of(target.directory, target.decoder)


def test_the_targets_norms_stay_in_float32_and_its_head_is_shared(directories):
    target = tiny.load_target(directories["qwen3_5"], torch.bfloat16)
    model = drafter_of(directories["qwen3_5"], target).model
    assert target.norm.weight.dtype == torch.float32
    assert model.fc.weight.dtype == torch.bfloat16
    assert model.hidden_norm.weight.dtype == model.readout.norm.weight.dtype == torch.float32
    assert (model.embed, model.readout.head) == (target.embed, target.head)
