"""`RetryPolicy`: how often a durable call that raised is tried again, and after what wait."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

from dalsegno.errors import DefinitionError

RetryOn = type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool]

_YEAR = 366 * 86_400.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A call that raises is made up to *attempts* times, if *retry_on* covers what it raised.

    Before the second attempt it waits *backoff* seconds, before each further one *factor* times as long, but never
    longer than *max_backoff* seconds. *jitter*, a fraction from 0 to 1, makes each wait longer or shorter by up to
    that much, at random, so that calls that failed together do not come back together.

    *retry_on* is an exception class, a tuple of them, or a function that takes the exception and says whether to try
    again. Cancellation and other signals are never retried.

    Raises `DefinitionError` for a wrong value.
    """

    attempts: int = 3
    backoff: float = 1.0
    jitter: float = 0.1
    retry_on: RetryOn = Exception
    factor: float = 2.0
    max_backoff: float = 60.0

    def __post_init__(self) -> None:
        if type(self.attempts) is not int or self.attempts < 1:
            raise DefinitionError(
                f"RetryPolicy(attempts={self.attempts!r}): give the number of attempts in all, a whole number from 1 on"
            )
        for name, seconds in (("backoff", self.backoff), ("max_backoff", self.max_backoff)):
            if not is_number(seconds, 0, _YEAR):
                raise DefinitionError(
                    f"RetryPolicy({name}={seconds!r}): give a number of seconds, from 0 to that of a year"
                )
        if not is_number(self.jitter, 0, 1):
            raise DefinitionError(
                f"RetryPolicy(jitter={self.jitter!r}): give the part of a wait that is left to chance, from 0 to 1"
            )
        if not is_number(self.factor, 1, 1e6):
            raise DefinitionError(
                f"RetryPolicy(factor={self.factor!r}): give what each wait is multiplied with, a number from 1 on; "
                "1 keeps all waits the same"
            )
        _check_retry_on(self.retry_on)

    def covers(self, error: Exception) -> bool:
        """Whether a call that raised *error* is worth another attempt."""
        if isinstance(self.retry_on, (type, tuple)):
            return isinstance(error, self.retry_on)
        return bool(self.retry_on(error))

    def wait(self, failures: int) -> float:
        """Seconds to wait after that many failed attempts, the first of which is 1."""
        seconds = self.backoff
        # In a loop, as a power could be larger than any float.
        for _ in range(failures - 1):
            if seconds >= self.max_backoff or self.factor == 1 or not seconds:
                break
            seconds *= self.factor
        return min(seconds, self.max_backoff) * (1 + self.jitter * random.uniform(-1, 1))

    @property
    def longest_wait(self) -> float:
        """No wait is longer, in seconds."""
        return self.max_backoff * (1 + self.jitter)


def is_number(value: object, least: float, most: float) -> TypeGuard[float]:
    """Whether *value* is an int or float from *least* to *most*, which NaN and booleans are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def _check_retry_on(retry_on: Any) -> None:
    classes = retry_on if isinstance(retry_on, tuple) else (retry_on,) if isinstance(retry_on, type) else None
    if classes is None and callable(retry_on):
        return
    if not classes or not all(isinstance(cls, type) and issubclass(cls, Exception) for cls in classes):
        raise DefinitionError(
            f"RetryPolicy(retry_on={retry_on!r}): give a subclass of Exception, a tuple of them, or a function that "
            "takes the exception and returns whether to try again; cancellation and other signals, which are not "
            "Exceptions, are never retried"
        )
