"""The demo's target: a small Qwen3 model pretrained on one GPU in minutes.

Rows of 2,048 tokens are cut at random places from the corpus, all of which is on the GPU. Muon
trains the hidden matrices, AdamW the embeddings and norms; the rate warms up, holds, and falls
linearly to zero. With `--minutes` the number of steps follows from the speed measured early on.
"""

import json
import lzma
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

END = 0  # <|endoftext|>
LENGTH = 2_048  # tokens of a row
RATE = 3e-3  # for both optimizers: Muon's updates are scaled to the size of AdamW's
WARMUP = 100  # steps
DECAY = 0.5  # share of the steps, at the end
CLIP = 1.0  # largest norm of the gradient
MEASURED = (20, 60)  # steps between which the speed is measured: compiled and warm
VALIDATED = 512  # most rows of the validation split
MARGIN = 12.0  # seconds that --minutes keeps for validating and saving

KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

Loss = Callable[[Tensor], Tensor]


@dataclass
class Run:
    """The record of a training run; becomes pretrain.json."""

    device: str
    parameters: int
    rows: int
    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    tokens_per_second: float = 0.0
    train_loss: list[tuple[int, float]] = field(default_factory=list)  # step, nats per token
    val_loss: list[tuple[int, float]] = field(default_factory=list)


def architecture() -> Qwen3Config:
    """About 15M parameters, the tied embedding counted once."""
    return Qwen3Config(
        vocab_size=4_096,
        hidden_size=320,
        intermediate_size=896,
        num_hidden_layers=12,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        rms_norm_eps=1e-6,
        attention_bias=False,
        use_sliding_window=False,
        tie_word_embeddings=True,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        attn_implementation="sdpa",
    )


def load_tokens(data: Path, split: str, device: torch.device) -> Tensor:
    """A split's ids [N], int16: they are below 4,096, and torch cannot index uint16 tensors."""
    plain = data / f"{split}.bin"
    if plain.exists():
        content = plain.read_bytes()
    else:
        content = lzma.decompress(plain.with_suffix(".bin.xz").read_bytes())
    return torch.from_numpy(np.frombuffer(content, dtype="<i2").copy()).to(device)


def random_rows(tokens: Tensor, rows: int, generator: torch.Generator) -> Tensor:
    """[rows, LENGTH + 1] ids, cut anywhere: each position predicts the next."""
    last = len(tokens) - LENGTH
    starts = torch.randint(last, (rows, 1), device=tokens.device, generator=generator)
    return tokens[starts + torch.arange(LENGTH + 1, device=tokens.device)].long()


def fixed_rows(tokens: Tensor, rows: int) -> Iterator[Tensor]:
    """The split's first VALIDATED rows, consecutive, in full batches of `rows`."""
    count = min(VALIDATED, (len(tokens) - 1) // LENGTH)
    starts = torch.arange(count, device=tokens.device)[:, None] * LENGTH
    for batch in starts[: max(rows, count // rows * rows)].split(rows):
        yield tokens[batch + torch.arange(LENGTH + 1, device=tokens.device)].long()


def loss_of(model: Qwen3ForCausalLM) -> Loss:
    """Mean cross-entropy of rows [B, LENGTH + 1], in nats per token."""

    def loss(rows: Tensor) -> Tensor:
        with torch.autocast(rows.device.type, torch.bfloat16):
            # The residual stream takes the embedding's dtype: in bf16 it moves half the bytes.
            embedded = model.model.embed_tokens(rows[:, :-1]).to(torch.bfloat16)
            # With an explicit None no mask is built, so SDPA runs its causal flash kernel.
            hidden = model.model(
                inputs_embeds=embedded, attention_mask={"full_attention": None}, use_cache=False
            ).last_hidden_state
            logits = model.lm_head(hidden)
        return cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    return loss


def optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    chosen = set(matrices)
    others = [p for p in model.parameters() if p not in chosen]
    muon = torch.optim.Muon(
        matrices, lr=RATE, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    return [muon, adamw]


def rate_share(step: int, steps: int) -> float:
    """The learning rate at a step, as a share of RATE: warm up, hold, fall to zero."""
    left = (steps - step) / max(1.0, DECAY * steps)
    return min(1.0, (step + 1) / WARMUP, left)


def update(loss: Loss, rows: Tensor, model: Qwen3ForCausalLM, learners: list) -> Tensor:
    """One step of both optimizers; the loss stays on the device."""
    value = loss(rows)
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for learner in learners:
        learner.step()
        learner.zero_grad(set_to_none=True)
    return value.detach()


@torch.no_grad()
def validate(loss: Loss, tokens: Tensor, rows: int) -> float:
    """Mean loss over the fixed rows, in nats per token."""
    return torch.stack([loss(batch) for batch in fixed_rows(tokens, rows)]).mean().item()


def clock(device: torch.device) -> float:
    """Seconds, read once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def save(model: Qwen3ForCausalLM, run: Run, tokenizer: Path, out: Path) -> None:
    """A bf16 copy of the model, its tokenizer and the run's record."""
    out.mkdir(parents=True, exist_ok=True)
    copy = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        bos_token_id=END, eos_token_id=END, pad_token_id=END, do_sample=False
    )
    copy.save_pretrained(out)
    for file in sorted(tokenizer.iterdir()):
        shutil.copyfile(file, out / file.name)
    (out / "pretrain.json").write_text(json.dumps(asdict(run), indent=1) + "\n")


@dataclass
class Plan:
    """How many steps to take: as given, or as many as fit the minutes once the speed is known."""

    steps: int
    minutes: float | None
    begun: float  # seconds, by clock()
    measured_from: float = 0.0

    def observe(self, step: int, device: torch.device) -> None:
        """Measure the speed between the two MEASURED steps, and derive the number of steps."""
        if step == MEASURED[0]:
            self.measured_from = clock(device)
        if step != MEASURED[1]:
            return
        now = clock(device)
        pace = (now - self.measured_from) / (MEASURED[1] - MEASURED[0])
        if self.minutes is not None:
            left = self.begun + 60 * self.minutes - MARGIN - now
            self.steps = step + max(1, int(left / pace))
        print(f"{1e3 * pace:.1f} ms a step, {self.steps} steps planned", flush=True)


def report(run: Run, plan: Plan, window: list[Tensor], device: torch.device) -> None:
    """Record and print the mean loss of the steps since the last report."""
    run.train_loss.append((run.steps, torch.stack(window).mean().item()))
    window.clear()
    run.seconds = clock(device) - plan.begun
    speed = run.tokens / run.seconds
    loss = run.train_loss[-1][1]
    print(
        f"step {run.steps}/{plan.steps}  loss {loss:.4f}  {run.tokens / 1e6:.0f}M tokens"
        f"  {run.seconds:.0f} s  {speed / 1e6:.3f}M tokens/s since the start",
        flush=True,
    )


def learn(
    model: Qwen3ForCausalLM, loss: Loss, data: dict[str, Tensor], run: Run, plan: Plan, every: int
) -> None:
    """The training loop; its results are `run` and the model's weights."""
    tokens = data["train"]
    generator = torch.Generator(tokens.device).manual_seed(0)
    learners = optimizers(model)
    window: list[Tensor] = []
    while run.steps < plan.steps:
        for group in (group for learner in learners for group in learner.param_groups):
            group["lr"] = RATE * rate_share(run.steps, plan.steps)
        window.append(update(loss, random_rows(tokens, run.rows, generator), model, learners))
        run.steps += 1
        run.tokens += run.rows * LENGTH
        plan.observe(run.steps, tokens.device)
        last = run.steps == plan.steps
        if last or run.steps % every == 0:
            report(run, plan, window, tokens.device)
        if last or run.steps % (10 * every) == 0:
            run.val_loss.append((run.steps, validate(loss, data["val"], run.rows)))
            print(f"validation loss {run.val_loss[-1][1]:.4f}", flush=True)


def main(
    data: Annotated[Path, typer.Option(help="Folder of train.bin and val.bin, or their .xz.")],
    tokenizer: Annotated[Path, typer.Option(help="Folder of the tokenizer.")],
    out: Annotated[Path, typer.Option(help="Folder for the model.")],
    steps: Annotated[int, typer.Option(help="Optimizer steps, unless --minutes is given.")] = 4_000,
    minutes: Annotated[float | None, typer.Option(help="Time for the whole run.")] = None,
    rows: Annotated[int, typer.Option(help="Rows of 2,048 tokens in a step.")] = 128,
    every: Annotated[int, typer.Option(help="Steps between reports; 10 times that, checks.")] = 50,
    attention: Annotated[str, typer.Option(help="SDPA's kernel: flash or cudnn.")] = "flash",
    compiled: Annotated[bool, typer.Option(help="Compile the loss.")] = True,
) -> None:
    """Pretrain the demo's target and save it."""
    begun = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(architecture()).to(device)
    splits = {split: load_tokens(data, split, device) for split in ("train", "val")}
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    run = Run(name, sum(p.numel() for p in model.parameters()), rows)
    size = len(splits["train"]) / 1e6
    print(f"{run.parameters / 1e6:.1f}M parameters, {size:.1f}M tokens, {name}", flush=True)
    loss = torch.compile(loss_of(model), dynamic=False) if compiled else loss_of(model)
    with sdpa_kernel(KERNELS[attention]):
        learn(model, loss, splits, run, Plan(steps, minutes, begun), every)
    run.tokens_per_second = run.tokens / run.seconds
    save(model, run, tokenizer, out)
    print(f"saved after {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    typer.run(main)
