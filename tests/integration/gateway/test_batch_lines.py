"""Lines of files in Redis: as Python splits them, wherever slices end and reading goes on."""

import pytest
from pagestream_gateway.core.batches import lines
from pagestream_gateway.core.batches.lines import LineReader, LineTooLong
from pagestream_streams import Broker
from pagestream_streams.batches.files import FileBounds, FileStore
from pagestream_streams.protocol.keys import tenant_tag

TENANT = "a"
BOUNDS = FileBounds(1000, 1000, 1000, num_files=10)
TEXTS = [b"", b"\n", b"one", b"one\n", b"one\r\ntwo\r\n", b"\n\none\n \ntwo", b"a\n" * 9, b"longer than a slice\nx\n"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("slice_bytes", [1, 3, 100])
async def test_lines(redis_url: str, monkeypatch: pytest.MonkeyPatch, text: bytes, slice_bytes: int) -> None:
    monkeypatch.setattr(lines, "_SLICE_BYTES", slice_bytes)
    expected = [(number, each) for number, each in enumerate(text.splitlines(), start=1) if each.strip()]
    async with await Broker.connect(redis_url) as broker:
        files = FileStore(broker.connection, BOUNDS)
        file_id = await files.begin(TENANT, 60_000)
        await files.append(TENANT, file_id, 0, text)
        found: list[tuple[int, bytes]] = []
        offset = number = 0
        while True:  # a new reader for each line, as after a crash
            reader = LineReader(files, tenant_tag(TENANT), file_id, max_bytes=50, offset=offset, number=number)
            read = await reader.next(1)
            if not read:
                break
            [line] = read
            assert await files.read(tenant_tag(TENANT), file_id, line.offset, len(line.data)) == line.data
            found.append((line.number, line.data))
            offset, number = reader.offset, line.number
        assert found == expected
        at_once = await LineReader(files, tenant_tag(TENANT), file_id, max_bytes=50).next(100, 1000)
        assert [(line.number, line.data) for line in at_once] == expected


async def test_a_line_is_bounded(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_SLICE_BYTES", 4)
    async with await Broker.connect(redis_url) as broker:
        files = FileStore(broker.connection, BOUNDS)
        file_id = await files.begin(TENANT, 60_000)
        await files.append(TENANT, file_id, 0, b"ok\n" + b"x" * 100)
        reader = LineReader(files, tenant_tag(TENANT), file_id, max_bytes=10)
        assert [line.data for line in await reader.next(1)] == [b"ok"]
        with pytest.raises(LineTooLong, match="line 2 has more than 10 bytes"):
            await reader.next(1)
