"""A Zarr store behind a URL whose metadata are fetched once, and whose objects may not change while they are read."""

from __future__ import annotations

import asyncio
from typing import Any

import obstore.exceptions
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import ObjectStore

from ensemble_ml.errors import UserError
from ensemble_ml.store.remote import Range, fetched, loop, refusal

_KEPT = 256 << 20  # bytes of a store that are kept at most
_DOCUMENTS = ("zarr.json", ".zmetadata", ".zgroup", ".zarray", ".zattrs")


class RemoteStore(ObjectStore):  # type: ignore[type-arg]
    """Objects below a URL as zarr reads them (see `zarr.storage.ObjectStore`).

    Metadata are kept, also the answer that there are none, because zarr and xarray ask for them again and again.

    Args:
        store: obstore's store of all objects below the URL.
        url: the URL.
    """

    def __init__(self, store: Any, url: str):
        super().__init__(store, read_only=True)
        self._url = url
        self._documents: dict[str, bytes | None] = {}
        self._tags: dict[str, tuple[Any, ...] | None] = {}  # of objects that were asked for; None: not there
        self._kept: dict[tuple[str, str], asyncio.Future[bytes | None]] = {}  # bytes that were read or are under way
        self._bytes = 0  # that are kept

    @property
    def absent(self) -> list[str]:
        """Return the objects, other than metadata, that were asked for and are not there."""
        return [key for key, tag in list(self._tags.items()) if tag is None]

    def forget_documents(self) -> None:
        """Fetch metadata anew when they are next asked for."""
        self._documents.clear()

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object or a part of it as zarr's buffer; None if it is not there."""
        # zarr has a loop of its own. All that is kept here belongs to the loop of requests, so it needs no lock.
        asked = asyncio.run_coroutine_threadsafe(self.content(key, _as_range(byte_range)), loop())
        content = await asyncio.wrap_future(asked)
        return None if content is None else prototype.buffer.from_bytes(content)

    async def exists(self, key: str) -> bool:
        """Return whether an object is there; of one that was read this is known already."""
        if key not in self._tags:
            return bool(await super().exists(key))
        return self._tags[key] is not None

    async def content(self, key: str, wanted: Range = None) -> bytes | None:
        """Return an object or a part of it; None if it is not there.

        Bytes that were read last are kept: a chunk may hold several leads, which are read one after the other.

        Args:
            key: the object.
            wanted: the bytes to read; None reads all.

        Raises:
            UserError: the object has changed since another part of it was read.
        """
        if wanted is None and key.rsplit("/", 1)[-1] in _DOCUMENTS:
            if key not in self._documents:
                self._documents[key] = (await self._fetched(key, None))[0]
            return self._documents[key]
        place = key, repr(wanted)
        if place in self._kept:
            self._kept[place] = self._kept.pop(place)  # used last, so it goes last
        else:
            self._kept[place] = asyncio.ensure_future(self._checked(key, wanted))
        try:
            return await asyncio.shield(self._kept[place])
        except BaseException:
            self._kept.pop(place, None)
            raise

    async def _checked(self, key: str, wanted: Range) -> bytes | None:
        """Fetch bytes, refuse those of an object that has changed, and make room for them."""
        content, tag = await self._fetched(key, wanted)
        if self._tags.setdefault(key, tag) != tag:
            raise UserError(f"{self._url}: {key} changed while it was read; run again")
        self._bytes += len(content or b"")
        for place, one in list(self._kept.items()):
            if self._bytes <= _KEPT:
                break
            if one.done() and not one.exception():
                self._bytes -= len(one.result() or b"")
                del self._kept[place]
        return content

    async def _fetched(self, key: str, wanted: Range) -> tuple[bytes | None, tuple[Any, ...] | None]:
        """Return bytes of an object and what tells whether it has changed; None for both if it is not there."""
        try:
            content, meta = await fetched(self.store, key, wanted)
        except FileNotFoundError:
            return None, None
        except obstore.exceptions.BaseError as error:
            raise refusal(self._url, error) from error
        return content, (meta["e_tag"] or meta["last_modified"], meta["size"])


def _as_range(wanted: ByteRequest | None) -> Range:
    """Return zarr's description of some bytes as obstore has it."""
    if wanted is None:
        return None
    if isinstance(wanted, RangeByteRequest):
        return wanted.start, wanted.end
    if isinstance(wanted, OffsetByteRequest):
        return {"offset": wanted.offset}
    return {"suffix": wanted.suffix}
