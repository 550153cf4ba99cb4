"""A digest that tells data apart."""

import hashlib
from collections.abc import Iterable


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """Hexadecimal digest of all parts, one after the other."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(part)
    return found.hexdigest()
