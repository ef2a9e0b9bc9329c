"""The tries of one answer that is not streamed."""

import httpx2
import pytest
from pagestream_client.http.configuration import HttpConfiguration
from pagestream_client.openai.calls import WholeCall

URLS = ["http://one", "http://other"]


def test_all_tries_together_have_the_requests_own_limit() -> None:
    now = [100.0]
    configuration = HttpConfiguration(URLS, api_key=None, reconnection=None, transport=None)
    limits = {"connect": 5.0, "read": 10.0, "write": None, "pool": 1.0}
    request = httpx2.Request("POST", "http://one/v1/completions", content=b"{}", extensions={"timeout": limits})
    call = WholeCall(configuration, request, clock=lambda: now[0])
    assert call.next_request().extensions["timeout"] == {"connect": 5.0, "read": 10.0, "write": 10.0, "pool": 1.0}
    now[0] += 7.0
    assert call.delay_s(httpx2.ConnectError("gone")) < 1.0
    assert call.next_request().extensions["timeout"] == {"connect": 3.0, "read": 3.0, "write": 3.0, "pool": 1.0}
    now[0] += 3.0
    with pytest.raises(httpx2.ReadTimeout, match="gone again"):
        call.delay_s(httpx2.ConnectError("gone again"))
    refusal = httpx2.Response(503)
    call.next_request()
    assert call.delay_after(refusal, b"") is None, "the last refusal is the answer"
