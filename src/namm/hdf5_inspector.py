"""Looks into HDF5 files for `namm.hdf5`, in a process of its own that may hang, crash or run out of memory.

libhdf5 trusts the files that it reads: a few flipped bits let it loop for ever, read beyond its buffers or ask for all
memory. Here everything is touched that a reader will touch later: every link, object header and attribute, the index of
every array's chunks, and of small arrays the values.

Each line of standard input is [path, seconds] in JSON and is answered by a line {"damage": …, "elsewhere": …}: what is
wrong with the file, and what of it lies in other files. The alarm ends a process that takes longer. Run as a script,
with nothing imported but h5py: it must be up in a third of a second.
"""

import json
import os
import signal
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import h5py
from h5py import h5d, h5g, h5l, h5o, h5z

MEMORY = 4 * 2**30
"""Address space of this process."""
SMALL = 16 * 2**20
"""Values of arrays that are read, together; of the others only the index is."""
LARGEST_ATTRIBUTE = 16 * 2**20
LARGEST_CHUNK = 256 * 2**20
"""Unpacked; a chunk is read whole, whatever is asked of it."""
SUSPECT = 2**18
"""Packed bytes of a chunk from which on it is unpacked here first: deflate can make a thousand times as many."""
PACKING = {h5z.FILTER_DEFLATE, h5z.FILTER_SZIP, h5z.FILTER_LZF}
"""Filters that make less of their input; one after another, they can make a million times as much of a file."""
LONGEST = 500
"""Characters of an answer's sentence."""


class Damage(Exception):
    """What is wrong with a file."""


class File:
    """One open file under inspection."""

    def __init__(self, path: str) -> None:
        self.size = os.path.getsize(path)
        self.elsewhere: str | None = None
        self.read = 0
        with h5py.File(path, "r", locking=False) as file:  # whoever outlives its parent is in no writer's way
            for item in self.objects(file.id):
                self.look_at_attributes(item)
                if isinstance(item, h5d.DatasetID):
                    self.look_at_array(item)

    def objects(self, root: Any) -> Iterator[Any]:
        """Everything that hard links lead to, once; links to other files are noted and not followed."""
        seen, waiting = set(), [h5g.open(root, b"/")]
        while waiting:
            item = waiting.pop()
            yield item
            if not isinstance(item, h5g.GroupID):
                continue
            for name in item:
                kind = item.links.get_info(name).type
                if kind == h5l.TYPE_HARD:
                    inside = h5o.open(item, name)
                    where = h5o.get_info(inside).addr
                    if where not in seen:
                        seen.add(where)
                        waiting.append(inside)
                elif kind != h5l.TYPE_SOFT:
                    self.note(name, "is a link to another file")

    def note(self, name: bytes, what: str) -> None:
        """Remember the first part that lies elsewhere."""
        self.elsewhere = self.elsewhere or f"{name.decode(errors='replace')} {what}"[:LONGEST]

    def look_at_attributes(self, item: Any) -> None:
        """Read every attribute."""
        wrapped = h5py.Dataset(item) if isinstance(item, h5d.DatasetID) else None
        if isinstance(item, h5g.GroupID):
            wrapped = h5py.Group(item)
        if wrapped is None:  # a type that has a name
            return
        for name in wrapped.attrs:
            with suppress(RuntimeError):  # an empty one has no size
                if wrapped.attrs.get_id(name).get_storage_size() > LARGEST_ATTRIBUTE:
                    raise Damage(f"the attribute {name} is beyond {LARGEST_ATTRIBUTE >> 20} MiB")
            with suppress(TypeError):  # a type that NumPy does not have: no reader of ours asks for it
                wrapped.attrs[name]

    def look_at_array(self, array: h5d.DatasetID) -> None:
        """Check what an array claims against the file's size, and read it if it is small."""
        name = h5py.h5i.get_name(array) or b"an array"
        plan = array.get_create_plist()
        if plan.get_layout() == h5d.VIRTUAL:
            self.note(name, "is a virtual data set, made of other files'")
            return
        if plan.get_external_count():
            self.note(name, "has its values in another file")
            return
        if array.get_storage_size() > self.size:
            raise Damage(f"{name.decode(errors='replace')} claims more bytes than the file has")
        if plan.get_layout() == h5d.CHUNKED:
            self.look_at_chunks(array, plan)
        values = h5py.Dataset(array)
        with suppress(TypeError):  # as above
            size = values.dtype.itemsize * (values.size or 0)
            if self.read + size <= SMALL and values.shape is not None:
                self.read += size
                values[()]

    def look_at_chunks(self, array: h5d.DatasetID, plan: Any) -> None:
        """Walk the whole index of an array; a chunk that could unpack to much more than it holds is unpacked."""
        size = array.get_type().get_size()
        for length in plan.get_chunk():
            size *= length
        if size > max(LARGEST_CHUNK, self.size):
            raise Damage(f"a chunk of {size} bytes is larger than the file")
        filters = [plan.get_filter(k)[0] for k in range(plan.get_nfilters())]
        if sum(each in PACKING for each in filters) > 1:
            raise Damage("an array is packed more than once")
        packed = h5z.FILTER_DEFLATE in filters
        suspects = []

        def look(chunk: Any) -> None:
            if chunk.byte_offset is not None and chunk.byte_offset + chunk.size > self.size:
                raise Damage("a chunk lies beyond the end of the file")
            if packed and chunk.size > 2 * size + 4096:
                raise Damage("a chunk is packed into more bytes than it can hold")
            if packed and chunk.size > SUSPECT:
                suspects.append(chunk.chunk_offset)

        if hasattr(array, "chunk_iter"):  # libhdf5 1.12.3 and later
            array.chunk_iter(look)
        else:
            array.get_num_chunks()
        for offset in suspects:
            _, content = array.read_direct_chunk(offset)
            if len(zlib.decompressobj().decompress(content, 2 * size + 1)) > 2 * size:
                raise Damage("a chunk unpacks to more than it can hold")


def inspect(path: str) -> dict[str, str | None]:
    """What is wrong with a file, and what of it lies elsewhere."""
    try:
        return {"damage": None, "elsewhere": File(path).elsewhere}
    except Exception as error:  # whatever h5py makes of a damaged file
        return {"damage": (str(error) or type(error).__name__)[:LONGEST], "elsewhere": None}


def serve() -> None:
    """Answer until standard input ends, which it does when the process that asks has ended."""
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        path, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM ends this process inside libhdf5, too
        answer = inspect(path)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
