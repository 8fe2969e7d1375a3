"""Read a Zarr store by URL: fetch its metadata once, and notice objects that change while they are read."""

from __future__ import annotations

import asyncio
from typing import Any

import obstore.exceptions
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import ObjectStore

from ensemble_ml.errors import UserError
from ensemble_ml.store.remote import Range, fetched, loop, refusal

_KEPT = 256 << 20  # limit of the bytes of a store that are kept in memory, without its metadata documents
_DOCUMENTS = ("zarr.json", ".zmetadata", ".zgroup", ".zarray", ".zattrs")


class RemoteStore(ObjectStore):  # type: ignore[type-arg]
    """The store of obstore of all objects below a URL, in the form that zarr reads (see `zarr.storage.ObjectStore`).

    Metadata documents are kept, and so is the absence of a document, because zarr and xarray request them many times.
    """

    def __init__(self, store: Any, url: str):
        super().__init__(store, read_only=True)
        self._url = url
        self._documents: dict[str, bytes | None] = {}
        self._tags: dict[str, tuple[Any, ...] | None] = {}  # version by key (see `_fetched`); None if not there
        self._kept: dict[tuple[str, str], asyncio.Future[bytes | None]] = {}  # by key and range, last used at the end
        self._bytes = 0  # number of bytes in `_kept`

    @property
    def absent(self) -> list[str]:
        """Return the keys of objects, other than metadata, that were requested and are not there."""
        return [key for key, tag in list(self._tags.items()) if tag is None]

    def forget_documents(self) -> None:
        """Forget all metadata, so that they are fetched again."""
        self._documents = {}

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object or a part of it as zarr's buffer; None if it is not there."""
        # zarr runs in another event loop. The caches are filled only in the loop of requests, so they need no lock.
        # Other threads only look up a key, copy the items, or replace the dictionary of documents.
        asked = asyncio.run_coroutine_threadsafe(self.content(key, _as_range(byte_range)), loop())
        content = await asyncio.wrap_future(asked)
        return None if content is None else prototype.buffer.from_bytes(content)

    async def exists(self, key: str) -> bool:
        """Return whether an object is there. An object other than metadata that was read before needs no request."""
        if key not in self._tags:
            return bool(await super().exists(key))
        return self._tags[key] is not None

    async def content(self, key: str, wanted: Range = None) -> bytes | None:
        """Return an object, or the bytes `wanted` of it; None if it is not there.

        The bytes read last are kept: a chunk may hold several leads, which are read one after the other.

        Raises:
            UserError: the object cannot be read, or has changed since it was first requested (not checked for metadata
                documents).
        """
        if wanted is None and key.rsplit("/", 1)[-1] in _DOCUMENTS:
            # `forget_documents` may be called meanwhile; a document that was requested before it must not stay.
            documents = self._documents
            if key not in documents:
                documents[key] = (await self._fetched(key, None))[0]
            return documents[key]
        place = key, repr(wanted)
        if place in self._kept:
            self._kept[place] = self._kept.pop(place)  # moves it to the end
        else:
            self._kept[place] = asyncio.ensure_future(self._checked(key, wanted))
        try:
            return await asyncio.shield(self._kept[place])
        except BaseException:
            # If only this caller was cancelled, the bytes still come, and are kept.
            if place in self._kept and self._kept[place].done():
                del self._kept[place]
            raise

    async def _checked(self, key: str, wanted: Range) -> bytes | None:
        """Fetch bytes and raise a UserError if the object has changed.

        Above `_KEPT` bytes, drop the least recently used.
        """
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
        """Fetch bytes of an object. Return them and the object's version, or None for both if it is not there.

        The version is its ETag, or time of modification if it has no ETag, and its size.
        """
        try:
            content, meta = await fetched(self.store, key, wanted)
        except FileNotFoundError:
            return None, None
        except obstore.exceptions.BaseError as error:
            raise refusal(self._url, error) from error
        return content, (meta["e_tag"] or meta["last_modified"], meta["size"])


def _as_range(wanted: ByteRequest | None) -> Range:
    """Convert a range of bytes from zarr's form to obstore's."""
    if wanted is None:
        return None
    if isinstance(wanted, RangeByteRequest):
        return wanted.start, wanted.end
    if isinstance(wanted, OffsetByteRequest):
        return {"offset": wanted.offset}
    return {"suffix": wanted.suffix}
