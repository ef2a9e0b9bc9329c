"""What crosses a boundary of the engine's processes: one typed codec (`codec`), and the messages of each boundary.

`worker`: commands to an engine in a process of its own, and its reports. `executor`: plans to a process that computes,
and its answers, on this machine or another one.
"""
