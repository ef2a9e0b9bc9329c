"""What an import loads, and what is exported."""

import subprocess
import sys

import httpx2
import pagestream_client
import pagestream_client.openai
from support.processes.waiting import LIMIT_S


def test_every_error_can_be_caught_as_one() -> None:
    errors = [getattr(pagestream_client, name) for name in pagestream_client.__all__]
    errors = [each for each in errors if isinstance(each, type) and issubclass(each, Exception)]
    assert len(errors) == 15
    assert all(issubclass(each, pagestream_client.PagestreamError) for each in errors)


def test_nothing_but_the_wire_contract_and_grpc_is_loaded() -> None:
    code = "import pagestream_client, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    packages = {name.partition(".")[0] for name in loaded.stdout.split()}
    assert not packages & {"torch", "redis", "httpx", "httpx2", "numpy", "pagestream_streams", "pagestream_gateway"}
    assert "google.rpc" not in loaded.stdout.split()


def test_the_transport_names_its_extra_where_the_library_is_missing() -> None:
    code = "import sys; sys.modules['httpx2'] = None; import pagestream_client.openai"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode
    assert "pip install 'pagestream-client[http]'" in done.stderr


def test_the_transport_of_the_openai_client_is_for_both_of_its_forms() -> None:
    resuming = pagestream_client.openai.transport("http://127.0.0.1:1/v1")
    assert isinstance(resuming, httpx2.BaseTransport)
    assert isinstance(resuming, httpx2.AsyncBaseTransport)
