import pytest
from pagestream_streams.connection.lost_transports import lost_transports_are_told
from redis import exceptions
from redis.asyncio import Connection


async def test_a_connection_that_was_closed_under_a_writer_is_lost() -> None:
    connection = Connection()
    with pytest.raises(exceptions.ConnectionError, match="closed"), lost_transports_are_told():
        await connection._send_packed_command([b"PING"])


@pytest.mark.parametrize(
    "error", [RuntimeError("of our own"), AttributeError("'NoneType' object has no attribute 'x'")]
)
async def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), lost_transports_are_told():
        raise error
