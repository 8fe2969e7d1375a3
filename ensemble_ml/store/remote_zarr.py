"""A Zarr store behind a URL whose metadata are fetched once, and whose objects may not change while they are read."""

from __future__ import annotations

from typing import Any

from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import ObjectStore

from ensemble_ml.errors import UserError
from ensemble_ml.store.remote import Range, fetched

_DOCUMENTS = ("zarr.json", ".zmetadata", ".zgroup", ".zarray", ".zattrs")


class RemoteStore(ObjectStore):  # type: ignore[type-arg]
    """Objects below a URL as zarr reads them (see `zarr.storage.ObjectStore`).

    Metadata are kept, also the answer that there are none, because zarr and xarray ask for them again and again.
    """

    def __init__(self, store: Any, *, read_only: bool = True):
        super().__init__(store, read_only=read_only)
        self._documents: dict[str, bytes | None] = {}
        self._tags: dict[str, tuple[Any, ...] | None] = {}  # of objects that were asked for; None: not there

    def forget_documents(self) -> None:
        """Fetch metadata anew when they are next asked for."""
        self._documents.clear()

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return an object or a part of it as zarr's buffer; None if it is not there."""
        content = await self.content(key, _as_range(byte_range))
        return None if content is None else prototype.buffer.from_bytes(content)

    async def exists(self, key: str) -> bool:
        """Return whether an object is there; of one that was read this is known already."""
        if key not in self._tags:
            return bool(await super().exists(key))
        return self._tags[key] is not None

    async def content(self, key: str, wanted: Range = None) -> bytes | None:
        """Return an object or a part of it; None if it is not there.

        Args:
            key: the object.
            wanted: the bytes to read; None reads all.

        Raises:
            UserError: the object has changed since another part of it was read.
        """
        document = wanted is None and key.rsplit("/", 1)[-1] in _DOCUMENTS
        if document and key in self._documents:
            return self._documents[key]
        try:
            content, meta = await fetched(self.store, key, wanted)
        except FileNotFoundError:
            content, meta = None, None
        if document:
            self._documents[key] = content
            return content
        tag = None if meta is None else (meta["e_tag"] or meta["last_modified"], meta["size"])
        if self._tags.setdefault(key, tag) != tag:
            raise UserError(f"{key} changed while it was read; run again")
        return content


def _as_range(wanted: ByteRequest | None) -> Range:
    """Return zarr's description of some bytes as obstore has it."""
    if wanted is None:
        return None
    if isinstance(wanted, RangeByteRequest):
        return wanted.start, wanted.end
    if isinstance(wanted, OffsetByteRequest):
        return {"offset": wanted.offset}
    return {"suffix": wanted.suffix}
