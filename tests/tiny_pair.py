"""A tiny target with a real tokenizer, and a drafter of each kind: what the commands work on."""

from dataclasses import dataclass
from pathlib import Path

from tiny import drafter_config, save_random_drafter, save_target
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

VOCAB, MASK = 300, 1
SAMPLE = ["def name(self, value):\n    return value\n", "for item in items:\n    print(item)\n"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class TinyPair:
    target: Path
    eagle3: Path
    peagle: Path


def save_pair(directory: Path) -> TinyPair:
    """Untrained models, so hardly a draft is accepted: speed is not what tests look at."""
    target = save_target(directory / "target", vocab_size=VOCAB, max_position_embeddings=512)
    save_tokenizer(target)
    sizes = {"vocab_size": VOCAB, "draft_vocab": VOCAB}
    return TinyPair(
        target,
        save_random_drafter(directory / "eagle3", drafter_config(parallel=False, **sizes)),
        save_random_drafter(
            directory / "peagle", drafter_config(parallel=True, **sizes, mask_token_id=MASK)
        ),
    )


def save_tokenizer(directory: Path) -> None:
    """Byte-level BPE, so that any text and any token have a counterpart."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|mask|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SAMPLE, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
