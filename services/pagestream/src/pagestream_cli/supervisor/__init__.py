"""Keeps child processes running, and ends them in order."""

from pagestream_cli.supervisor.part import PartSpec, PartState
from pagestream_cli.supervisor.restart import RestartPolicy
from pagestream_cli.supervisor.supervisor import Supervisor

__all__ = ["PartSpec", "PartState", "RestartPolicy", "Supervisor"]
