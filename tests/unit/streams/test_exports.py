import subprocess
import sys

import pagestream_streams
import pytest


@pytest.mark.parametrize("name", pagestream_streams.__all__)
def test_every_exported_name_is_there(name: str) -> None:
    assert getattr(pagestream_streams, name).__module__.startswith("pagestream_streams.")
    assert name in dir(pagestream_streams)


def test_constants_of_the_protocol_need_no_redis_client() -> None:
    code = "import sys, pagestream_streams.protocol.ids; print('redis' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert said == "False\n"
