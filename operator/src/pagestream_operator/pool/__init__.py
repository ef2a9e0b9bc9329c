"""What the operator does about one pool: see, decide, act, tell."""
