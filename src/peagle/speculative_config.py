"""How an engine speculates: vLLM's `--speculative-config`."""

import itertools
import logging
from collections.abc import Set
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field

from peagle.configuration import Config, PositiveInt, parse_json_option
from peagle.errors import ConfigError, InputError

log = logging.getLogger("peagle.config")
METHODS = ("eagle3", "dflash", "mtp", "ngram")
MTP_NAMES = ("mtp", "qwen3_5_mtp")
"""vLLM's names of a target's own head, the newer first."""
PROPOSERS = "peagle.proposers"
"""The group of entry points by which other packages add methods."""
DrafterFormat = Literal["fp8"]
"""What a drafter's weights may be rounded to when they are loaded."""


Method = Annotated[str, AfterValidator(lambda name: "mtp" if name in MTP_NAMES else name)]
AcceptanceRate = Annotated[float, Field(ge=0, le=1)]
MOST_TREE_NODES = 30
"""A row's way from the root is kept in the bits of an int32."""
TREE_NODES = 15
"""On a GPU, where nothing is said: with the newest token 16 rows, which is what tiles have."""
TreeNodes = Annotated[int, Field(ge=0, le=MOST_TREE_NODES)]
LookupLength = Annotated[int, Field(ge=1, le=64)]
IDLE_KEYS = frozenset(Path(__file__).with_name("speculative_idle_keys.txt").read_text().split())
"""Keys of vLLM's `--speculative-config` that change no answer, and have nothing to set here."""
LOOKUP_KEYS = frozenset(("prompt_lookup_min", "prompt_lookup_max"))
SHORTEST_MATCH, LONGEST_MATCH = 3, 16
"""The lengths of a lookup's match, where nothing is said: shorter matches are seldom right, and
longer ones are all right equally often."""


def known_methods() -> tuple[str, ...]:
    """The methods here, and those that other packages add."""
    return *METHODS, *sorted(entry_points(group=PROPOSERS).names)


class SpeculativeConfig(Config):
    """vLLM's `--speculative-config`, same keys: which drafter, how many tokens, one pass or K.

    Method `ngram` has no drafter: drafts are looked up in the request's own text.
    """

    method: Method = "eagle3"
    """eagle3, whichever kind the drafter is of; dflash, which a head's files say, too; mtp, the
    target's own head; ngram; or a proposer of another package, by the name of its entry point."""
    model: str | None = None
    """The drafter's directory or hub id; for eagle3 and dflash, and for mtp where the head is not
    that in the target's files."""
    revision: str | None = None
    """The hub's branch, tag or commit of the drafter."""
    num_speculative_tokens: PositiveInt | None = None
    """K; unset is the K that the drafter was trained for."""
    parallel_drafting: bool | None = None
    """True is P-EAGLE (K tokens in one pass), False is EAGLE-3 (K passes); unset, the
    drafter's files decide."""
    num_tree_nodes: TreeNodes | None = None
    """Drafts of a cycle that branch, in place of K: more than K. On a GPU for few requests at once,
    on a CPU for one. Unset, a GPU has `TREE_NODES` where models allow trees, and a
    CPU none; 0: none. The answer stays the same."""
    quantization: DrafterFormat | None = None
    """fp8: round the drafter's layers and head to FP8 as they are loaded, half the bytes to read.
    The answer stays the same; how often drafts are right may change."""
    prompt_lookup_min: LookupLength | None = None
    """For ngram: fewest tokens that must stand earlier in the text for what followed them to be
    drafted."""
    prompt_lookup_max: LookupLength | None = None
    """For ngram: most tokens that are compared."""
    rejection_sample_method: Literal["standard", "block", "synthetic"] | None = None
    """synthetic: accept drafts at the rates below, whatever the target says. The text means nothing
    then; this is for measuring time."""
    synthetic_acceptance_rates: tuple[AcceptanceRate, ...] | None = None
    """In which share of cycles draft 1, 2, ... K is accepted, none above the one before."""

    def model_post_init(self, _: Any) -> None:
        self._check_synthetic()
        if self.method != "ngram":
            self._leave_out(LOOKUP_KEYS, "drafts without lookups, which are method ngram's")
        if self.method == "mtp":
            alone = {"revision"} if self.model is None else set()
            self._leave_out({"parallel_drafting", "quantization"} | alone, "is the target's own")
        elif self.method == "dflash":
            self._leave_out({"parallel_drafting"}, "has one pass")
        elif self.method != "eagle3":
            self._check_without_drafter()
        if self.model is None and self.method in ("eagle3", "dflash"):
            raise ValueError("model is missing: give the drafter's directory or hub id")
        if self.num_tree_nodes and self.synthetic_acceptance_rates:
            raise ValueError("num_tree_nodes does not go with synthetic acceptance")
        lengths = self.lookup
        if lengths is not None and lengths[0] > lengths[1]:
            raise ValueError(
                f"prompt_lookup_min {lengths[0]} is above prompt_lookup_max {lengths[1]}; raise "
                "the second, or leave it out"
            )

    def _check_without_drafter(self) -> None:
        """Raise `ValueError` for an unknown method, and for what goes with a drafter alone."""
        if self.method not in (methods := known_methods()):
            raise ValueError(f"{self.method} is none of {', '.join(methods)}")
        foreign = {"model", "parallel_drafting", "quantization", "num_tree_nodes"}
        self._leave_out(foreign, "has no drafter")
        if self.num_speculative_tokens is None:
            told = "needs num_speculative_tokens, the most drafts of a cycle"
            raise ValueError(f"{self.method} {told}")

    def _leave_out(self, foreign: Set[str], why: str) -> None:
        given = sorted(name for name in foreign if getattr(self, name) is not None)
        if given:
            raise ValueError(f"{self.method} {why}; leave out {', '.join(given)}")

    def _check_synthetic(self) -> None:
        rates = self.synthetic_acceptance_rates
        if (rates is not None) != (self.rejection_sample_method == "synthetic"):
            raise ValueError(
                "synthetic_acceptance_rates and rejection_sample_method synthetic go together"
            )
        if rates is None:
            return
        if len(rates) != self.num_speculative_tokens:
            raise ValueError(
                f"synthetic_acceptance_rates has {len(rates)} entries; give one for each of "
                "num_speculative_tokens"
            )
        if any(later > rate for rate, later in itertools.pairwise(rates)):
            raise ValueError("synthetic_acceptance_rates: no rate may be above the one before")

    def with_method(self, method: str) -> Self:
        """The same for another method. Raises `InputError` for keys that do not go with it."""
        return type(self)(**{**self.model_dump(exclude_unset=True), "method": method})

    @property
    def has_network(self) -> bool:
        """Whether a network drafts: a drafter, or the target's own head."""
        return self.model is not None or self.method == "mtp"

    @property
    def lookup(self) -> tuple[int, int] | None:
        """The shortest and longest match of a lookup; None where nothing is looked up."""
        if self.method != "ngram":
            return None
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        least = min(SHORTEST_MATCH, longest or SHORTEST_MATCH) if shortest is None else shortest
        return least, max(LONGEST_MATCH, least) if longest is None else longest

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read vLLM's JSON; of its keys that set nothing here the log has a line.

        Raises `InputError` when it is not a JSON object, or has other keys or methods.
        """
        values = {k: v for k, v in speculative_values(text).items() if v is not None}
        for key in sorted(values.keys() & IDLE_KEYS):
            if (value := values.pop(key)) not in (False, 1):
                log.warning(f"speculative config: {key} {value}: drafts are made as peagle does")
        method = values.get("method", "eagle3")
        if method not in (*METHODS, *MTP_NAMES) and method not in (methods := known_methods()):
            known = " nor ".join(methods)
            told = f"{method} is neither {known} (P-EAGLE is eagle3); vLLM has more: --engine vllm"
            raise ConfigError(cls.__name__, [("method", told)])
        return cls(**values)


def speculative_values(text: str) -> dict[str, Any]:
    """The keys and values of vLLM's JSON. Raises `InputError` when it is not a JSON object."""
    values = parse_json_option("speculative config", text, '{"model": "DRAFTER"}')
    if not isinstance(values, dict):
        raise InputError("speculative config must be a JSON object, like vLLM's")
    return values
