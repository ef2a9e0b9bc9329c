"""The process that talks to Redis leaves torch to its engine's process, and can be ended while it still imports."""

import subprocess
import sys

CODE = """
import sys
import pagestream_worker.__main__, pagestream_worker.card
sys.exit("torch" in sys.modules)
"""


def test_the_worker_imports_no_torch() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=60)


ENDED_WITHIN_THE_IMPORTS = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pagestream_worker.__main__":
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Finder())
from pagestream_worker.entry import main
main()
"""


def test_sigterm_ends_the_command_before_its_modules_are_imported() -> None:
    """By a handler: the first process of a container has no default action, which would end this one by the signal."""
    subprocess.run([sys.executable, "-c", ENDED_WITHIN_THE_IMPORTS], check=True, timeout=60)
