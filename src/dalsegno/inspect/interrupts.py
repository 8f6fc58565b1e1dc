"""Ctrl-C while the command loads: one line and exit code 130, without a traceback of whatever was being imported.

This module and what it imports are loaded before that can work, so they are few.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130


def interruption() -> str:
    """What an interrupted command says."""
    return "interrupted; run it again to go on" if sys.argv[1:2] == ["run"] else "interrupted"


def end_on_interrupt() -> None:
    """From now on Ctrl-C ends the process at once; nothing may have been begun. Where it is ignored, it stays so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def raise_on_interrupt() -> None:
    """From now on Ctrl-C is a `KeyboardInterrupt` again, as what is begun now has to be ended in order."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def is_handled() -> None:
    """Let an interrupt that was caught decide nothing any more.

    CPython notes one that passes through code which was given as a string, as that of dataclasses is, and would end the
    process with the signal, whatever its exit code. Code of that kind that ends well takes the note back.
    """
    eval("None")


def _end(number: int, frame: object) -> None:
    # An exception could be caught, or turned into another one, by what is being imported.
    try:
        os.write(2, f"dalsegno: {interruption()}\n".encode())
    finally:
        os._exit(INTERRUPTED)
