"""Both drafters, inside the engine, against the rules of both written out plainly.

The reference reads the checkpoint's tensors by vLLM's names and recomputes everything for every
draft: no cache, no batch, no code of ours. The engine's drafts come with a cache, in batches,
after rejections and behind chunked or cached prompts, and must be the same tokens.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import gelu

from peagle.config import SamplingParams
from peagle.drafters.checkpoint import EMBEDDINGS, save_drafter
from peagle.drafters.kind import PEAGLE
from peagle.drafters.methods import drafter_for
from peagle.drafters.model import DrafterConfig
from peagle.drafters.proposer import Drafter
from peagle.engine.engine import Engine
from peagle.engine.host.proposals import HostProposerRows
from peagle.models.spec import LayerSpec, MLPSpec
from peagle.ops.draft import Draft
from peagle.ops.rope import RopeConfig


class Plain:
    """A drafter by the rules, row by row."""

    def __init__(self, directory: Path, config: DrafterConfig) -> None:
        self.tensors = load_file(directory / "model.safetensors")
        self.config, self.heads = config, config.layer.attention

    def drafts(self, tokens: list[int], aux: Tensor, k: int) -> list[int]:
        """K drafts after x_0 ... x_n; aux: [n, taps * hidden] of positions 0 ... n - 1."""
        n = len(tokens) - 1
        following, features = tokens[1:], self.project(aux)
        if self.config.kind is PEAGLE:
            masks = self.project(self.tensors["mask_hidden"].view(1, -1)).expand(k - 1, -1)
            following = following + [self.config.mask_token_id] * (k - 1)
            stream = self.stream(following, torch.cat((features, masks)))
            return [self.best(row) for row in stream[n - 1 :]]
        drafted: list[int] = []
        for _ in range(k):
            last = self.stream(following + drafted, features)[-1]
            drafted.append(self.best(last))
            fed = self.norm(last, "norm") if self.config.norm_output else last
            features = torch.cat((features, fed[None]))
        return drafted

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean = x.square().mean(dim=-1, keepdim=True)
        return x / (mean + self.config.layer.norms.eps).sqrt() * self.tensors[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        return y + self.tensors[f"{name}.bias"] if f"{name}.bias" in self.tensors else y

    def project(self, aux: Tensor) -> Tensor:
        if self.config.norm_before_fc:
            aux = self.norm(aux, "input_norm")
        if self.config.fc_norm:
            chunks = aux.chunk(len(self.config.taps), dim=-1)
            aux = torch.cat([self.norm(c, f"fc_norm.{i}") for i, c in enumerate(chunks)], dim=-1)
        return self.linear(aux, "fc")

    def stream(self, tokens: list[int], features: Tensor) -> Tensor:
        """The residual stream of slots 0, 1, ...: slot p at position p."""
        embedding = self.tensors["embed_tokens.weight"][torch.tensor(tokens)]
        feature = self.norm(features, "layers.0.hidden_norm")
        x = torch.cat((self.norm(embedding, "layers.0.input_layernorm"), feature), dim=-1)
        residual = feature if self.config.norm_before_residual else features
        residual = residual + self.attention(x, 0)
        residual = residual + self.mlp(residual, "layers.0")
        for layer in range(1, len(self.config.transformer.layers)):
            name = f"layers.{layer}"
            x = self.norm(residual, f"{name}.input_layernorm")
            residual = residual + self.attention(x, layer)
            residual = residual + self.mlp(residual, name)
        return residual

    def attention(self, x: Tensor, layer: int) -> Tensor:
        name, slots = f"layers.{layer}.self_attn", len(x)
        q, k, v = (
            self.linear(x, f"{name}.{part}_proj").view(slots, -1, self.heads.head_dim)
            for part in "qkv"
        )
        if self.heads.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k = self.rope(q), self.rope(k)
        shared = self.heads.num_heads // self.heads.num_kv_heads
        k, v = (part.repeat_interleave(shared, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(self.heads.head_dim)
        later = torch.ones(slots, slots, dtype=torch.bool).triu(1)
        window = self.config.transformer.layers[layer].attention.window
        before = torch.ones(slots, slots, dtype=torch.bool).tril(-(window or slots))
        weights = scores.masked_fill(later | before, float("-inf")).softmax(dim=-1)
        return self.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), f"{name}.o_proj")

    def rope(self, x: Tensor) -> Tensor:
        half = self.heads.head_dim // 2
        speeds = self.heads.rope.theta ** (-torch.arange(half) / half)
        angle = torch.outer(torch.arange(len(x)), speeds)[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def mlp(self, residual: Tensor, layer: str) -> Tensor:
        x = self.norm(residual, f"{layer}.post_attention_layernorm")
        gate, up = (self.linear(x, f"{layer}.mlp.{part}_proj") for part in ("gate", "up"))
        gated = gate * gate.sigmoid()
        if self.config.mlp.activation == "gelu_tanh":
            gated = gelu(gate, approximate="tanh")
        return self.linear(gated * up, f"{layer}.mlp.down_proj")

    def best(self, residual: Tensor) -> int:
        token = int(self.linear(self.norm(residual, "norm"), "lm_head").argmax())
        return token + int(self.tensors["d2t"][token]) if "d2t" in self.tensors else token


class Recording(Drafter):
    """A drafter that remembers what it proposed: (request row, known tokens, drafts)."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter.model)
        self._drafter = drafter
        self.proposals: list[tuple[int, int, list[int]]] = []

    def propose(self, rows: HostProposerRows) -> Draft:
        draft = self._drafter.propose(rows)
        for span, own in zip(rows.known.spans, draft.tokens.tolist(), strict=True):
            self.proposals.append((span.row, span.start + span.count + 1, own))
        return draft


GEGLU = MLPSpec(96, activation="gelu_tanh")
BIASED = LayerSpec(replace(tiny.ATTENTION, bias=True, out_bias=True), MLPSpec(96, bias=True))
TURNED = replace(tiny.DRAFT_LAYER, mixer=replace(tiny.ATTENTION, rope=RopeConfig(theta=300.0)))
VARIANTS: dict[str, dict[str, Any]] = {
    "Qwen3-style": {},
    "Llama-style": {"qk_norm": False},
    "one layer": {"layers": 1},
    "three layers": {"layers": 3},
    "reduced vocabulary": {"draft_vocab": 30},
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "fc norm": {"fc_norm": True},
    "norm output": {"norm_output": True},
    "two taps": {"taps": (0, 4)},
    "five taps": {"taps": (0, 1, 2, 3, 4)},
    "windows": {"windows": (4, 4)},
    "a window of few": {"windows": (2,)},
    "windowed and full layers": {"windows": (None, 6, 6), "qk_norm": False},
    "GeGLU": {"layer": replace(tiny.DRAFT_LAYER, feed_forward=GEGLU), "qk_norm": False},
    "biases": {"layer": BIASED},
    "other rope": {"layer": TURNED},
    "all at once": {
        "qk_norm": False,
        "draft_vocab": 50,
        "norm_before_residual": True,
        "fc_norm": True,
        "norm_output": True,
        "taps": (2,),
    },
}
PROMPTS = [[(19 * i + j * j) % tiny.MASK for j in range(2 + 11 * i)] for i in range(3)]
PROMPTS.append([*PROMPTS[2][:20], 1, 2, 3])  # a prefix in common


def assert_as_designed(
    target: Any, directory: Path, config: DrafterConfig, ks: tuple[int | None, ...], **room: Any
) -> list[list[int]]:
    """Generate, then ask the reference for every draft that the engine saw. Returns the drafts."""
    model = tiny.load_drafter(directory, target.decoder)
    drafter = Recording(drafter_for(model))
    engine = Engine(target.decoder, drafter, 5, tiny.engine_config(block_size=4, **room))
    for i, (prompt, k) in enumerate(zip(PROMPTS, ks, strict=True)):
        engine.add(str(i), prompt, SamplingParams(max_tokens=9, num_speculative_tokens=k))
    requests = {}
    reference, checked = Plain(directory, config), []
    stored = load_file(target.directory / "model.safetensors")
    reference.tensors.setdefault(EMBEDDINGS, stored[f"model.{EMBEDDINGS}"])
    while engine.busy:
        engine.step()
        requests |= {r.row: r for r in engine.scheduler.running}
        for row, known, drafts in drafter.proposals:
            request = requests[row]
            tokens = request.tokens[:known]
            aux = features(target.peer, tokens[:-1], config.taps)
            assert drafts == reference.drafts(tokens, aux, len(drafts))
            assert len(drafts) <= request.k
            checked.append(drafts)
        drafter.proposals.clear()
    return checked


@torch.no_grad()
def features(peer: Any, tokens: list[int], taps: tuple[int, ...]) -> Tensor:
    """Transformers' hidden states; its last one is normed, so layer N's comes from a hook."""
    caught: list[Tensor] = []
    hook = peer.model.norm.register_forward_pre_hook(lambda _, args: caught.append(args[0]))
    states = peer(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    hook.remove()
    streams = [*states[:-1], caught[0]]
    return torch.cat([streams[tap][0] for tap in taps], dim=-1)


@pytest.mark.sweep
@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
@pytest.mark.parametrize("name", VARIANTS)
def test_drafts_are_as_designed(target, tmp_path: Path, parallel: bool, name: str):
    config = tiny.drafter_config(parallel, **VARIANTS[name])
    directory = tiny.save_random_drafter(tmp_path / "drafter", config)
    drafts = assert_as_designed(target, directory, config, ks=(None, 0, 1, 3))
    assert {len(d) for d in drafts} == {1, 3, 5}


@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
def test_drafts_beside_a_target_that_scales_its_stream(targets, tmp_path: Path, parallel: bool):
    """Taps are of the stream after each layer's scalar, the first of scaled embeddings; the drafter
    reads the embeddings that it shares unscaled, and its head is not capped."""
    config = tiny.drafter_config(parallel, taps=(0, 2, 4))
    model = tiny.random_drafter(config)
    save_drafter(tmp_path / "drafter", model, torch.float32, shared=frozenset({EMBEDDINGS}))
    drafts = assert_as_designed(targets["gemma4"], tmp_path / "drafter", config, (None, 0, 1, 3))
    assert {len(d) for d in drafts} == {1, 3, 5}


@pytest.mark.sweep
@pytest.mark.parametrize("parallel", [True, False], ids=["peagle", "eagle3"])
@pytest.mark.parametrize("room", [{"max_num_batched_tokens": 7}, {"max_num_seqs": 1}])
def test_drafts_are_as_designed_in_little_room(target, tmp_path: Path, parallel: bool, room):
    """Chunked prompts; one request after another, the last on a cached prefix."""
    config = tiny.drafter_config(parallel)
    directory = tiny.save_random_drafter(tmp_path / "drafter", config)
    assert len(assert_as_designed(target, directory, config, (None,) * 4, **room)) > 20


@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_drafts_are_as_designed_after_acceptance(targets, trained, tmp_path: Path, method: str):
    """A trained drafter, most of whose proposals are accepted."""
    model = trained[method].drafter.model
    directory, config = tmp_path / method, model.config
    save_drafter(directory, model, torch.float32)
    assert assert_as_designed(targets["easy"], directory, config, (None,) * 4)
