"""The URL of a server that is asked, and the key that it asks for."""

import os

from httpx2 import URL, InvalidURL

from peagle.errors import InputError

PORTS = {"http": 80, "https": 443}
KEY = "OPENAI_API_KEY"
"""The environment variable with the key."""
REFUSAL = "{} is no server's URL; give one such as http://localhost:8000"


def server_url(text: str, refusal: str = REFUSAL) -> URL:
    """The root of a server, whose URL may end with /v1.

    Raises `InputError` with the refusal for what is no URL.
    """
    try:
        url = URL(text)
    except InvalidURL:
        url = URL("")
    if url.scheme not in PORTS or not url.host:
        raise InputError(refusal.format(text))
    return url.copy_with(path=url.path.rstrip("/").removesuffix("/v1"))


def authorized() -> dict[str, str]:
    """The header with the key, if there is one."""
    key = os.environ.get(KEY)
    return {"Authorization": f"Bearer {key}"} if key else {}
