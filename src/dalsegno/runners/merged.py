"""Several sources as one, whose records come as they are there; each source's own stay in order.

The records of the parts interleave otherwise in each run. So the position says how far each part is read, and the id of
a record is the name of its part and its number in there, ``"orders/17"``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

from dalsegno.errors import DefinitionError, RestoreError
from dalsegno.runners.lines import count_in
from dalsegno.runners.sources import Source, SourceItem, open_source


class MergedSource(Source):
    """Merges *parts*, by name: sources, or whatever `open_source` makes one of. Each must replay in order.

    The name of a part is a part of the ids of its messages, so it stays with it. A part may be added later. Raises
    `DefinitionError` for a part that is no source, or does not replay in order.
    """

    replays_in_order: ClassVar[bool] = False
    gives_ids: ClassVar[bool] = True

    def __init__(self, parts: Mapping[str, object]) -> None:
        given: object = parts
        if not (isinstance(given, Mapping) and given and all(isinstance(name, str) for name in given)):
            raise DefinitionError(f"a MergedSource is made of named sources, as in {{'eu': ..., 'us': ...}}: {parts!r}")
        self._parts = {name: open_source(part) for name, part in parts.items()}
        for name, part in self._parts.items():
            if not part.replays_in_order:
                raise DefinitionError(
                    f"the part {name!r} of a MergedSource, {part.describe()}, does not replay in order, so the numbers "
                    "of its records are no ids: merge what it is made of instead"
                )
        self._reading: dict[asyncio.Task[SourceItem | None], str] = {}

    def describe(self) -> str:
        return f"a merge of {', '.join(f'{name} ({part.describe()})' for name, part in self._parts.items())}"

    def total(self) -> int | None:
        totals = [part.total() for part in self._parts.values()]
        return sum(total for total in totals if total is not None) if None not in totals else None

    def progress(self, position: dict[str, Any] | None) -> int:
        of_parts = self._of_parts(position)
        return sum(part.progress(of_parts.get(name)) for name, part in self._parts.items())

    async def open(self, position: dict[str, Any] | None) -> AsyncIterator[SourceItem]:
        await self.close()
        of_parts = self._of_parts(position)
        if gone := of_parts.keys() - self._parts.keys():
            raise RestoreError(
                f"this job has read {', '.join(map(repr, sorted(gone)))}, which is no part of {self.describe()} any "
                "more. Put it back, also if it has nothing more, or give the job a new name"
            )
        streams = {name: await part.open(of_parts.get(name)) for name, part in self._parts.items()}
        ordinal = count_in(position, "ordinal", self.describe()) if position is not None else 0
        return self._merge(streams, ordinal, of_parts)

    async def close(self) -> None:
        reading, self._reading = self._reading, {}
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        for part in self._parts.values():
            await part.close()

    async def _merge(
        self, streams: dict[str, AsyncIterator[SourceItem]], ordinal: int, of_parts: dict[str, Any]
    ) -> AsyncIterator[SourceItem]:
        for name, stream in streams.items():
            self._read_next(name, stream)
        while self._reading:
            await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in self._reading if task.done()]:
                name = self._reading.pop(task)
                item = task.result()
                if item is None:
                    continue
                self._read_next(name, streams[name])
                of_parts = of_parts | {name: item.position}
                position = {"ordinal": ordinal + 1, "parts": of_parts}
                yield SourceItem(ordinal, item.value, position, f"{name}/{item.ordinal}")
                ordinal += 1

    def _read_next(self, name: str, stream: AsyncIterator[SourceItem]) -> None:
        self._reading[asyncio.ensure_future(_next(stream))] = name

    def _of_parts(self, position: dict[str, Any] | None) -> dict[str, Any]:
        if position is None:
            return {}
        parts = position.get("parts")
        if not isinstance(parts, dict):
            raise RestoreError(
                f"this job has read another kind of source than {self.describe()}, up to {position!r}. Put that back, "
                "or give the job a new name"
            )
        return parts


async def _next(stream: AsyncIterator[SourceItem]) -> SourceItem | None:
    return await anext(stream, None)
