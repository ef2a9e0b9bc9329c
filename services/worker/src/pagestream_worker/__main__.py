"""The start of the command `pagestream-engine`: it can be ended before its modules are imported, which takes seconds.

The first process of a container has no default action for SIGTERM. Without a handler a pod that is deleted while it
starts would stay for all of its time of grace: so would the other pods of a group whose leader has ended, as the
kubelet starts them anew just before they are deleted.
"""

import os
import signal
import sys


def main() -> int:
    """Run the command; returns its exit code."""
    signal.signal(signal.SIGTERM, _exit)
    from pagestream_worker.process import main as run

    return run()


def _exit(*_: object) -> None:
    os._exit(0)  # there is nothing to undo, and an import may catch SystemExit


if __name__ == "__main__":
    sys.exit(main())
