"""What a step's results cost between an engine's process and the one in front: processor time.

    python benchmarks/server/transfer.py

A step brings every request three tokens, two of them accepted drafts. One process plays both sides.
"""

import socket
import time
from collections.abc import Callable

from peagle.engine.engine import EngineStats
from peagle.engine.request import RequestOutput
from peagle.engine.step import TokenLogprobs
from peagle.engine_client.messages import Channel, FromEngine, Stepped

REQUESTS = (1, 64, 512)
TOKENS = (101_325, 6_371, 299_792)
STATS = EngineStats(64, 12, 0.75, 3, 120_000, 64_000)
SCORE = TokenLogprobs(-0.25, 1, ((101_325, -0.25), (5, -1.5), (17, -2.5), (9, -3.0), (11, -4.5)))
ROUNDS, STEPS = 40, 50


def output(number: int, scored: bool) -> RequestOutput:
    logprobs = (SCORE,) * len(TOKENS) if scored else ()
    return RequestOutput(str(number), TOKENS, 2, None, 7, 2, logprobs)


def least(work: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of each of two that take turns, in the round that was disturbed least."""
    rounds = []
    for _ in range(ROUNDS):
        spent = [0.0, 0.0]
        for _ in range(STEPS):
            for side, run in enumerate((work, other)):
                start = time.process_time()
                run()
                spent[side] += time.process_time() - start
        rounds.append(tuple(seconds / STEPS * 1e6 for seconds in spent))
    return min(sent for sent, _ in rounds), min(received for _, received in rounds)


def main() -> None:
    ours, theirs = socket.socketpair()
    front: Channel[FromEngine] = Channel(ours.detach(), FromEngine)
    engine: Channel[FromEngine] = Channel(theirs.detach(), FromEngine)
    print("requests  log-probabilities  send, us a step  receive, us a step  both, us a token")
    for requests in REQUESTS:
        for scored in (False, True):
            step = Stepped([output(n, scored) for n in range(requests)], STATS)
            sent, received = least(lambda step=step: engine.send(step), front.receive)
            a_token = (sent + received) / requests / len(TOKENS)
            top = len(SCORE.top) if scored else "none"
            print(f"{requests:8}  {top:>17}  {sent:15.1f}  {received:18.1f}  {a_token:16.2f}")


if __name__ == "__main__":
    main()
