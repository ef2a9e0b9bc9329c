"""What a request may take of its tenant's room for logs."""

from pagestream.v1.records_pb2 import Adapter, RequestSpec
from pagestream_streams.gateway.log_quota import most_bytes


def test_a_grammar_and_an_adapter_are_counted() -> None:
    plain, full = RequestSpec(), RequestSpec(adapter=Adapter(name="a", path="/" * 4000))
    full.sampling.structured_outputs.json = "x" * 60_000
    assert most_bytes(full) - most_bytes(plain) >= 64_000


def test_what_a_record_repeats_of_its_body_counts() -> None:
    plain, full = RequestSpec(), RequestSpec()
    full.answer.response.members_zlib = b"m" * 100_000
    full.answer.response.input_zlib = b"i" * 50_000
    full.answer.echo_texts.append("e" * 25_000)
    assert most_bytes(full) - most_bytes(plain) >= 175_000
