"""The thread that steps the engine, and what is observed of its steps."""
