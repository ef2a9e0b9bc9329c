"""The engine of a worker, in a process of its own or on a thread, and what is observed of its steps."""
