"""The process that talks to Redis leaves torch to its engine's process."""

import subprocess
import sys

CODE = """
import sys
import pagestream_worker.__main__, pagestream_worker.card
sys.exit("torch" in sys.modules)
"""


def test_the_worker_imports_no_torch() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)
