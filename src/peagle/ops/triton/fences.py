"""What a kernel may read before its own wait (`launch`): all that was launched before a *fence*.

A fence is a launch behind which everything that was launched before it is done when another one
begins: a plain launch, which waits for all of it, or one that lets the next begin only after its
own wait. Each says so where it is launched; one that says nothing counts for nothing, which costs
time alone. So whether something may be read early is not told but counted.
"""

import threading


class _Launched(threading.local):
    """What one thread has launched: its launches follow one another."""

    fences = 0


_LAUNCHED = _Launched()


def fence() -> None:
    """Say that the launch that is made here is a fence."""
    _LAUNCHED.fences += 1


def fences() -> int:
    """How many fences there were; once there are more, all launched before this is done."""
    return _LAUNCHED.fences
