"""Features that others have written: a running vLLM 0.33, or speculators, a file a document.

A file holds `token_ids` [tokens] and `hidden_states` [tokens, taps + 1, hidden_size]: the streams
at the taps, ascending, and the last one, which the target's final norm has not seen. Pickles are
not read.
"""

import fcntl
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.models.ends import Ends
from peagle.models.weights import opened, read_tensor_file
from peagle.server_url import server_url
from peagle.train.digest import digest
from peagle.train.features import Features, FeatureSource, Split, documents_in, placed
from peagle.train.packing import Batch

IN_FLIGHT = 16
"""Documents asked for at once."""
SECONDS = 600.0
LOGPROB = 0.1
"""Largest difference of a token's log-probability from the server's, or share of it."""
Finish = Callable[[Tensor], Tensor]
"""The target's final norm: last streams -> what its head takes."""


class WrittenFeatures(FeatureSource):
    """Features of documents, each from a file of its own."""

    def __init__(self, ends: Ends, finish: Finish, taps: tuple[int, ...]) -> None:
        weight = ends.embed.weight
        self.device, self._dtype = weight.device, weight.dtype
        self._ends, self._finish, self._taps = ends, finish, taps

    def __call__(self, split: Split, rows: Tensor, batch: Batch) -> Features:
        spans = documents_in(batch)
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            asked = [tuple(batch.tokens[span].tolist()) for span in spans]
            return placed(len(batch), list(zip(spans, pool.map(self.document, asked), strict=True)))

    @abstractmethod
    def document(self, tokens: tuple[int, ...]) -> Features:
        """Features of one document. Raises `InputError` for a file that does not hold them."""

    @torch.no_grad()
    def read(self, path: Path, tokens: Sequence[int]) -> Features:
        """Features from a document's file, which must hold what it should."""
        states = self._states(path, tokens).to(self.device, self._dtype)
        return Features(states[:, :-1].flatten(1), self._finish(states[:, -1]))

    def _states(self, path: Path, tokens: Sequence[int]) -> Tensor:
        found = read_tensor_file(path)
        states, ids = found.get("hidden_states"), found.get("token_ids")
        shape = [len(tokens), len(self._taps) + 1, self._ends.spec.hidden_size]
        if states is None or ids is None:
            raise InputError(f"{path} has no hidden_states and token_ids, as vLLM writes them")
        if ids.tolist() != list(tokens):
            raise InputError(f"{path} holds the states of other tokens than were asked for")
        if list(states.shape) != shape:
            told = "turn prefix caching off, and name the taps and the last layer"
            raise InputError(f"{path} holds states {list(states.shape)}, not {shape}; {told}")
        if "hidden_states_scales" in found:
            states = states.float() * found["hidden_states_scales"]
        if not states.float().isfinite().all() or not states.float().any(-1).all():
            raise InputError(f"{path} holds states that are zero or not finite")
        return states


class VllmFeatures(WrittenFeatures):
    """Features by a running vLLM, which writes a document's when it is asked for its next token."""

    def __init__(self, ends: Ends, finish: Finish, taps: tuple[int, ...], url: str) -> None:
        super().__init__(ends, finish, taps)
        self._url = server_url(url)
        self._client = httpx2.Client(timeout=SECONDS, base_url=self._url)
        with self._answering():
            self._model = self._client.get("/v1/models").raise_for_status().json()["data"][0]["id"]

    def document(self, tokens: tuple[int, ...]) -> Features:
        asked = {"max_tokens": 1, "temperature": 0, "logprobs": 1, "return_token_ids": True}
        body = {"model": self._model, "prompt": tokens, **asked}
        with self._answering():
            answer = self._client.post("/v1/completions", json=body).raise_for_status().json()
            path = Path(answer["kv_transfer_params"]["hidden_states_path"])
            choice = answer["choices"][0]
            token, logprob = choice["token_ids"][0], choice["logprobs"]["token_logprobs"][0]
        lock = path.with_name(f"{path.name}.lock")
        if lock.exists():
            with lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH)  # until the server has written the file
        features = self.read(path, tokens)
        self._prove(features.final[-1:], token, logprob)
        path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        return features

    @torch.no_grad()
    def _prove(self, final: Tensor, token: int, expected: float) -> None:
        """Raise `InputError` unless final states give the next token its log-probability."""
        found = float(self._ends.logits(final)[0].float().log_softmax(dim=-1)[token])
        if abs(found - expected) > LOGPROB * max(1.0, abs(expected)):
            raise InputError(
                f"{self._url} gives token {token} the log-probability {expected:.3f}, the target's "
                f"norm and head make {found:.3f} of its last state; serve the recipe's target, and "
                "name its last layer"
            )

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Turn an answer that is not vLLM's into `InputError`."""
        try:
            yield
        except httpx2.HTTPError as error:
            raise InputError(f"{self._url} does not answer: {error}") from None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise InputError(
                f"{self._url} answers without hidden states; start it as docs/train.md says"
            ) from None


class SpeculatorsFeatures(WrittenFeatures):
    """Features in a directory of speculators': `hs_0.safetensors`, `hs_1.safetensors` ..."""

    def __init__(self, ends: Ends, finish: Finish, taps: tuple[int, ...], directory: Path) -> None:
        super().__init__(ends, finish, taps)
        self._directory = directory
        self._files = {_key(_token_ids(path)): path for path in directory.glob("hs_*.safetensors")}
        if not self._files:
            pickled = any(directory.glob("*.pt")) or any(directory.glob("*.ckpt"))
            hint = "; pickle files are never read" * pickled
            raise InputError(f"feature_source {directory} has no hs_*.safetensors{hint}")

    def document(self, tokens: tuple[int, ...]) -> Features:
        path = self._files.get(_key(tokens))
        if path is None:
            raise InputError(
                f"{self._directory} has no states of a document of {len(tokens)} tokens that "
                f"begins {list(tokens[:8])}; use its own data, whole"
            )
        return self.read(path, tokens)


def _token_ids(path: Path) -> list[int]:
    with opened(path) as file:
        return file.get_tensor("token_ids").tolist()


def _key(tokens: Sequence[int]) -> str:
    return digest([json.dumps(list(tokens)).encode()])
