"""What an import loads, and what is exported."""

import subprocess
import sys

import httpx2
import pagestream_client
import pagestream_client.openai
import pytest
from pagestream_client.http import HttpClient


def test_every_error_can_be_caught_as_one() -> None:
    errors = [getattr(pagestream_client, name) for name in pagestream_client.__all__]
    errors = [each for each in errors if isinstance(each, type) and issubclass(each, Exception)]
    assert len(errors) == 15
    assert all(issubclass(each, pagestream_client.PagestreamError) for each in errors)


def test_nothing_but_the_wire_contract_and_grpc_is_loaded() -> None:
    code = "import pagestream_client, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    packages = {name.partition(".")[0] for name in loaded.stdout.split()}
    assert not packages & {"torch", "redis", "httpx", "httpx2", "numpy", "pagestream_streams", "pagestream_gateway"}
    assert "google.rpc" not in loaded.stdout.split()


def test_the_http_client_names_its_extra_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "httpx2", None)
    with pytest.raises(ImportError, match=r"pip install 'pagestream-client\[http\]'"):
        HttpClient("http://127.0.0.1:1")


def test_importing_the_http_client_loads_no_http_library() -> None:
    code = "import pagestream_client.http, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {"httpx", "httpx2"} & set(loaded.stdout.split())


def test_the_transport_of_the_openai_client_is_for_both_of_its_forms() -> None:
    resuming = pagestream_client.openai.transport("http://127.0.0.1:1/v1")
    assert isinstance(resuming, httpx2.BaseTransport)
    assert isinstance(resuming, httpx2.AsyncBaseTransport)
