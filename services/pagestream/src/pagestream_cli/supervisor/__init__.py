"""Child processes: kept running, restarted with a delay, and stopped in order."""

from pagestream_cli.supervisor.part import PartSpec, PartState, Standby
from pagestream_cli.supervisor.restart import RestartPolicy
from pagestream_cli.supervisor.supervisor import Supervisor

__all__ = ["PartSpec", "PartState", "RestartPolicy", "Standby", "Supervisor"]
