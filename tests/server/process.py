"""`peagle serve` in a process, as a user starts it."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

BODY = {"prompt": "def fibonacci(n):\n", "max_tokens": 12}


class Process:
    """`peagle serve` as a user starts it."""

    def __init__(self, port: int, *flags: str, module: Sequence[str] = ("-m", "peagle")) -> None:
        """module: what Python runs instead of it, with the same arguments."""
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, *module, "serve", "--port", str(port), *flags]
        self.process = subprocess.Popen(
            command,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )

    def wait(self, status: int = 200) -> None:
        """Wait until its health is this."""
        while self.get("/health") != status:
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)

    def get(self, path: str) -> int | None:
        """A status; None while nothing listens."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def post(self, body: dict[str, Any]) -> Any:
        """An open answer."""
        headers = {"Content-Type": "application/json"}
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + "/v1/completions", data, headers)
        return urllib.request.urlopen(request, timeout=240)

    def text(self) -> str:
        """The usual answer's text."""
        return str(json.load(self.post(BODY))["choices"][0]["text"])
