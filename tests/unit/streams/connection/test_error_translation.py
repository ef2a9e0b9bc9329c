import pytest
from pagestream_streams.connection.error_translation import closed_transport_as_connection_error
from redis import exceptions
from redis.asyncio import Connection


async def test_a_connection_that_was_closed_under_a_writer_is_lost() -> None:
    connection = Connection()
    with pytest.raises(exceptions.ConnectionError, match="closed"), closed_transport_as_connection_error():
        await connection._send_packed_command([b"PING"])


@pytest.mark.parametrize(
    "error", [RuntimeError("of our own"), AttributeError("'NoneType' object has no attribute 'x'")]
)
async def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)), closed_transport_as_connection_error():
        raise error
